"""fedflat deploy: real sites, through Flower."""

from __future__ import annotations

from pathlib import Path

import typer

deploy = typer.Typer(no_args_is_help=True)


@deploy.callback()
def about() -> None:
    """Run an algorithm across real sites, through Flower.

    Example: fedflat deploy init my-federation --algorithm scaffold --clients 3
    """


@deploy.command()
def init(
    folder: Path = typer.Argument(metavar="DIR", help="a new folder for the project"),
    algorithm: str = typer.Option(
        "fedavg", "--algorithm", metavar="TEXT", help="for example scaffold or fedmoswa+asam(rho=0.5)"
    ),
    clients: int = typer.Option(3, "--clients", min=1, metavar="N", help="number of sites"),
) -> None:
    """Write a small Flower project that runs in Flower's simulation and on a real federation.

    Example: fedflat deploy init my-federation --algorithm scaffold --clients 3
    """
    from fedflat.algorithms import algorithm as read
    from fedflat.algorithms import canonical
    from fedflat.deploy.flower.project import write_project
    from fedflat.deploy.flower.version import require_flower

    text = canonical(read(algorithm))
    require_flower()
    for path in write_project(folder, text, clients):
        print(path)
    print(f"Next: {folder / 'README.md'} says how to start it.")


@deploy.command()
def certificates(
    folder: Path = typer.Argument(metavar="DIR", help="where to write them; what is there is never written over"),
    host: list[str] = typer.Option(
        ["127.0.0.1"],
        "--host",
        metavar="TEXT",
        help="a name or address of the server, as sites will call it; may be repeated",
    ),
    sites: int = typer.Option(
        0, "--sites", min=0, metavar="N", help="also make keys for so many sites, to try a federation on one machine"
    ),
    days: int = typer.Option(365, "--days", min=1, metavar="N", help="for how long the certificates are valid"),
) -> None:
    """Write an authority, a certificate of the server, and keys for sites; and say how to start a federation with them.

    Example: fedflat deploy certificates certificates --host server.example.org
    """
    from fedflat.deploy.flower.version import require_flower

    require_flower()
    from fedflat.deploy.trust.certificates import write_certificates
    from fedflat.deploy.trust.commands import secure_federation

    for path in write_certificates(folder, host, sites, days):
        print(path)
    print(secure_federation(folder.absolute(), host[0], sites))


@deploy.command()
def check(
    address: str = typer.Argument(metavar="HOST:PORT", help="the address of a SuperLink"),
    root_certificates: Path | None = typer.Option(
        None,
        "--root-certificates",
        metavar="FILE",
        help="the certificate of the authority that signed the server's (ca.crt)",
    ),
    insecure: bool = typer.Option(False, "--insecure", help="without TLS, for a SuperLink that was started so"),
) -> None:
    """Say whether a SuperLink can be reached and trusted from here, and if not, why.

    Example: fedflat deploy check server.example.org:8000 --root-certificates ca.crt
    """
    from fedflat.deploy.flower.reach import reach

    reached = reach(address, root_certificates, insecure)
    valid = (
        f"its certificate is valid until {reached.until:%Y-%m-%d}"
        if reached.until
        else "without TLS, for one machine alone"
    )
    print(f"The SuperLink at {address} answers: {valid}.")
