"""What Caldarola et al. (ECCV 2022) say of flatness, measured: FedAvg, FedSAM and FedASAM at one class per client and at a milder partition.

Three claims (their section 3.2, Table 1 and Fig. 4, there on CIFAR-100 after 20,000 rounds):

1. lambda_max of the global model is highest for FedAvg, lower for FedSAM, lowest for FedASAM;
2. with one class per client, clients' local models are flat on their own data, but their average is sharp;
3. with a milder partition, lambda_max of the global model falls as rounds pass, and clients' are higher than with one class each.

    python studies/eccv_claims.py --data-dir ~/data --rounds 1000 --device cuda --precision tf32
    python studies/eccv_claims.py --dataset digits --rounds 5 --device cpu

Settings are theirs for CIFAR-10: 100 clients, 5 per round, one epoch of batch 64, rate 0.01, weight decay 0.0004.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from eccv_claims_picture import picture, table, verdicts
from study import (
    Numbers,
    common_arguments,
    common_settings,
    measuring_precision,
    saved_numbers,
    stage,
    top_eigenvalues,
    trained,
    write_picture,
)

import fedflat
from fedflat.engines.round.contract import ModelState
from fedflat.experiment.analysis.local_models import moment_at, replay_at
from fedflat.experiment.analysis.measured import Measured, measured
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.store.atomic_files import write_whole
from fedflat.experiment.store.record import Record

METHODS = {"FedAvg": "fedavg", "FedSAM": "fedsam(rho=0.1)", "FedASAM": "fedasam(rho=0.7)"}
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
LR_SCHEDULES = {"cifar10": 0.01, "fashion_mnist": 0.01, "digits": 0.05}


def study(arguments: argparse.Namespace) -> Path:
    """Train, measure, and write the numbers; returns where they are."""
    partitions = {"one class per client": "dirichlet(alpha=0)", "mild": arguments.mild}
    lr = arguments.lr or LR_SCHEDULES[arguments.data]
    every = max(arguments.rounds // arguments.moments, 1)
    settings = {
        **SETTINGS[arguments.data],
        **common_settings(arguments),
        "lr": lr,
        "eval_every": every,
        "save_every": every,
    }
    about = {
        name: getattr(arguments, name)
        for name in ("data", "rounds", "seed", "examples", "precision", "moments", "mild")
    }
    numbers = Numbers(arguments.out / "numbers.json", **about, model=settings["model"], lr=lr)
    for split_name, partition in partitions.items():
        for name, text in METHODS.items():
            if not _waiting(numbers, split_name, name, every, arguments.rounds):
                continue
            with stage(f"training {name}, {split_name}"):
                record = trained(
                    text, arguments.out / "runs" / split_name.replace(" ", "-"), partition=partition, **settings
                )
            with stage(f"curvature of {name}, {split_name}"):
                _moments(numbers, split_name, name, record, every, arguments)
    return numbers.path


def _waiting(numbers: Numbers, partition: str, name: str, every: int, rounds: int) -> list[int]:
    """The rounds at which a method is still to be measured."""
    found = numbers.part("measured", partition, name)
    return [at for at in range(every, rounds + 1, every) if str(at) not in found]


def _moments(
    numbers: Numbers, partition: str, name: str, record: Record, every: int, arguments: argparse.Namespace
) -> None:
    """Measure a run at each round that it kept a model of."""
    found, waiting = (
        numbers.part("measured", partition, name),
        _waiting(numbers, partition, name, every, arguments.rounds),
    )
    server = measured(
        record, name="server", device=arguments.device, precision=measuring_precision(arguments.precision)
    )
    replay = replay_at(server, waiting[0])
    for rounds in waiting:
        history = next((line for line in record.history if line["round"] == rounds), None)
        if history is None or record.status == "diverged":  # what is not finite has no curvature
            return
        found[str(rounds)] = _moment(server.sibling("server", rounds), replay, rounds, arguments)
        found[str(rounds)]["accuracy"] = history["test"]["server"]["accuracy"]
        numbers.save()


def _moment(server: Measured, replay: Replay, rounds: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The global model after a round on all data; and what the next cohort makes of it: each client's model on its data, their mean on all.

    Their mean is weighted by samples, which makes it the next global model of these methods.
    """
    replay.moment = moment_at(server, replay.problem, rounds)
    members = replay.members()
    local = replay.local_models(members, replay.train(members))
    own = [
        top_eigenvalues(server.objective(client=one.number, state=_like(server, state)), 1)[0]
        for one, state in zip(members, local, strict=True)
    ]
    samples = torch.tensor(
        [float(len(one.indices)) for one in members], dtype=local[0].weights.dtype, device=local[0].weights.device
    )
    mean = (samples / samples.sum()) @ torch.stack([state.weights for state in local])
    spectrum = top_eigenvalues(_on_all(server, server.state, arguments), 5)
    return {
        "eigenvalues": spectrum,
        "train_loss": float(_on_all(server, server.state, arguments).loss()),
        "clients": {str(one.number): value for one, value in zip(members, own, strict=True)},
        "average": top_eigenvalues(_on_all(server, _like(server, local[0]._replace(weights=mean)), arguments), 1)[0],
    }


def _on_all(server: Measured, state: ModelState, arguments: argparse.Namespace) -> Any:
    whole = server.objective("train", state=state)
    return whole.subset(min(arguments.examples, whole.examples), arguments.seed)


def _like(server: Measured, state: ModelState) -> ModelState:
    """A model in the precision in which it is measured."""
    return state._replace(
        weights=state.weights.to(server.problem.dtype), buffers=state.buffers.to(server.problem.dtype)
    )


def draw(path: Path) -> str:
    """The picture and the table, from the numbers alone; returns the table with the verdicts."""
    numbers = saved_numbers(path)
    write_picture(picture(numbers), path.parent / "eccv_claims.png")
    text = f"{table(numbers)}\n\n{verdicts(numbers)}\n"
    write_whole(path.parent / "table.md", text)
    return text


def main(words: list[str] | None = None) -> None:
    """Run the study."""
    parser = common_arguments(str(__doc__).split("\n\n")[0], 1000, "studies/out/eccv_claims")
    parser.add_argument("--lr", type=float, default=None, help="local learning rate; that of the paper unless given")
    parser.add_argument("--mild", default="dirichlet-lda(alpha=100)", help="the milder partition")
    parser.add_argument("--moments", type=int, default=4, help="rounds at which curvature is measured, evenly spaced")
    arguments = parser.parse_args(words)
    path = arguments.out / "numbers.json" if arguments.draw_only else study(arguments)
    print(draw(path))


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as mistake:
        raise SystemExit(f"eccv_claims: {mistake}") from None
