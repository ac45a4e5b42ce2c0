"""Leave-one-domain-out evaluation: each domain is a client; all but one train, and models are tested on the other.

Examples:
    python studies/pacs.py OUT --data-dir DATA                          # PACS, in DATA/PACS
    python studies/pacs.py OUT --dataset office_home --data-dir DATA    # any dataset with domains

Each combination of left-out domain, algorithm and seed is one run. OUT/numbers.json grows with every run, and an
interrupted study continues; OUT/table.md is the table. The number of a run is the mean test accuracy over the
evaluations of its last quarter. This was fixed beforehand: accuracy on an unseen domain fluctuates between rounds, and
nothing may be selected by it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from study import mean_and_std

from fedflat.api import make_config
from fedflat.data import Dataset, load
from fedflat.errors import UserError
from fedflat.experiment.run import Run
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.papers.document import markdown
from fedflat.text import parse_one, show

ALGORITHMS = ("fedavg", "fedsam", "fedmoswa")
ABOUT = ("dataset", "model", "size", "rounds", "local_steps", "batch_size", "lr", "precision")
"""Options that determine results."""
RunNumbers = dict[str, Any]


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, help="directory of the numbers and the table")
    add("--dataset", default="pacs", help="a dataset with domains (default: %(default)s)")
    add("--data-dir", type=Path, help="directory of its files")
    add("--algorithms", nargs="+", default=ALGORITHMS)
    add("--domains", nargs="+", help="domains to leave out (default: each)")
    add("--seeds", type=int, nargs="+", default=(0, 1, 2))
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    add("--model", default="cnn")
    add("--size", type=int, default=64, help="height and width of the images (default: %(default)s)")
    add("--rounds", type=int, default=100)
    add("--local-steps", type=int, default=15)
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=0.05)
    add("--eval-every", type=int, default=5, help="rounds between evaluations (default: %(default)s)")
    return parser.parse_args(words)


def dataset_without(options: argparse.Namespace, domain: str | None) -> str:
    """The text of the dataset with one domain left out of training, or with none."""
    call = parse_one(options.dataset)
    left_out = {} if domain is None else {"test_domain": domain}
    return show(call.name, {**call.values, "size": options.size, **left_out})


def shared_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of every run."""
    return {
        "model": options.model,
        "partition": "natural",
        "augmentation": "crop-flip",
        "rounds": options.rounds,
        "local_steps": options.local_steps,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "lr_decay": 0.998,
        "weight_decay": 1e-3,
        "eval_every": options.eval_every,
        "device": options.device,
        "engine__precision": options.precision,
        "data_dir": None if options.data_dir is None else str(options.data_dir),
    }


def train(options: argparse.Namespace, data: Dataset, domain: str, algorithm: str, seed: int) -> RunNumbers:
    """Train one algorithm without one domain."""
    clients = len(torch.unique(data.train.groups)) if data.train.groups is not None else 1
    settings = {
        "algorithm": algorithm,
        "seed": seed,
        "dataset": dataset_without(options, domain),
        "clients_per_round": clients,
    }
    start = time.monotonic()
    record = Run(make_config(None, shared_settings(options) | settings), data=data).execute()
    curve = [(line["round"], line["test"]["server"]["accuracy"]) for line in record.history]
    last_quarter = [accuracy for at, accuracy in curve if at > 0.75 * options.rounds]
    return {
        "domain": domain,
        "algorithm": algorithm,
        "seed": seed,
        "accuracy": float(np.mean(last_quarter)) if last_quarter else None,
        "last": curve[-1][1],
        "status": record.status,
        "seconds": round(time.monotonic() - start, 2),
        "curve": curve,
    }


def table(runs: list[RunNumbers], domains: Sequence[str], algorithms: Sequence[str]) -> str:
    """Mean ± std over seeds in per cent: a row per algorithm, a column per left-out domain, and their mean."""
    rows = []
    for algorithm in algorithms:
        by_seed: dict[int, dict[str, float]] = {}
        for run in runs:
            if run["algorithm"] == algorithm and run["accuracy"] is not None:
                by_seed.setdefault(run["seed"], {})[run["domain"]] = 100 * run["accuracy"]
        cells = [mean_and_std([seed[domain] for seed in by_seed.values() if domain in seed]) for domain in domains]
        complete = [seed for seed in by_seed.values() if all(domain in seed for domain in domains)]
        mean = mean_and_std([fmean(seed[domain] for domain in domains) for seed in complete])
        rows.append([f"`{algorithm}`", *cells, mean])
    return markdown(["algorithm", *domains, "mean"], rows) + "\n"


def finished_runs(path: Path, about: dict[str, Any]) -> list[RunNumbers]:
    """The runs in a file of numbers, which must have the same settings."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    if document["settings"] != about:
        raise UserError(f"{path} belongs to a study with other settings; choose another directory")
    runs: list[RunNumbers] = document["runs"]
    return runs


def main(words: Sequence[str] | None = None) -> str:
    """Train the missing runs, and return the table."""
    options = parse_arguments(words)
    create_folder(options.out)
    about = {name: getattr(options, name) for name in ABOUT}
    runs = finished_runs(options.out / "numbers.json", about)
    finished = {(run["domain"], run["algorithm"], run["seed"]) for run in runs}
    domains = options.domains or list(load(dataset_without(options, None), options.data_dir).group_names)
    for domain in domains:
        data = load(dataset_without(options, domain), options.data_dir)
        for algorithm in options.algorithms:
            for seed in options.seeds:
                if (domain, algorithm, seed) in finished:
                    continue
                run = train(options, data, domain, algorithm, seed)
                runs.append(run)
                document = json.dumps({"settings": about, "runs": runs}, indent=1)
                write_atomically(options.out / "numbers.json", document + "\n")
                write_atomically(options.out / "table.md", table(runs, domains, options.algorithms))
                accuracy = f"{100 * (run['accuracy'] or 0):.1f} %"
                print(f"{domain}, {algorithm}, seed {seed}: {accuracy} in {run['seconds']} s", flush=True)
    return table(runs, domains, options.algorithms)


if __name__ == "__main__":
    try:
        print(main())
    except UserError as error:
        raise SystemExit(f"pacs.py: {error}") from None
