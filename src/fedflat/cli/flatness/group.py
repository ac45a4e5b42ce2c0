"""fedflat flatness: how flat the loss is around the models of runs; the commands of the group are put together here."""

from __future__ import annotations

from collections.abc import Callable

import typer

from fedflat.cli.flatness.clients import clients
from fedflat.cli.flatness.generalisation import bounds, gap
from fedflat.cli.flatness.landscape import COMMANDS as LANDSCAPE_COMMANDS
from fedflat.cli.flatness.log import log
from fedflat.cli.flatness.sharpness import sharpness
from fedflat.cli.flatness.spectrum import spectrum
from fedflat.cli.flatness.stability import stability

flatness = typer.Typer(no_args_is_help=True)


@flatness.callback()
def about() -> None:
    """How flat the loss is around models of runs: curvature, sharpness, clients, landscapes, generalisation.

    A model is a run's folder (the model that stands for the run), or RUN:MODEL, or RUN:MODEL@ROUND where the run kept models on the way.
    No run is repeated: clients trains single rounds again, and stability alone trains runs, which are new ones.

    Example: fedflat flatness spectrum runs/fedavg-digits-seed0 runs/fedmoswa-digits-seed0:wima
    """


COMMANDS: tuple[Callable[..., None], ...] = (
    spectrum,
    sharpness,
    *LANDSCAPE_COMMANDS,
    clients,
    log,
    gap,
    bounds,
    stability,
)
for _command in COMMANDS:
    flatness.command()(_command)
