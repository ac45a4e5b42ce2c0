"""Test three claims of Caldarola et al. (ECCV 2022) about flatness, with FedAvg, FedSAM and FedASAM on two partitions.

The claims (section 3.2, Table 1 and Figure 4; the paper uses CIFAR-100 and 20,000 rounds):

1. lambda_max of the global model is highest for FedAvg, lower for FedSAM and lowest for FedASAM.
2. With one class per client, local models are flat on their own data, but their average is sharp.
3. With a milder partition, lambda_max of the global model falls over the rounds, and clients have a higher lambda_max
   than with one class each.

    python studies/eccv_claims.py --data-dir ~/data --rounds 1000 --device cuda --precision tf32
    python studies/eccv_claims.py --dataset digits --rounds 5 --device cpu

Settings are the paper's for CIFAR-10: 100 clients, 5 per round, one epoch of batch size 64, learning rate 0.01, weight
decay 0.0004.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from eccv_claims_figure import eccv_claims_figure, table, verdicts
from study import (
    Numbers,
    common_arguments,
    common_settings,
    measuring_precision,
    saved_numbers,
    stage,
    top_eigenvalues,
    trained,
    write_figure,
)

import fedflat
from fedflat.engines.round.contract import ModelState
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.analysis.run_model import RunModel, moment_after, open_model, replay_after
from fedflat.experiment.store.files import write_atomically
from fedflat.experiment.store.run_folder import Record

HARD, MILD = "one class per client", "mild"
METHODS = {
    HARD: {"FedAvg": "fedavg", "FedSAM": "fedsam(rho=0.1)", "FedASAM": "fedasam(rho=0.7)"},
    MILD: {"FedAvg": "fedavg", "FedSAM": "fedsam(rho=0.02)", "FedASAM": "fedasam(rho=0.05)"},
}
"""Algorithms by partition, with the paper's rho for CIFAR-10 (Table 11)."""
IMAGES: dict[str, Any] = {
    "clients": 100,
    "clients_per_round": 5,
    "local_epochs": 1,
    "batch_size": 64,
    "weight_decay": 4e-4,
    "augmentation": "crop-flip",
}
DIGITS: dict[str, Any] = {"clients": 20, "clients_per_round": 5, "local_epochs": 1, "batch_size": 16}
SETTINGS = {"cifar10": IMAGES, "fashion_mnist": {**IMAGES, "augmentation": "none"}, "digits": DIGITS}
LEARNING_RATES = {"cifar10": 0.01, "fashion_mnist": 0.01, "digits": 0.05}


def run_study(arguments: argparse.Namespace) -> Path:
    """Train and measure whatever is missing; returns the file of the numbers."""
    partitions = {HARD: "dirichlet(alpha=0)", MILD: arguments.mild}
    lr = arguments.lr or LEARNING_RATES[arguments.dataset]
    every = max(arguments.rounds // arguments.moments, 1)
    settings = {**SETTINGS[arguments.dataset], **common_settings(arguments)}
    settings |= {"lr": lr, "eval_every": every, "save_every": every}
    names = ("dataset", "rounds", "seed", "examples", "precision", "moments", "mild")
    about = {name: getattr(arguments, name) for name in names}
    numbers = Numbers(arguments.out / "numbers.json", **about, model=settings["model"], lr=lr)
    for label, partition in partitions.items():
        out = arguments.out / "runs" / label.replace(" ", "-")
        for name, text in METHODS[label].items():
            if not _unmeasured_rounds(numbers, label, name, every, arguments.rounds):
                continue
            with stage(f"training {name}, {label}"):
                record = trained(text, out, partition=partition, **settings)
            with stage(f"curvature of {name}, {label}"):
                _measure_run(numbers, label, name, record, every, arguments)
    return numbers.path


def _unmeasured_rounds(numbers: Numbers, partition: str, name: str, every: int, rounds: int) -> list[int]:
    saved = numbers.part("measured", partition, name)
    return [at for at in range(every, rounds + 1, every) if str(at) not in saved]


def _measure_run(
    numbers: Numbers, partition: str, name: str, record: Record, every: int, arguments: argparse.Namespace
) -> None:
    """Measure a run at every round whose model was saved."""
    saved = numbers.part("measured", partition, name)
    missing = _unmeasured_rounds(numbers, partition, name, every, arguments.rounds)
    precision = measuring_precision(arguments.precision)
    server = open_model(record, name="server", device=arguments.device, precision=precision)
    replay = replay_after(server, missing[0])
    for rounds in missing:
        evaluation = next((line for line in record.history if line["round"] == rounds), None)
        if evaluation is None or record.status == "diverged":  # a model that is not finite has no curvature
            return
        saved[str(rounds)] = _measure_round(server.sibling("server", rounds), replay, rounds, arguments)
        saved[str(rounds)]["accuracy"] = evaluation["test"]["server"]["accuracy"]
        numbers.save()


def _measure_round(server: RunModel, replay: Replay, rounds: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Curvature of a global model, of the local models that the next cohort makes of it, and of their average.

    Local models are measured on their own data, the others on all data. The average is weighted by samples, so it is
    the next global model of these methods.
    """
    replay.moment = moment_after(server, replay.problem, rounds)
    members = replay.clients()
    states = replay.local_models(members, replay.train(members))
    local = {
        str(member.number): top_eigenvalues(server.objective(client=member.number, state=_cast(server, state)), 1)[0]
        for member, state in zip(members, states, strict=True)
    }
    weights = torch.stack([state.weights for state in states])
    samples = weights.new_tensor([float(len(member.indices)) for member in members])
    average = states[0]._replace(weights=(samples / samples.sum()) @ weights)
    objective = _on_all_data(server, server.state, arguments)
    return {
        "eigenvalues": top_eigenvalues(objective, 5),
        "train_loss": float(objective.loss()),
        "clients": local,
        "average": top_eigenvalues(_on_all_data(server, _cast(server, average), arguments), 1)[0],
    }


def _on_all_data(server: RunModel, state: ModelState, arguments: argparse.Namespace) -> Any:
    objective = server.objective("train", state=state)
    return objective.subset(min(arguments.examples, objective.examples), arguments.seed)


def _cast(server: RunModel, state: ModelState) -> ModelState:
    """A model in the precision of the measurements."""
    dtype = server.problem.dtype
    return state._replace(weights=state.weights.to(dtype), buffers=state.buffers.to(dtype))


def draw(path: Path) -> str:
    """Draw the figure and write the table from saved numbers; returns the table with the verdicts."""
    numbers = saved_numbers(path)
    write_figure(eccv_claims_figure(numbers), path.parent / "eccv_claims.png")
    text = f"{table(numbers)}\n\n{verdicts(numbers)}\n"
    write_atomically(path.parent / "table.md", text)
    return text


def main(words: list[str] | None = None) -> None:
    """Run the study."""
    parser = common_arguments(str(__doc__).split("\n\n")[0], 1000, "studies/out/eccv_claims")
    parser.add_argument("--lr", type=float, default=None, help="local learning rate; by default the paper's")
    parser.add_argument("--mild", default="dirichlet-lda(alpha=100)", help="the milder partition")
    parser.add_argument("--moments", type=int, default=4, help="number of evenly spaced rounds to measure")
    arguments = parser.parse_args(words)
    path = arguments.out / "numbers.json" if arguments.draw_only else run_study(arguments)
    print(draw(path))


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as error:
        raise SystemExit(f"eccv_claims: {error}") from None
