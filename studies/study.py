"""What studies share: stages with their times, runs that are not made twice, curvature, and numbers that are always whole on disk."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import fedflat
from fedflat.cli.shared.progress import Lines
from fedflat.cli.shared.screen import shown_seconds
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.experiment.store.record import Record
from fedflat.flatness import Ends, Objective, Operator, lanczos
from fedflat.flatness.curvature.trace import hutchinson

TOLERANCE = 0.005
"""How well eigenvalues are known, relative to their size."""


class Numbers:
    """The numbers of a study: a JSON file that is written whole after every addition, so that a study cut off leaves what it has."""

    def __init__(self, path: Path, **about: Any) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self.values.get("about", about) != about:
            raise fedflat.UserError(f"{path} holds a study with other settings; choose another --out or remove it")
        self.values["about"] = about
        create_folder(path.parent)
        self.save()

    def save(self) -> None:
        """Write all there is."""
        write_whole(self.path, json.dumps(plain(self.values), indent=1, allow_nan=False) + "\n")

    def part(self, *names: str) -> dict[str, Any]:
        """The numbers under some names, one inside the other, made where there are none yet."""
        inside = self.values
        for name in names:
            inside = inside.setdefault(name, {})
        return inside


def saved_numbers(path: Path) -> dict[str, Any]:
    """The numbers that a study has written."""
    try:
        return dict(json.loads(path.read_text()))
    except OSError:
        raise fedflat.UserError(f"there is no {path} to draw from; run the study without --draw-only first") from None


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Say what is being done, and then how long it took."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    begun = time.monotonic()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"{what}: {shown_seconds(time.monotonic() - begun)}", file=sys.stderr, flush=True)


def trained(algorithm: str, out: Path, **settings: Any) -> Record:
    """A run, made now, gone on with, or read where it was finished before."""
    (record,) = fedflat.compare(
        [algorithm], seeds=[settings.pop("seed", 0)], out=out, callbacks=(Lines(),), jobs=1, **settings
    ).records
    if record.status == "diverged":
        print(f"{algorithm} diverged: {record.reason}", file=sys.stderr)
    return record


def top_eigenvalues(objective: Objective, count: int, tolerance: float = TOLERANCE, seed: int = 0) -> list[float]:
    """The largest eigenvalues of the Hessian of an objective, descending."""
    found = lanczos(Operator.of_hessian(objective), Ends(min(count, objective.size)), tolerance=tolerance, seed=seed)
    return [float(value) for value in found.values]


def curvature(objective: Objective, count: int = 5, draws: int = 20, seed: int = 0) -> dict[str, Any]:
    """The largest eigenvalues and the trace with its confidence interval, as plain values."""
    operator = Operator.of_hessian(objective)
    found = lanczos(operator, Ends(min(count, objective.size)), tolerance=TOLERANCE, seed=seed)
    trace = hutchinson(operator, draws=draws, seed=seed, values=found.values, vectors=found.vectors)
    eigenvalues = [float(value) for value in found.values]
    return {
        "train_loss": float(objective.loss()),
        "eigenvalues": eigenvalues,
        "converged": found.converged,
        "trace": trace.document(),
    }


def common_arguments(description: str, rounds: int, out: str) -> argparse.ArgumentParser:
    """The arguments that every study takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--dataset",
        default="cifar10",
        type=lambda name: name.replace("-", "_"),
        choices=["cifar10", "fashion_mnist", "digits"],
        help="dataset",
    )
    parser.add_argument("--data-dir", type=Path, default=None, help="where its files are")
    parser.add_argument("--model", default=None, help="model; cnn unless the data are digits, which take mlp")
    parser.add_argument("--rounds", type=int, default=rounds, help="communication rounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument(
        "--examples", type=int, default=2000, help="training examples that curvature and landscapes are taken on"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where to train and measure")
    parser.add_argument(
        "--precision", default="float32", choices=["float32", "tf32", "bf16", "float64"], help="precision of training"
    )
    parser.add_argument(
        "--compile",
        default="off",
        choices=["off", "on", "auto"],
        help="compile training steps, which pays in long runs",
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of runs, numbers and pictures")
    parser.add_argument(
        "--draw-only", action="store_true", help="draw from numbers.json again; train and measure nothing"
    )
    return parser


def common_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of every run that follow from the arguments."""
    return {
        "dataset": arguments.data,
        "data_dir": arguments.data_dir,
        "model": arguments.model or ("mlp" if arguments.data == "digits" else "cnn"),
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "device": arguments.device,
        "workers": 1 if arguments.data == "digits" else None,  # so small that starting processes would take longer
        "engine__precision": arguments.precision,
        "engine__compile": arguments.compile,
        "engine__checkpoint_every": max(arguments.rounds // 10, 10),
    }


def measuring_precision(precision: str) -> str:
    """The precision to measure in: curvature and landscapes are never rounded to bfloat16."""
    return "float32" if precision == "bf16" else precision


def plain(value: Any) -> Any:
    """Nested values without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {str(key): plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_picture(figure: Any, path: Path, dpi: int = 200) -> None:
    """Write a picture as PNG and as PDF."""
    import io

    for ending in ("png", "pdf"):
        drawn = io.BytesIO()
        figure.savefig(drawn, format=ending, dpi=dpi)
        write_whole(path.with_suffix(f".{ending}"), drawn.getvalue())
        print(path.with_suffix(f".{ending}"))
