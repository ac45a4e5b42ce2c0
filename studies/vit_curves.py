"""Train a small vision transformer from scratch on CIFAR-10 with FedAvg and FedMoSWA.

Examples:
    python studies/vit_curves.py OUT --data-dir DATA --device cuda --precision bf16
    python studies/vit_curves.py OUT --draw docs/images/vit_curves.png    # from saved numbers

OUT/numbers.json holds both curves. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study import Numbers, saved_numbers, stage, trained, write_figure

import fedflat
from fedflat.reporting.figures.curves import curves

ALGORITHMS = ("fedavg", "fedmoswa")


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of runs, numbers and the figure")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="vit-tiny(depth=6)")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--local-steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", default="bf16", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--draw", type=Path, metavar="FIGURE", help="only draw this figure, from saved numbers")
    return parser.parse_args(words)


def result_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that determine the results of both runs."""
    return {
        "dataset": options.dataset,
        "model": options.model,
        "partition": "dirichlet(alpha=0.6)",
        "clients": 100,
        "clients_per_round": 10,
        "rounds": options.rounds,
        "local_steps": options.local_steps,
        "batch_size": options.batch_size,
        "lr": 0.1,
        "lr_decay": 0.998,
        "clip": 1.0,
        "augmentation": "crop-flip",
        "eval_every": max(options.rounds // 20, 1),
        "seed": options.seed,
    }


def train_missing(options: argparse.Namespace) -> Path:
    """Train the runs without numbers; returns the file of the numbers."""
    settings = result_settings(options)
    numbers = Numbers(options.out / "numbers.json", **settings, precision=options.precision)
    runs = numbers.part("runs")
    place = {"data_dir": options.data_dir, "device": options.device}
    engine = {"engine__precision": options.precision, "engine__compile": "off"}
    for algorithm in ALGORITHMS:
        if algorithm not in runs:
            with stage(f"training {algorithm}"):
                record = trained(algorithm, options.out / "runs", **settings, **place, **engine)
            runs[algorithm] = {"status": record.status, "seconds": record.seconds, "history": record.history}
            numbers.save()
    return numbers.path


def draw(path: Path, to: Path) -> str:
    """Draw the curves from saved numbers; returns final accuracies and times as text."""
    runs = saved_numbers(path)["runs"]
    write_figure(curves([(name, [run["history"]], "server") for name, run in runs.items()], "accuracy"), to)
    final = {name: run["history"][-1]["test"]["server"]["accuracy"] for name, run in runs.items()}
    return "\n".join(f"{name:10} {100 * value:.1f} %   {runs[name]['seconds']:.0f} s" for name, value in final.items())


def main(words: Sequence[str] | None = None) -> None:
    """Run the study, or draw its figure."""
    options = parse_arguments(words)
    path = options.out / "numbers.json" if options.draw else train_missing(options)
    print(draw(path, options.draw or options.out / "vit_curves.png"))


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as error:
        raise SystemExit(f"vit_curves: {error}") from None
