"""What a round of a vision transformer costs, by the part that is trained: time, memory, bytes sent, what a client keeps.

python studies/vit_round.py OUT                                                    ViT-B/16 at 224 pixels, 10 clients
python studies/vit_round.py OUT --model "vit-tiny(depth=2)" --size 16 --batch-size 4    quickly, on a CPU

The pictures are random, since nothing here depends on them. OUT/vit_round.json has the figures, OUT/vit_round.md the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedflat.api import make_config
from fedflat.data import Dataset, Examples
from fedflat.experiment.callback import Callback
from fedflat.experiment.run import Run
from fedflat.experiment.store.atomic_files import create_folder, write_whole

PARTS = ("all", "lora(rank=8)", "head")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the figures go")
    parser.add_argument("--model", default="vit-b16")
    parser.add_argument("--size", type=int, default=224, help="height and width of the pictures (default: %(default)s)")
    parser.add_argument("--classes", type=int, default=200)
    parser.add_argument("--algorithms", nargs="+", default=("fedavg", "fedmoswa"))
    parser.add_argument("--parts", nargs="+", default=PARTS, help="what is trained (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--lanes", type=int, default=16, help="clients trained at the same time on a GPU (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--local-steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="the last of them is timed (default: %(default)s)")
    parser.add_argument("--precision", default="bf16", choices=("float32", "tf32", "bf16"))
    return parser.parse_args(given)


def random_pictures(wanted: argparse.Namespace) -> Dataset:
    """As many pictures per client as two batches have."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> Examples:
        pixels = torch.randint(0, 256, (count, 3, wanted.size, wanted.size), generator=generator, dtype=torch.uint8)
        return Examples(pixels, torch.arange(count) % wanted.classes)

    names = tuple(str(label) for label in range(wanted.classes))
    every = some(wanted.clients * 2 * wanted.batch_size)
    return Dataset(
        "random pictures", every, every.take(torch.arange(wanted.batch_size)), names, (0.5,) * 3, (0.29,) * 3
    )


class Clock(Callback):
    """When the run began and each round was over, with the device's work done."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def began(self, run: Run) -> None:
        self.round_done(run)

    def round_done(self, run: Run) -> None:
        if run.problem.device.type == "cuda":
            torch.cuda.synchronize()
        self.moments.append(time.monotonic())


def cost_of(wanted: argparse.Namespace, data: Dataset, algorithm: str, part: str) -> dict[str, Any]:
    """One run of a few rounds, and whether what is frozen is still the same afterwards."""
    on_gpu = torch.cuda.is_available()
    settings = {
        "algorithm": algorithm,
        "model": wanted.model,
        "train": part,
        "partition": "iid",
        "clients": wanted.clients,
        "clients_per_round": wanted.clients,
        "rounds": wanted.rounds,
        "local_steps": wanted.local_steps,
        "batch_size": wanted.batch_size,
        "lr": 0.001,
        "eval_every": wanted.rounds,
        "engine__lanes": wanted.lanes,
        "engine__precision": wanted.precision if on_gpu else "float32",
    }
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    run = Run(make_config(None, settings), data=data, callbacks=(clock,))
    frozen = run.problem.frozen.fingerprint()
    record = run.go()
    size, end = len(run.server.model.weights), record.history[-1]
    kept = sum(field.scalars(size) for fields in run.algorithm.client_fields().values() for field in fields)
    return {
        "algorithm": algorithm,
        "train": part,
        "status": record.status,
        "trained": size,
        "of": sum(p.numel() for p in run.problem.model.parameters()),
        "bytes_up_per_client": end["bytes_up"] // (wanted.rounds * wanted.clients),
        "bytes_down_per_client": end["bytes_down"] // (wanted.rounds * wanted.clients),
        "bytes_kept_per_client": 4 * kept,
        "seconds_per_round": round(clock.moments[-1] - clock.moments[-2], 3),
        "peak_memory_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if on_gpu else None,
        "frozen_part_is_the_same": run.problem.frozen.fingerprint() == frozen,
    }


def table(figures: list[dict[str, Any]]) -> str:
    """A row per run."""
    heading = (
        "algorithm",
        "trained part",
        "numbers trained",
        "MB up",
        "MB down",
        "MB kept",
        "seconds per round",
        "GB of GPU memory",
    )
    lines = [f"| {' | '.join(heading)} |", "|" + "---|" * len(heading)]
    for one in figures:
        sent = [f"{one[f'bytes_{way}_per_client'] / 1e6:.2f}" for way in ("up", "down", "kept")]
        memory = "–" if one["peak_memory_gb"] is None else f"{one['peak_memory_gb']:.1f}"
        cells = [
            f"`{one['algorithm']}`",
            f"`{one['train']}`",
            f"{one['trained']:,}",
            *sent,
            f"{one['seconds_per_round']:.2f}",
            memory,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(given: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Every part with every algorithm."""
    wanted = arguments(given)
    create_folder(wanted.out)
    data = random_pictures(wanted)
    figures: list[dict[str, Any]] = []
    for part in wanted.parts:
        for algorithm in wanted.algorithms:
            figures.append(cost_of(wanted, data, algorithm, part))
            about = {name: value for name, value in vars(wanted).items() if name != "out"}
            write_whole(
                wanted.out / "vit_round.json", json.dumps({"settings": about, "runs": figures}, indent=1) + "\n"
            )
            write_whole(wanted.out / "vit_round.md", table(figures))
            print(json.dumps(figures[-1]), flush=True)
    return figures


if __name__ == "__main__":
    print(table(main()))
