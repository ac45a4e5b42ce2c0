"""Which of four methods finds the flattest minimum: FedAvg, FedSAM, FedASAM with SWA and FedMoSWA on the same partition.

Each is trained for the same rounds on the same clients; then the training loss is looked at around each model, along directions from the
same random numbers, normalised filter by filter, on one scale; and its Hessian's largest eigenvalues and trace are taken on the same
examples.

    python studies/flat_minima.py --dataset cifar10 --data-dir ~/data --rounds 100 --device cuda --precision tf32
    python studies/flat_minima.py --dataset digits --rounds 5 --device cpu

Runs that are finished are not made again, and `--draw-only` draws the picture from the numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from flat_minima_picture import picture
from study import (
    Numbers,
    common_arguments,
    common_settings,
    curvature,
    measuring_precision,
    saved_numbers,
    stage,
    trained,
    write_picture,
)

import fedflat
from fedflat.experiment.analysis.landscapes import landscapes, plane
from fedflat.experiment.analysis.measured import Measured, measured
from fedflat.experiment.store.atomic_files import write_whole
from fedflat.flatness.landscapes.grid import Landscape
from fedflat.reporting.figures.landscapes import plane_picture

# As in docs/cifar10.md: Dirichlet 0.1, 100 clients, 10 per round, 5 epochs of batch 50.
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
    """The four methods: perturbations of Caldarola et al. (2022) for CIFAR-10, their cycle shortened to a twentieth of the rounds."""
    cycle = max(rounds // 20, 1)
    return {
        "FedAvg": "fedavg",
        "FedSAM": "fedsam(rho=0.1)",
        "FedASAM + SWA": f"fedasam(rho=0.7)+cyclic(low={lr / 100:g},length={cycle})+swa",
        "FedMoSWA": "fedmoswa",
    }


def study(arguments: argparse.Namespace) -> Path:
    """Train, measure, and write the numbers; returns where they are."""
    settings = {**SETTINGS[arguments.data], **common_settings(arguments), "every": max(arguments.rounds // 10, 1)}
    methods = algorithms(arguments.rounds, settings["lr"])
    asked = ("data", "rounds", "seed", "examples", "precision", "points", "radius")
    about = {name: getattr(arguments, name) for name in asked} | {
        "model": settings["model"],
        "partition": settings["partition"],
    }
    numbers = Numbers(arguments.out / "numbers.json", **about)
    models: dict[str, Measured] = {}
    for name, text in methods.items():
        with stage(f"training {name}"):
            record = trained(text, arguments.out / "runs", **settings)
        if record.status == "diverged":
            continue  # what is not finite has no curvature
        models[name] = measured(record, device=arguments.device, precision=measuring_precision(arguments.precision))
        figures = numbers.part("methods", name)
        figures |= {"algorithm": text, "model": models[name].name, "status": record.status, "seconds": record.seconds}
        figures["accuracy"] = record.history[-1]["test"][models[name].name]["accuracy"]
        numbers.save()
    for name, model in models.items():
        with stage(f"curvature of {name}"):
            _curvature(numbers, name, model, arguments)
    with stage("landscapes"):
        _landscapes(numbers, models, arguments)
    return numbers.path


def _curvature(numbers: Numbers, name: str, model: Measured, arguments: argparse.Namespace) -> None:
    figures = numbers.part("methods", name)
    if "eigenvalues" in figures:
        return
    whole = model.objective("train")
    objective = whole.subset(min(arguments.examples, whole.examples), arguments.seed)
    figures |= curvature(objective, seed=arguments.seed)
    numbers.save()


def _landscapes(numbers: Numbers, models: dict[str, Measured], arguments: argparse.Namespace) -> None:
    found = numbers.part("landscapes")
    for name, model in models.items():
        if name not in found:
            (one,) = landscapes(
                [model],
                radius=arguments.radius,
                points=arguments.points,
                examples=arguments.examples,
                seed=arguments.seed,
                names=[name],
            ).values()
            found[name] = one.document()
            numbers.save()
    if "plane" not in numbers.values:
        shared = plane(
            list(models.values()),
            points=arguments.points,
            examples=arguments.examples,
            seed=arguments.seed,
            names=list(models),
        )
        numbers.values["plane"] = shared.document()
        numbers.save()


def draw(path: Path) -> None:
    """The pictures, from the numbers alone."""
    numbers = saved_numbers(path)
    write_picture(picture(numbers), path.parent / "flat_minima.png")
    if "plane" in numbers:
        write_picture(plane_picture(Landscape.from_document(numbers["plane"])), path.parent / "plane.png")


def said(numbers: dict[str, Any]) -> str:
    """A line for each method, and whether flatter by the eigenvalue is also better on the test set."""
    methods = numbers["methods"]
    lines = [f"{'method':16} {'lambda_max':>10} {'l_max/l_5':>10} {'trace':>10} {'train loss':>10} {'accuracy %':>10}"]
    for name, f in methods.items():
        first, last = f["eigenvalues"][0], f["eigenvalues"][-1]
        figures = (first, first / last, f["trace"]["value"], f["train_loss"], 100 * f["accuracy"])
        lines.append(f"{name:16} " + " ".join(f"{figure:10.4g}" for figure in figures))
    flattest = min(methods, key=lambda name: methods[name]["eigenvalues"][0])
    best = max(methods, key=lambda name: methods[name]["accuracy"])
    ranks = [
        np.argsort(np.argsort(values))
        for values in zip(*[(f["eigenvalues"][0], -f["accuracy"]) for f in methods.values()], strict=True)
    ]
    agreement = float(np.corrcoef(*ranks)[0, 1])
    return "\n".join(
        [
            *lines,
            "",
            f"flattest by lambda_max: {flattest}; best on the test set: {best}; rank correlation {agreement:+.2f}",
        ]
    )


def main(words: list[str] | None = None) -> None:
    """Run the study."""
    parser = common_arguments(str(__doc__).split("\n\n")[0], 100, "studies/out/flat_minima")
    parser.add_argument("--points", type=int, default=31, help="points along each axis of a landscape")
    parser.add_argument(
        "--radius", type=float, default=1.0, help="how far to look, in norms of the model's own filters"
    )
    arguments = parser.parse_args(words)
    path = arguments.out / "numbers.json" if arguments.draw_only else study(arguments)
    draw(path)
    summary = said(saved_numbers(path))
    write_whole(path.parent / "summary.txt", summary + "\n")
    print(summary)


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as mistake:
        raise SystemExit(f"flat_minima: {mistake}") from None
