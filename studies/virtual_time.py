"""When does asynchrony pay? Accuracy over virtual time of synchronous and asynchronous policies under four algorithms.

Trains FedAvg, SCAFFOLD, FedMoSWA and FedSAM on clients with log-normal speeds, each for the same number of server
updates with three policies: waiting for all clients, a deadline with partial work, and FedBuff. Waiting and FedBuff do
the same work per update; with a deadline, slow clients do less. Writes ``numbers.json``, ``summary.txt``
and a figure. The default is CIFAR-10 with ``cnn``, 100 clients, and Dirichlet(0.1); ``--dataset digits`` takes minutes
on a CPU.

    python studies/virtual_time.py --dataset digits --rounds 100 --out studies/out/virtual_time_digits
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from study import (
    Numbers,
    add_federation_arguments,
    common_arguments,
    common_settings,
    mean_and_std,
    saved_numbers,
    stage,
    top_eigenvalues,
    write_figure,
)

import fedflat
from fedflat.experiment.analysis.run_model import open_model
from fedflat.experiment.store.files import write_atomically
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.tables.summary import series

ALGORITHMS = {"FedAvg": "fedavg", "SCAFFOLD": "scaffold", "FedMoSWA": "fedmoswa", "FedSAM": "fedsam"}
COLOURS = {"synchronous": "#4269d0", "deadline": "#efb118", "FedBuff": "#ff725c"}
WINDOW = 0.1
"""Share of the last evaluations that the accuracy in the summary averages over."""


def policies(deadline: float, buffer: int) -> dict[str, str]:
    """The policies by name; a synchronous round and an update of FedBuff with a buffer of cohort size do equal work."""
    partial_work = f"deadline(seconds={deadline:g},late=partial)"
    return {"synchronous": "wait", "deadline": partial_work, "FedBuff": f"fedbuff(buffer={buffer})"}


def run_study(arguments: argparse.Namespace) -> Path:
    """Train every algorithm with every policy and seed, and save curves, staleness and curvature."""
    settings = common_settings(arguments) | {
        "clients": arguments.clients,
        "clients_per_round": arguments.clients_per_round,
        "local_steps": arguments.local_steps,
        "batch_size": arguments.batch_size,
        "lr": arguments.lr,
        "clip": 10.0,
        "weight_decay": 0.001,
        "clock": arguments.clock,
        "eval_every": max(1, arguments.rounds // 100),
        "save_every": None,
    }
    del settings["seed"]
    about = {name: str(value) for name, value in settings.items() if name not in ("data_dir", "device", "workers")}
    deadline = arguments.deadline or 0.15 * arguments.local_steps
    numbers = Numbers(arguments.out / "numbers.json", **about, seeds=arguments.seeds, deadline=deadline)
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    for policy, text in policies(deadline, arguments.clients_per_round).items():
        out, jobs = arguments.out / "runs" / policy, arguments.jobs
        with stage(f"training, {policy}"):
            comparison = fedflat.compare(
                [*ALGORITHMS.values()], seeds=seeds, out=out, jobs=jobs, progress=False, policy=text, **settings
            )
        for name, algorithm in ALGORITHMS.items():
            records = [record for record in comparison.records if record.config.algorithm == algorithm]
            numbers.part("runs", name)[policy] = [_values_of(record, arguments) for record in records]
        numbers.save()
    return numbers.path


def _values_of(record: Record, arguments: argparse.Namespace) -> dict[str, Any]:
    """Curve over virtual time, final accuracy, curvature, and mean staleness of a run."""
    curve = series(record.history, "server", "accuracy", "virtual_seconds")
    last = [value for _, value in curve[-max(1, round(WINDOW * len(curve))) :]]
    staleness = [entry["staleness"] for entry in record.history if entry.get("staleness") is not None]
    objective = open_model(record, name="server", device=arguments.device).objective("train")
    sample = objective.subset(min(arguments.examples, objective.examples), record.config.seed)
    return {
        "seconds": [x for x, _ in curve],
        "accuracy": [y for _, y in curve],
        "last": float(np.mean(last)),
        "staleness": float(np.mean(staleness)) if staleness else 0.0,
        "lambda_max": top_eigenvalues(sample, 1)[0],
        "status": record.status,
    }


def time_to(values: dict[str, Any], target: float) -> float | None:
    """Virtual seconds until a run first reaches an accuracy."""
    return next((x for x, y in zip(values["seconds"], values["accuracy"], strict=True) if y >= target), None)


def summary(numbers: dict[str, Any]) -> str:
    """A table with one line per algorithm and policy: accuracy, time to a common target, staleness and curvature.

    Values are means over seeds, followed by the standard deviation for accuracy and time to target.
    """
    lines = [
        f"{'algorithm':10} {'policy':12} {'accuracy (%)':>12} {'time (s)':>8} {'to target (s)':>14} {'staleness':>9} "
        f"{'lambda_max':>10}"
    ]
    for name, policies_of in numbers["runs"].items():
        target = 0.95 * min(run["last"] for runs in policies_of.values() for run in runs)  # which every run reaches
        for policy, runs in policies_of.items():
            times = [time_to(run, target) for run in runs]
            reached = [time for time in times if time is not None]
            accuracy = mean_and_std([100 * run["last"] for run in runs])
            time = mean_and_std(reached, ".0f") if len(reached) == len(runs) else "–"
            total, staleness, curvature = (
                float(np.mean([run[field] if field != "seconds" else run[field][-1] for run in runs]))
                for field in ("seconds", "staleness", "lambda_max")
            )
            lines.append(
                f"{name:10} {policy:12} {accuracy:>12} {total:8.0f} {time:>14} {staleness:9.2f} {curvature:10.3g}"
            )
    about = "Target: 95 % of the lowest final accuracy of the algorithm's runs. ±: standard deviation over seeds."
    return "\n".join([*lines, "", about, ""])


def draw(path: Path) -> None:
    """Draw accuracy over virtual time, one panel per algorithm, and write the summary."""
    numbers = saved_numbers(path)
    about = numbers["about"]
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = figure.subplots(1, len(numbers["runs"]), sharey=True, squeeze=False)[0]
    for axes, (name, policies_of) in zip(panels, numbers["runs"].items(), strict=True):
        for policy, runs in policies_of.items():
            grid = np.linspace(0, min(run["seconds"][-1] for run in runs), 200)
            curves = np.array([np.interp(grid, run["seconds"], run["accuracy"]) for run in runs]) * 100
            axes.plot(grid, curves.mean(0), color=COLOURS[policy], label=policy, lw=1.5)
            axes.fill_between(grid, curves.min(0), curves.max(0), color=COLOURS[policy], alpha=0.2, lw=0)
        axes.set_title(name)
        axes.set_xlabel("virtual seconds")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test accuracy (%)")
    panels[-1].legend(frameon=False, loc="lower right")
    seeds = "one seed" if about["seeds"] == 1 else f"mean and range of {about['seeds']} seeds"
    scale = f"{about['dataset']}, {about['model']}, {about['clients']} clients, {about['rounds']} rounds, {seeds}"
    figure.suptitle(scale, fontsize=9)
    write_figure(figure, path.with_name("virtual_time.png"), dpi=150)
    write_atomically(path.with_name("summary.txt"), summary(numbers))
    print(summary(numbers))


def main(words: list[str] | None = None) -> None:
    """Run the study, or draw it again from its numbers."""
    parser = common_arguments(str(__doc__).partition("\n")[0], rounds=1000, out="studies/out/virtual_time")
    add_federation_arguments(parser, clients=100, clients_per_round=10, local_steps=20, lr=0.05)
    parser.add_argument("--clock", default="lognormal(sigma=0.6)", help="virtual time of the clients")
    deadline = "deadline in virtual seconds; default: 1.5 times the median FedAvg client of the default clock"
    parser.add_argument("--deadline", type=float, default=None, help=deadline)
    arguments = parser.parse_args(words)
    draw(arguments.out / "numbers.json" if arguments.draw_only else run_study(arguments))


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as error:
        sys.exit(f"virtual_time: {error}")
