"""What the commands of fedflat flatness share: how models are named, the flags of a measurement, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.screen import screen

if TYPE_CHECKING:
    from fedflat.experiment.measured import Measured

MODELS = typer.Argument(metavar="RUN[:MODEL][@ROUND]...", help="models of runs, for example runs/a:wima@50")
ON = typer.Option("train", "--on", metavar="SET", help="train (what all clients have) or test")
CLIENT = typer.Option(None, "--client", metavar="I", min=0, help="on the data of one client, counted from 0", show_default=False)
EXAMPLES = typer.Option(
    None, "--examples", metavar="N", min=1, help="on so many examples, drawn at random [dim](default: all)[/dim]", show_default=False
)
SEED = typer.Option(0, "--seed", min=0, help="seed of everything drawn at random")
BATCH = typer.Option(
    None,
    "--batch",
    min=1,
    help="examples in memory at a time [dim](default: 100 on a CPU, 500 on a GPU)[/dim]",
    show_default=False,
)
DEVICE = typer.Option("auto", "--device", metavar="NAME", help="auto, cpu or cuda")
PRECISION = typer.Option(
    None, "--precision", metavar="NAME", help="float32, tf32 or float64 [dim](default: float32, or as the run)[/dim]", show_default=False
)


def opened(text: str, silent: bool, **options: Any) -> Measured:
    """The model that a text names, its data fetched beforehand where they are not here."""
    from fedflat.cli.downloads import fetch_if_missing
    from fedflat.experiment.measured import measured, reference
    from fedflat.experiment.record import load_record

    fetch_if_missing(load_record(reference(text).run).config, silent)
    return measured(text, **options)


@contextmanager
def told(silent: bool, first: str = "reading") -> Iterator[Callable[[str], None]]:
    """On a terminal, what is being done at the moment; nothing in a pipe."""
    console = screen(stderr=True)
    if silent or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(first) as status:
        yield status.update
