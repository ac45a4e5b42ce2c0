"""The group of ``fedflat flatness`` commands."""

from __future__ import annotations

import typer

from fedflat.cli.flatness.clients import clients
from fedflat.cli.flatness.generalisation import bounds, gap
from fedflat.cli.flatness.landscape import landscape, path, plane
from fedflat.cli.flatness.log import log
from fedflat.cli.flatness.norms import norms
from fedflat.cli.flatness.sharpness import sharpness
from fedflat.cli.flatness.similarity import similarity
from fedflat.cli.flatness.spectrum import spectrum
from fedflat.cli.flatness.stability import stability
from fedflat.cli.shared.command_group import CommandGroup

flatness = typer.Typer(cls=CommandGroup, no_args_is_help=True)


@flatness.callback()
def about() -> None:
    """Measure flatness around models of runs or weights files: curvature, sharpness, landscapes, generalisation.

    A model is RUN (the run's primary model), RUN:MODEL, or RUN:MODEL@ROUND for runs with --save-every.
    A weights file (.pt, .safetensors) needs --module FILE.py:FUNCTION and --dataset NAME.
    Nothing is retrained, except that `clients` and `similarity` retrain single rounds and `stability` trains runs.

    Example: fedflat flatness spectrum runs/fedavg-digits-seed0 runs/fedmoswa-wima-digits-seed0:wima
    """


for _command in (spectrum, sharpness, norms, landscape, plane, path, clients, similarity, log, gap, bounds, stability):
    flatness.command()(_command)
