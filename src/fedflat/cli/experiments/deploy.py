"""fedflat deploy: real sites with Flower."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import typer

from fedflat.cli.shared.command_group import CommandGroup
from fedflat.cli.shared.completion import complete_algorithm
from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import key_values, print_json, screen, table
from fedflat.display import counted
from fedflat.errors import UserError

MAX_SITES = 10_000
MAX_DAYS = 36_500
deploy = typer.Typer(cls=CommandGroup, no_args_is_help=True)


@deploy.callback()
def about() -> None:
    """Run an algorithm across real sites with Flower.

    Example: fedflat deploy init my-federation --algorithm scaffold --clients 3
    """


@deploy.command()
def init(
    folder: Path = typer.Argument(metavar="DIR", help="new project folder"),
    algorithm: str = typer.Option(
        "fedavg",
        "--algorithm",
        metavar="TEXT",
        help="algorithm, e.g. scaffold or fedmoswa+asam(rho=0.5)",
        autocompletion=complete_algorithm,
    ),
    clients: int = typer.Option(3, "--clients", min=1, max=MAX_SITES, metavar="N", help="number of sites"),
    secure_aggregation: bool = typer.Option(
        False, "--secure-aggregation", help="let the server see only sums of what sites send"
    ),
    as_json: bool = JSON,
) -> None:
    """Create a Flower project that runs in simulation and on a real federation.

    Example: fedflat deploy init my-federation --algorithm scaffold --clients 3
    """
    from fedflat.algorithms import algorithm as parse_algorithm
    from fedflat.algorithms import canonical
    from fedflat.deploy.flower.project import write_project
    from fedflat.deploy.flower.version import require_flower

    parsed_algorithm = parse_algorithm(algorithm)
    require_flower()
    weighting = None
    if secure_aggregation:
        from fedflat.deploy.trust.secure_support import secure_weighting

        weighting = secure_weighting(parsed_algorithm, clients)
    paths = write_project(folder, canonical(parsed_algorithm), clients, weighting)
    if as_json:
        print_json({"folder": folder, "files": list(paths)})
        return
    for path in paths:
        print(path)
    print(f"Next: {folder / 'README.md'} explains how to start it.")


@deploy.command()
def certificates(
    folder: Path = typer.Argument(metavar="DIR", help="output folder; existing files are never overwritten"),
    host: list[str] = typer.Option(
        ["127.0.0.1"], "--host", metavar="TEXT", help="server name or address as seen by the sites; repeatable"
    ),
    sites: int = typer.Option(
        0,
        "--sites",
        min=0,
        max=MAX_SITES,
        metavar="N",
        help="also create keys for N sites and list them in sites.txt, for testing",
    ),
    days: int = typer.Option(365, "--days", min=1, max=MAX_DAYS, metavar="N", help="validity in days"),
    as_json: bool = JSON,
) -> None:
    """Create a certificate authority, a server certificate and a list of sites; print the commands to start with.

    The list, sites.txt, has the public key of every site that may take part. With --sites, also create these keys.

    Example: fedflat deploy certificates secrets --host server.example.org
    """
    from fedflat.deploy.flower.version import require_flower

    require_flower()
    from fedflat.deploy.trust.certificates import start_commands, write_certificates

    paths = write_certificates(folder, host, sites, days)
    commands = start_commands(folder.absolute(), host[0], sites)
    if as_json:
        print_json({"folder": folder, "files": list(paths), "commands": commands})
        return
    for path in paths:
        print(path)
    print(commands)
    authority = shlex.quote(str(folder.absolute() / "ca.crt"))
    print("\nCheck the server, check the project, and start the run:")
    print(f"  fedflat deploy check 127.0.0.1:8000 --root-certificates {authority}")
    print("  fedflat deploy check PROJECT")
    print("  flwr run PROJECT sites --stream")


@deploy.command()
def gateway(
    folder: Path = typer.Argument(metavar="DIR", help="folder written by fedflat deploy certificates"),
    listen: str = typer.Option(
        "127.0.0.1:8443", "--listen", metavar="HOST:PORT", help="address for sites; 0.0.0.0 listens on all interfaces"
    ),
    superlink: str = typer.Option("127.0.0.1:8000", "--superlink", metavar="HOST:PORT", help="the SuperLink's address"),
    as_json: bool = JSON,
) -> None:
    """Forward the sites' requests, and no others, to a SuperLink that listens on this machine only.

    Example: fedflat deploy gateway certificates --listen 0.0.0.0:8443
    """
    from fedflat.deploy.flower.version import require_flower

    require_flower()
    from fedflat.deploy.flower.gateway import FORWARDED, serve_gateway

    def announce() -> None:
        """Print what is forwarded, once the arguments are known to be valid."""
        if as_json:
            print_json({"listen": listen, "superlink": superlink, "forwarded": FORWARDED})
        else:
            print(
                f"Sites reach /v1/fleet/ and /health of the SuperLink {superlink} at {listen}, and nothing else.",
                flush=True,
            )

    serve_gateway(folder, listen, superlink, announce)


@deploy.command()
def check(
    address: str = typer.Argument(metavar="HOST:PORT|DIR", help="the address of a SuperLink, or a project folder"),
    root_certificates: Path | None = typer.Option(
        None, "--root-certificates", metavar="FILE", help="CA certificate that signed the server's (ca.crt)"
    ),
    insecure: bool = typer.Option(False, "--insecure", help="connect without TLS"),
    site: list[int] = typer.Option(
        [],
        "--site",
        metavar="N,...",
        help="for a project: also load the data of these sites; comma-separated or repeated",
    ),
    node_config: str = typer.Option(
        "", "--node-config", metavar="TEXT", help="with --site: the site's --node-config, for hooks that read it"
    ),
    as_json: bool = JSON,
) -> None:
    """Check that a SuperLink is reachable and trusted, or that a project's settings, hooks and data fit together.

    Example: fedflat deploy check server.example.org:8443 --root-certificates ca.crt
    """
    from fedflat.deploy.flower.reach import reach

    if Path(address).is_dir():
        if node_config and not site:
            raise UserError("--node-config needs --site: it describes the site whose data is loaded")
        _check_project(Path(address), site, node_config, as_json)
        return
    if site or node_config:
        raise UserError(f"--site needs a project folder, but {address} is not one; expected one like my-federation")
    expiry = reach(address, root_certificates, insecure)
    if as_json:
        print_json({"address": address, "certificate_valid_until": expiry})
    elif expiry is None:
        print(f"The SuperLink at {address} answers: without TLS; use this only on a single machine.")
    else:
        print(f"The SuperLink at {address} answers: its certificate is valid until {expiry:%Y-%m-%d}.")


def _check_project(folder: Path, sites: list[int], node_config: str, as_json: bool) -> None:
    """Check a project, and print the data of its server and of the given sites."""
    from fedflat.deploy.flower.version import require_flower

    require_flower()
    from flwr.common.config import parse_config_args

    from fedflat.deploy.server.check_project import check_project

    try:
        project = check_project(folder, sites, parse_config_args([node_config]))
    except UserError as error:
        raise UserError(f"{folder} is not ready: {error}") from error
    if as_json:
        print_json({"folder": folder, "ready": not project.missing, **asdict(project)})
        raise typer.Exit(1 if project.missing else 0)
    columns = ("part", "dataset", "training", "test", "outputs")
    rows = [(part.part, part.dataset, part.train, part.test, part.outputs) for part in project.parts]
    screen().print(table(columns, rows, numeric=("training", "test")))
    facts = {
        "privacy": project.privacy or "none",
        "secure aggregation": f"on: {project.sums}" if project.sums else "off: the server sees every update",
    }
    screen().print(key_values(facts))
    for text in project.advice:
        screen().print(text, style="yellow")
    for text in project.missing:
        screen().print(f"Missing: {text}", style="yellow")
    checked = "the server" if not sites else f"the server and of {counted(len(sites), 'site')}"
    verdict = f"settings, model and data of {checked} fit together"
    if project.missing:
        print(f"Not ready: {verdict}, but the items marked 'Missing' above are needed.")
        raise typer.Exit(1)
    print(f"Ready: {verdict}. Start the run with: flwr run {folder} sites --stream")
