"""Compare the flatness of minima found by FedAvg, FedSAM, FedASAM with SWA, and FedMoSWA on the same partition.

All methods train for the same number of rounds on the same clients. The study then evaluates the training loss around
each model along the same filter-normalised random directions on a common scale, and computes the largest Hessian
eigenvalues and the trace on the same examples.

    python studies/flat_minima.py --dataset cifar10 --data-dir ~/data --rounds 100 --device cuda --precision tf32
    python studies/flat_minima.py --dataset digits --rounds 5 --device cpu

Finished runs are not repeated. `--draw-only` draws the figure from saved numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from flat_minima_figure import flat_minima_figure
from study import (
    Numbers,
    common_arguments,
    common_settings,
    curvature,
    measuring_precision,
    saved_numbers,
    stage,
    trained,
    write_figure,
)

import fedflat
from fedflat.experiment.analysis.landscapes import landscapes, plane
from fedflat.experiment.analysis.run_model import RunModel, open_model
from fedflat.experiment.store.files import write_atomically
from fedflat.flatness.landscapes.grid import Landscape
from fedflat.reporting.figures.landscapes import plane_picture

# The settings of docs/cifar10.md.
IMAGES: dict[str, Any] = {
    "partition": "dirichlet(alpha=0.1)",
    "clients": 100,
    "clients_per_round": 10,
    "local_epochs": 5,
    "batch_size": 50,
    "lr": 0.1,
    "lr_decay": 0.998,
    "weight_decay": 0.001,
    "clip": 10.0,
    "training__clip_mode": "grad",
    "federation__weighting": "uniform",
}
DIGITS: dict[str, Any] = {
    "partition": "dirichlet(alpha=0.1)",
    "clients": 50,
    "clients_per_round": 10,
    "local_epochs": 5,
    "batch_size": 10,
    "lr": 0.1,
    "lr_decay": 0.998,
}
SETTINGS = {"cifar10": {**IMAGES, "augmentation": "crop-flip"}, "fashion_mnist": IMAGES, "digits": DIGITS}


def algorithms(rounds: int, lr: float) -> dict[str, str]:
    """The four methods, with rho as in Caldarola et al. (2022) on CIFAR-10 and a cycle of a twentieth of the rounds."""
    cycle = max(rounds // 20, 1)
    return {
        "FedAvg": "fedavg",
        "FedSAM": "fedsam(rho=0.1)",
        "FedASAM + SWA": f"fedasam(rho=0.7)+cyclic(low={lr / 100:g},length={cycle})+swa",
        "FedMoSWA": "fedmoswa",
    }


def run_study(arguments: argparse.Namespace) -> Path:
    """Train and measure whatever is missing; returns the file of the numbers."""
    every = max(arguments.rounds // 10, 1)
    settings = {**SETTINGS[arguments.dataset], **common_settings(arguments), "eval_every": every}
    names = ("dataset", "rounds", "seed", "examples", "precision", "points", "radius")
    about = {name: getattr(arguments, name) for name in names}
    about |= {"model": settings["model"], "partition": settings["partition"]}
    numbers = Numbers(arguments.out / "numbers.json", **about)
    models: dict[str, RunModel] = {}
    for name, text in algorithms(arguments.rounds, settings["lr"]).items():
        with stage(f"training {name}"):
            record = trained(text, arguments.out / "runs", **settings)
        if record.status == "diverged":
            continue  # a model that is not finite has no curvature
        models[name] = open_model(record, device=arguments.device, precision=measuring_precision(arguments.precision))
        method = numbers.part("methods", name)
        method |= {"algorithm": text, "model": models[name].name, "status": record.status, "seconds": record.seconds}
        method["accuracy"] = record.history[-1]["test"][models[name].name]["accuracy"]
        numbers.save()
    for name, model in models.items():
        with stage(f"curvature of {name}"):
            _measure_curvature(numbers, name, model, arguments)
    with stage("landscapes"):
        _measure_landscapes(numbers, models, arguments)
    return numbers.path


def _measure_curvature(numbers: Numbers, name: str, model: RunModel, arguments: argparse.Namespace) -> None:
    method = numbers.part("methods", name)
    if "eigenvalues" in method:
        return
    objective = model.objective("train")
    sample = objective.subset(min(arguments.examples, objective.examples), arguments.seed)
    method |= curvature(sample, seed=arguments.seed)
    numbers.save()


def _measure_landscapes(numbers: Numbers, models: dict[str, RunModel], arguments: argparse.Namespace) -> None:
    grid = {"points": arguments.points, "examples": arguments.examples, "seed": arguments.seed}
    saved = numbers.part("landscapes")
    for name, model in models.items():
        if name not in saved:
            (landscape,) = landscapes([model], radius=arguments.radius, names=[name], **grid).values()
            saved[name] = landscape.document()
            numbers.save()
    if "plane" not in numbers.values:
        numbers.values["plane"] = plane(list(models.values()), names=list(models), **grid).document()
        numbers.save()


def draw(path: Path) -> None:
    """Draw the figures from saved numbers."""
    numbers = saved_numbers(path)
    write_figure(flat_minima_figure(numbers), path.parent / "flat_minima.png")
    if "plane" in numbers:
        write_figure(plane_picture(Landscape.from_document(numbers["plane"])), path.parent / "plane.png")


def summary(numbers: dict[str, Any]) -> str:
    """A line per method, and the rank correlation between flatness and test accuracy."""
    methods = numbers["methods"]
    lines = [f"{'method':16} {'lambda_max':>10} {'l_max/l_5':>10} {'trace':>10} {'train loss':>10} {'accuracy %':>10}"]
    for name, method in methods.items():
        first, last = method["eigenvalues"][0], method["eigenvalues"][-1]
        values = (first, first / last, method["trace"]["value"], method["train_loss"], 100 * method["accuracy"])
        lines.append(f"{name:16} " + " ".join(f"{value:10.4g}" for value in values))
    flattest = min(methods, key=lambda name: methods[name]["eigenvalues"][0])
    best = max(methods, key=lambda name: methods[name]["accuracy"])
    columns = zip(*[(m["eigenvalues"][0], -m["accuracy"]) for m in methods.values()], strict=True)
    correlation = float(np.corrcoef(*[np.argsort(np.argsort(values)) for values in columns])[0, 1])
    best_methods = f"flattest by lambda_max: {flattest}; best on the test set: {best}"
    return "\n".join([*lines, "", f"{best_methods}; rank correlation {correlation:+.2f}"])


def main(words: list[str] | None = None) -> None:
    """Run the study."""
    parser = common_arguments(str(__doc__).split("\n\n")[0], 100, "studies/out/flat_minima")
    parser.add_argument("--points", type=int, default=31, help="points per axis of a landscape")
    parser.add_argument("--radius", type=float, default=1.0, help="extent of a landscape, in norms of the filters")
    arguments = parser.parse_args(words)
    path = arguments.out / "numbers.json" if arguments.draw_only else run_study(arguments)
    draw(path)
    text = summary(saved_numbers(path))
    write_atomically(path.parent / "summary.txt", text + "\n")
    print(text)


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as error:
        raise SystemExit(f"flat_minima: {error}") from None
