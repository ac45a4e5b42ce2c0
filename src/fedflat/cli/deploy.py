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
    algorithm: str = typer.Option("fedavg", "--algorithm", metavar="TEXT", help="for example scaffold or fedmoswa+asam(rho=0.5)"),
    clients: int = typer.Option(3, "--clients", min=1, metavar="N", help="number of sites"),
) -> None:
    """Write a small Flower project that runs in Flower's simulation and on a real federation.

    Example: fedflat deploy init my-federation --algorithm scaffold --clients 3
    """
    from fedflat.algorithms import algorithm as read
    from fedflat.algorithms import canonical
    from fedflat.deploy.flower import require_flower
    from fedflat.deploy.project import write_project

    text = canonical(read(algorithm))
    require_flower()
    for path in write_project(folder, text, clients):
        print(path)
    print(f"Next: {folder / 'README.md'} says how to start it.")
