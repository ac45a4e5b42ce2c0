"""Flags that several flatness commands share: the models, the data, and how to measure."""

from __future__ import annotations

import typer

from fedflat.cli.shared.completion import complete_run
from fedflat.cli.shared.flags import no_default, optional
from fedflat.errors import UserError

MODELS = typer.Argument(
    metavar="MODEL...",
    help="RUN (its last average, or the server model), RUN:wima, RUN:server@50, RUN:client3@50 (local model), "
    "or with --module a weights file (.pt, .safetensors)",
    autocompletion=complete_run,
)
MODULE = no_default("--module", "function that builds the torch module of weights files", metavar="FILE.py:FUNCTION")
DATASET = no_default("--dataset", "dataset to measure weights files on (see fedflat data list)", metavar="NAME")
ON = typer.Option("train", "--on", metavar="SET", help="train (all clients' data) or test")
CLIENT = no_default("--client", "measure on one client's data (first client: 0)", metavar="I", min=0)
EXAMPLES = optional("--examples", "number of random examples", "all", metavar="N", min=1)
SUBSETS = optional("--subsets", "number of random subsets of --examples, for error bars", "3", min=1)
BATCH = optional(
    "--batch-size", "examples per forward pass", "by example size; for CIFAR 97 on a CPU, 488 on a GPU", min=1
)
DEVICE = typer.Option("auto", "--device", metavar="NAME", help="auto, cpu or cuda")
PRECISION = optional("--precision", "float32, tf32 or float64", "float32; float64 for float64 runs", metavar="NAME")
OUT = optional(
    "--out",
    "output folder for numbers and figures",
    "flatness/ inside the first run, or beside the first file",
    metavar="FOLDER",
)
DEFAULT_SUBSETS = 3


def number_of_subsets(subsets: int | None, examples: int | None) -> int:
    """Return the number of random subsets of examples to measure on; reject --subsets without --examples."""
    if subsets is not None and examples is None:
        raise UserError("--subsets needs --examples, the number of examples per subset")
    return subsets or DEFAULT_SUBSETS


def data_name(on: str, client: int | None) -> str:
    """Return the name of the data that are measured on, for headings and files."""
    return on if client is None else f"client {client}"
