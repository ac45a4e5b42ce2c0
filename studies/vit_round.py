"""Measure what one round of a vision transformer costs, by trained part: time, memory, bytes sent, and client state.

Examples:
    python studies/vit_round.py OUT                                                       # ViT-B/16, 224 px
    python studies/vit_round.py OUT --model "vit-tiny(depth=2)" --size 16 --batch-size 4  # quick, on a CPU

Images are random, since costs do not depend on them. OUT/vit_round.json holds the numbers, OUT/vit_round.md the table.
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
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.papers.document import markdown

PARTS = ("all", "lora(rank=8)", "head")
HEADING = (
    "algorithm", "trained part", "trained parameters", "MB up", "MB down", "MB kept", "seconds per round",
    "GPU memory, GB",
)  # fmt: skip


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the numbers and the table")
    parser.add_argument("--model", default="vit-b16")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images (default: %(default)s)")
    parser.add_argument("--classes", type=int, default=200)
    parser.add_argument("--algorithms", nargs="+", default=("fedavg", "fedmoswa"))
    parser.add_argument("--parts", nargs="+", default=PARTS, help="trained parts (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--lanes", type=int, default=16, help="clients trained at once on a GPU (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--local-steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="rounds; the last is timed (default: %(default)s)")
    parser.add_argument("--precision", default="bf16", choices=("float32", "tf32", "bf16"))
    return parser.parse_args(words)


def random_images(options: argparse.Namespace) -> Dataset:
    """A dataset with two batches of random images per client."""
    generator = torch.Generator().manual_seed(0)
    count = options.clients * 2 * options.batch_size
    shape = (count, 3, options.size, options.size)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    train = Examples(pixels, torch.arange(count) % options.classes)
    test = train.take(torch.arange(options.batch_size))
    classes = tuple(str(label) for label in range(options.classes))
    return Dataset("random images", train, test, classes, (0.5,) * 3, (0.29,) * 3)


class RoundClock(Callback):
    """Records when the run started and when each round ended, including work queued on the GPU."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def began(self, run: Run) -> None:
        self.round_done(run)

    def round_done(self, run: Run) -> None:
        if run.problem.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.monotonic())


def round_cost(options: argparse.Namespace, data: Dataset, algorithm: str, part: str) -> dict[str, Any]:
    """The cost of one round, and whether the frozen part is unchanged afterwards."""
    on_gpu = torch.cuda.is_available()
    settings = {
        "algorithm": algorithm,
        "model": options.model,
        "train": part,
        "partition": "iid",
        "clients": options.clients,
        "clients_per_round": options.clients,
        "rounds": options.rounds,
        "local_steps": options.local_steps,
        "batch_size": options.batch_size,
        "lr": 0.001,
        "eval_every": options.rounds,
        "engine__lanes": options.lanes,
        "engine__precision": options.precision if on_gpu else "float32",
    }
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = RoundClock()
    run = Run(make_config(None, settings), data=data, callbacks=(clock,))
    frozen = run.problem.frozen.fingerprint()
    record = run.execute()
    size, last = len(run.server.model.weights), record.history[-1]
    state = sum(field.scalars(size) for fields in run.algorithm.client_fields().values() for field in fields)
    return {
        "algorithm": algorithm,
        "train": part,
        "status": record.status,
        "trained": size,
        "of": sum(p.numel() for p in run.problem.model.parameters()),
        "bytes_up_per_client": last["bytes_up"] // (options.rounds * options.clients),
        "bytes_down_per_client": last["bytes_down"] // (options.rounds * options.clients),
        "bytes_kept_per_client": 4 * state,
        "seconds_per_round": round(clock.times[-1] - clock.times[-2], 3),
        "peak_memory_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if on_gpu else None,
        "frozen_part_is_the_same": run.problem.frozen.fingerprint() == frozen,
    }


def table(costs: list[dict[str, Any]]) -> str:
    """A Markdown table with one row per run."""
    rows = []
    for cost in costs:
        megabytes = [f"{cost[f'bytes_{kind}_per_client'] / 1e6:.2f}" for kind in ("up", "down", "kept")]
        memory = "–" if cost["peak_memory_gb"] is None else f"{cost['peak_memory_gb']:.1f}"
        names, seconds = [f"`{cost['algorithm']}`", f"`{cost['train']}`"], f"{cost['seconds_per_round']:.2f}"
        rows.append([*names, f"{cost['trained']:,}", *megabytes, seconds, memory])
    return markdown(HEADING, rows) + "\n"


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure every algorithm on every part."""
    options = parse_arguments(words)
    create_folder(options.out)
    data = random_images(options)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    costs: list[dict[str, Any]] = []
    for part in options.parts:
        for algorithm in options.algorithms:
            costs.append(round_cost(options, data, algorithm, part))
            document = json.dumps({"settings": settings, "runs": costs}, indent=1)
            write_atomically(options.out / "vit_round.json", document + "\n")
            write_atomically(options.out / "vit_round.md", table(costs))
            print(json.dumps(costs[-1]), flush=True)
    return costs


if __name__ == "__main__":
    print(table(main()))
