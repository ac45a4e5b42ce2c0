"""Leave one domain out: each domain is a client, all but one train, and the one left out is what models are tested on.

python studies/pacs.py OUT --dataset FOLDER                        PACS, which lies in FOLDER/PACS
python studies/pacs.py OUT --dataset office_home --dataset FOLDER  any other dataset with domains

Every fold, algorithm and seed is one run. OUT/numbers.json has each of them as soon as it is over, and a study that was interrupted
goes on where it was; OUT/table.md is the table. The figure of a run is the mean test accuracy over the evaluations of its last quarter,
fixed beforehand: on a domain that nobody trains on, accuracy goes up and down between rounds, and nothing may be chosen by it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.api import make_config
from fedflat.data import Dataset, load
from fedflat.errors import UserError
from fedflat.experiment.run import Run
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.text import parse_one, show

ALGORITHMS = ("fedavg", "fedsam", "fedmoswa")
Numbers = dict[str, Any]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the numbers and the table go")
    parser.add_argument("--dataset", default="pacs", help="a dataset with domains (default: %(default)s)")
    parser.add_argument("--dataset", type=Path, help="the data folder (default: as everywhere in fedflat)")
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--domains", nargs="+", help="the domains to leave out (default: each)")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--size", type=int, default=64, help="height and width of the pictures (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--local-steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--eval-every", type=int, default=5, help="rounds between evaluations (default: %(default)s)")
    return parser.parse_args(given)


def fold(wanted: argparse.Namespace, domain: str | None) -> str:
    """The dataset with one domain left out, as text."""
    call = parse_one(wanted.dataset)
    left_out = {} if domain is None else {"test_domain": domain}
    return show(call.name, {**call.values, "size": wanted.size, **left_out})


def settings(wanted: argparse.Namespace) -> dict[str, Any]:
    """What all runs have in common."""
    return {
        "model": wanted.model,
        "partition": "natural",
        "augmentation": "crop-flip",
        "rounds": wanted.rounds,
        "local_steps": wanted.steps,
        "batch_size": wanted.batch,
        "lr": wanted.lr,
        "lr_decay": 0.998,
        "weight_decay": 1e-3,
        "eval_every": wanted.every,
        "device": wanted.device,
        "engine__precision": wanted.precision,
        "data_dir": None if wanted.data is None else str(wanted.data),
    }


def one_run(wanted: argparse.Namespace, data: Dataset, domain: str, algorithm: str, seed: int) -> Numbers:
    """One algorithm on one fold with one seed."""
    clients = len(torch.unique(data.train.groups)) if data.train.groups is not None else 1
    own = {"algorithm": algorithm, "seed": seed, "data": fold(wanted, domain), "clients_per_round": clients}
    begun = time.monotonic()
    record = Run(make_config(None, settings(wanted) | own), data=data).go()
    curve = [(line["round"], line["test"]["server"]["accuracy"]) for line in record.history]
    last = [accuracy for round, accuracy in curve if round > 0.75 * wanted.rounds]
    return {
        "domain": domain,
        "algorithm": algorithm,
        "seed": seed,
        "accuracy": float(np.mean(last)) if last else None,
        "last": curve[-1][1],
        "status": record.status,
        "seconds": round(time.monotonic() - begun, 2),
        "curve": curve,
    }


def table(numbers: list[Numbers], domains: Sequence[str], algorithms: Sequence[str]) -> str:
    """Mean and standard deviation over seeds in per cent: a row per algorithm, a column per domain left out, and their mean."""
    lines = ["| algorithm | " + " | ".join([*domains, "mean"]) + " |", "|---|" + "---|" * (len(domains) + 1)]
    for algorithm in algorithms:
        by_seed: dict[int, dict[str, float]] = {}
        for one in numbers:
            if one["algorithm"] == algorithm and one["accuracy"] is not None:
                by_seed.setdefault(one["seed"], {})[one["domain"]] = one["accuracy"]
        cells = [shown([found[domain] for found in by_seed.values() if domain in found]) for domain in domains]
        whole = [
            float(np.mean([found[domain] for domain in domains]))
            for found in by_seed.values()
            if all(d in found for d in domains)
        ]
        lines.append(f"| `{algorithm}` | " + " | ".join([*cells, shown(whole)]) + " |")
    return "\n".join([*lines, ""])


def shown(values: list[float]) -> str:
    """Mean and standard deviation of some accuracies, in per cent."""
    if not values:
        return "–"
    mean = f"{100 * np.mean(values):.1f}"
    return f"{mean} ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else mean


def done_before(path: Path, about: Numbers) -> list[Numbers]:
    """The runs of an earlier start with the same settings."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    if document["settings"] != about:
        raise UserError(f"{path} is of a study with other settings; choose another folder")
    runs: list[Numbers] = document["runs"]
    return runs


def main(given: Sequence[str] | None = None) -> str:
    """Run what is not there yet, and return the table."""
    wanted = arguments(given)
    create_folder(wanted.out)
    about = {
        name: value
        for name, value in vars(wanted).items()
        if name in ("dataset", "model", "size", "rounds", "steps", "batch", "lr", "precision")
    }
    numbers = done_before(wanted.out / "numbers.json", about)
    known = load(fold(wanted, None), wanted.data).group_names
    domains = wanted.domains or list(known)
    for domain in domains:
        data = load(fold(wanted, domain), wanted.data)
        for algorithm in wanted.algorithms:
            for seed in wanted.seeds:
                if any((one["domain"], one["algorithm"], one["seed"]) == (domain, algorithm, seed) for one in numbers):
                    continue
                numbers.append(one_run(wanted, data, domain, algorithm, seed))
                write_whole(
                    wanted.out / "numbers.json", json.dumps({"settings": about, "runs": numbers}, indent=1) + "\n"
                )
                write_whole(wanted.out / "table.md", table(numbers, domains, wanted.algorithms))
                new = numbers[-1]
                print(
                    f"{domain}, {algorithm}, seed {seed}: {100 * (new['accuracy'] or 0):.1f} % in {new['seconds']} s",
                    flush=True,
                )
    return table(numbers, domains, wanted.algorithms)


if __name__ == "__main__":
    try:
        print(main())
    except UserError as error:
        raise SystemExit(f"pacs.py: {error}") from None
