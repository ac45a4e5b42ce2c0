"""A small vision transformer trained from nothing on CIFAR-10 by FedAvg and FedMoSWA.

python studies/vit_curves.py OUT --data-dir DATA --device cuda --precision bf16
python studies/vit_curves.py OUT --draw docs/images/vit_curves.png       from what was saved

OUT/numbers.json has both curves; finished runs are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study import Numbers, saved_numbers, stage, trained, write_picture

import fedflat
from fedflat.reporting.figures.curves import curves

ALGORITHMS = ("fedavg", "fedmoswa")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where runs, numbers and the picture go")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="vit-tiny(depth=6)")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--local-steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", default="bf16", choices=("float32", "tf32", "bf16"))
    parser.add_argument(
        "--draw", type=Path, metavar="PICTURE", help="run nothing; draw this picture from what was saved"
    )
    return parser.parse_args(given)


def settings(wanted: argparse.Namespace) -> dict[str, Any]:
    """What both runs have in common, and what decides their results."""
    return {
        "dataset": wanted.data,
        "model": wanted.model,
        "partition": "dirichlet(alpha=0.6)",
        "clients": 100,
        "clients_per_round": 10,
        "rounds": wanted.rounds,
        "local_steps": wanted.steps,
        "batch_size": wanted.batch,
        "lr": 0.1,
        "lr_decay": 0.998,
        "clip": 1.0,
        "augmentation": "crop-flip",
        "eval_every": max(wanted.rounds // 20, 1),
        "seed": wanted.seed,
    }


def study(wanted: argparse.Namespace) -> Path:
    """Train what is missing; returns where the numbers are."""
    shared = settings(wanted)
    numbers = Numbers(wanted.out / "numbers.json", **shared, precision=wanted.precision)
    found = numbers.part("runs")
    where = {
        "data_folder": wanted.data_dir,
        "device": wanted.device,
        "engine__precision": wanted.precision,
        "engine__compile": "off",
    }
    for algorithm in ALGORITHMS:
        if algorithm not in found:
            with stage(f"training {algorithm}"):
                record = trained(algorithm, wanted.out / "runs", **shared, **where)
            found[algorithm] = {"status": record.status, "seconds": record.seconds, "history": record.history}
            numbers.save()
    return numbers.path


def draw(path: Path, to: Path) -> str:
    """The picture, from the numbers alone; returns what they come to."""
    runs = saved_numbers(path)["runs"]
    write_picture(curves([(name, [one["history"]], "server") for name, one in runs.items()], "accuracy"), to)
    last = {name: one["history"][-1]["test"]["server"]["accuracy"] for name, one in runs.items()}
    return "\n".join(
        f"{name:10} {100 * accuracy:.1f} %   {runs[name]['seconds']:.0f} s" for name, accuracy in last.items()
    )


def main(given: Sequence[str] | None = None) -> None:
    """Run the study, or draw it."""
    wanted = arguments(given)
    path = wanted.out / "numbers.json" if wanted.draw else study(wanted)
    print(draw(path, wanted.draw or wanted.out / "vit_curves.png"))


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as mistake:
        raise SystemExit(f"vit_curves: {mistake}") from None
