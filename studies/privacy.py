"""What does privacy cost? Accuracy of FedAvg and FedSAM under differential privacy for several budgets.

Trains both algorithms with central noise for every epsilon and seed, and without privacy. Writes ``numbers.json`` and
``table.md``. The default is CIFAR-10 with ``cnn`` and 1000 clients; ``--dataset digits`` takes minutes on a CPU:

    python studies/privacy.py --dataset digits --model 'mlp(hidden=32)' --clients 400 --rounds 20 --local-steps 4 \\
        --batch-size 4 --out studies/out/privacy_digits
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from study import (
    Numbers,
    add_federation_arguments,
    common_arguments,
    common_settings,
    mean_and_std,
    saved_numbers,
    stage,
)

import fedflat
from fedflat.experiment.store.files import write_atomically
from fedflat.papers.document import markdown

ALGORITHMS = {"FedAvg": "fedavg", "FedSAM": "fedsam"}
BUDGETS = (2, 4, 8, 16, None)
"""Values of epsilon; None is a run without clipping and noise."""


def run_study(arguments: argparse.Namespace) -> Path:
    """Train every algorithm with every budget and seed, and save the final accuracy and epsilon."""
    settings = common_settings(arguments) | {
        "partition": "iid",
        "clients": arguments.clients,
        "clients_per_round": arguments.clients_per_round,
        "local_steps": arguments.local_steps,
        "batch_size": arguments.batch_size,
        "lr": arguments.lr,
        "federation__weighting": "uniform",
        "eval_every": max(1, arguments.rounds // 10),
    }
    del settings["seed"]
    about = {name: str(value) for name, value in settings.items() if name not in ("data_dir", "device", "workers")}
    numbers = Numbers(arguments.out / "numbers.json", **about, clip=arguments.clip, delta=arguments.delta)
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    for epsilon in BUDGETS:
        name = "none" if epsilon is None else str(epsilon)
        privacy = epsilon and f"dp(epsilon={epsilon},clip={arguments.clip:g},delta={arguments.delta:g})"
        with stage(f"training, epsilon {name}"):
            comparison = fedflat.compare(
                [*ALGORITHMS.values()],
                seeds=seeds,
                out=arguments.out / "runs" / name,
                jobs=arguments.jobs,
                progress=False,
                privacy=privacy,
                **settings,
            )
        for label, algorithm in ALGORITHMS.items():
            last = [record.history[-1] for record in comparison.records if record.config.algorithm == algorithm]
            numbers.part("runs", label)[name] = [
                {"accuracy": entry["test"]["server"]["accuracy"], "epsilon": entry.get("epsilon")} for entry in last
            ]
        numbers.save()
    return numbers.path


def table(path: Path) -> None:
    """Write a Markdown table: one row per budget, mean accuracy and standard deviation over seeds per algorithm."""
    runs = saved_numbers(path)["runs"]
    rows = []
    for name in next(iter(runs.values())):
        accuracies = [[100 * run["accuracy"] for run in budgets[name]] for budgets in runs.values()]
        rows.append([name, *map(mean_and_std, accuracies)])
    text = markdown(["epsilon", *runs], rows) + "\n"
    write_atomically(path.with_name("table.md"), text)
    print(text, end="")


def main(words: list[str] | None = None) -> None:
    """Run the study, or write its table again from its numbers."""
    parser = common_arguments(str(__doc__).partition("\n")[0], rounds=200, out="studies/out/privacy")
    add_federation_arguments(parser, clients=1000, clients_per_round=100, local_steps=10, lr=0.1)
    parser.add_argument("--clip", type=float, default=0.5, help="clipping norm")
    parser.add_argument("--delta", type=float, default=1e-5, help="delta of the guarantee")
    arguments = parser.parse_args(words)
    table(arguments.out / "numbers.json" if arguments.draw_only else run_study(arguments))


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as error:
        sys.exit(f"privacy: {error}")
