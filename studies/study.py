"""Shared by the studies: timed stages, runs that are trained once, curvature, and numbers saved after every step."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import fedflat
from fedflat.cli.shared.screen import shown_seconds
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.experiment.store.run_folder import Record
from fedflat.flatness import Ends, Objective, Operator, lanczos
from fedflat.flatness.curvature.trace import estimate_trace
from fedflat.reporting.progress import Lines

TOLERANCE = 0.005
"""Relative accuracy of eigenvalues."""


class Numbers:
    """The numbers of a study in one JSON file, rewritten atomically after every addition.

    Args:
        path: the file; an existing one is continued.
        about: the settings of the study. A file with other settings raises an error.
    """

    def __init__(self, path: Path, **about: Any) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self.values.get("about", about) != about:
            raise fedflat.UserError(f"{path} belongs to a study with other settings; choose another --out or remove it")
        self.values["about"] = about
        create_folder(path.parent)
        self.save()

    def save(self) -> None:
        """Write the file."""
        write_atomically(self.path, json.dumps(plain(self.values), indent=1, allow_nan=False) + "\n")

    def part(self, *names: str) -> dict[str, Any]:
        """The nested dict under some names, created if missing."""
        inside = self.values
        for name in names:
            inside = inside.setdefault(name, {})
        return inside


def saved_numbers(path: Path) -> dict[str, Any]:
    """The numbers that a study has written."""
    try:
        return dict(json.loads(path.read_text()))
    except OSError:
        raise fedflat.UserError(f"{path} does not exist; run the study without --draw-only first") from None


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print the name of a stage, and its duration when it has finished."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"{name}: {shown_seconds(time.monotonic() - start)}", file=sys.stderr, flush=True)


def trained(algorithm: str, out: Path, **settings: Any) -> Record:
    """The record of a run; trains, resumes, or loads a finished run from ``out``."""
    seeds = [settings.pop("seed", 0)]
    comparison = fedflat.compare(
        [algorithm], seeds=seeds, out=out, callbacks=(Lines(),), jobs=1, progress=False, **settings
    )
    (record,) = comparison.records
    if record.status == "diverged":
        print(f"{algorithm} diverged: {record.reason}", file=sys.stderr)
    return record


def top_eigenvalues(objective: Objective, count: int, tolerance: float = TOLERANCE, seed: int = 0) -> list[float]:
    """The largest eigenvalues of an objective's Hessian, in descending order."""
    ends = Ends(min(count, objective.size))
    spectrum = lanczos(Operator.of_hessian(objective), ends, tolerance=tolerance, seed=seed)
    return [float(value) for value in spectrum.values]


def curvature(objective: Objective, count: int = 5, draws: int = 20, seed: int = 0) -> dict[str, Any]:
    """Training loss, the ``count`` largest eigenvalues, and the trace with its confidence interval."""
    operator = Operator.of_hessian(objective)
    spectrum = lanczos(operator, Ends(min(count, objective.size)), tolerance=TOLERANCE, seed=seed)
    trace = estimate_trace(operator, draws=draws, seed=seed, values=spectrum.values, vectors=spectrum.vectors)
    return {
        "train_loss": float(objective.loss()),
        "eigenvalues": [float(value) for value in spectrum.values],
        "converged": spectrum.converged,
        "trace": trace.document(),
    }


def common_arguments(description: str, rounds: int, out: str) -> argparse.ArgumentParser:
    """A parser with the options that flatness studies share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    datasets = ["cifar10", "fashion_mnist", "digits"]
    add("--dataset", default="cifar10", type=lambda name: name.replace("-", "_"), choices=datasets, help="dataset")
    add("--data-dir", type=Path, default=None, help="directory of its files")
    add("--model", default=None, help="model; by default cnn, or mlp for digits")
    add("--rounds", type=int, default=rounds, help="communication rounds")
    add("--seed", type=int, default=0, help="seed of the runs")
    add("--examples", type=int, default=2000, help="training examples for curvature and landscapes")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="device to train and measure on")
    precisions = ["float32", "tf32", "bf16", "float64"]
    add("--precision", default="float32", choices=precisions, help="precision of training")
    add("--compile", default="off", choices=["off", "on", "auto"], help="compile training steps; pays in long runs")
    add("--out", type=Path, default=Path(out), help="directory of runs, numbers and figures")
    add("--draw-only", action="store_true", help="draw again from numbers.json without training or measuring")
    return parser


def add_federation_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options of studies that choose clients, local training and seeds themselves, with these defaults."""
    add = parser.add_argument
    add("--clients", type=int, default=defaults["clients"], help="number of clients")
    add("--clients-per-round", type=int, default=defaults["clients_per_round"], help="clients per round")
    add("--local-steps", type=int, default=defaults["local_steps"], help="local steps per round")
    add("--batch-size", type=int, default=50, help="local batch size")
    add("--lr", type=float, default=defaults["lr"], help="local learning rate")
    add("--seeds", type=int, default=3, help="number of seeds, from --seed on")
    add("--jobs", type=int, default=1, help="concurrent runs")


def common_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The run settings that follow from the common options."""
    is_tiny = arguments.dataset == "digits"
    return {
        "dataset": arguments.dataset,
        "data_dir": arguments.data_dir,
        "model": arguments.model or ("mlp" if is_tiny else "cnn"),
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "device": arguments.device,
        "workers": 1 if is_tiny else None,  # starting processes would take longer than training
        "engine__precision": arguments.precision,
        "engine__compile": arguments.compile,
        "engine__checkpoint_every": max(arguments.rounds // 10, 10),
    }


def measuring_precision(precision: str) -> str:
    """The precision for curvature and landscapes, which bfloat16 is too coarse for."""
    return "float32" if precision == "bf16" else precision


def mean_and_std(values: Sequence[float], form: str = ".1f") -> str:
    """Mean and, with several values, standard deviation; a dash without values."""
    if not values:
        return "–"
    mean = f"{fmean(values):{form}}"
    return f"{mean} ± {stdev(values):{form}}" if len(values) > 1 else mean


def plain(value: Any) -> Any:
    """Nested values with None for numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_figure(figure: Any, path: Path, dpi: int = 200) -> None:
    """Write a figure as PNG and PDF, and print both paths."""
    for suffix in ("png", "pdf"):
        content = io.BytesIO()
        figure.savefig(content, format=suffix, dpi=dpi)
        write_atomically(path.with_suffix(f".{suffix}"), content.getvalue())
        print(path.with_suffix(f".{suffix}"))


def replace_section(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between the marker lines ``begin`` and ``end`` of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise fedflat.UserError(f"{page} has no place for the results; expected the lines {begin} and {end}")
    write_atomically(page, f"{before}{begin}\n{text}\n{end}{after}")
