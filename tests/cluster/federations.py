"""A small experiment, run round by round with any engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from fedflat.algorithms.algorithm import flat_state
from fedflat.api import make_config
from fedflat.data import Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Engine
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import ray_engine
from fedflat.experiment.setup.problem import build_problem

NO_OWN: dict[str, Any] = {"data": None, "model": None, "task": None}


def small(**settings: Any) -> Config:
    """A config: digits on a tiny network."""
    defaults = {
        "model": "mlp(hidden=8)",
        "clients": 12,
        "clients_per_round": 5,
        "rounds": 5,
        "local_steps": 2,
        "batch_size": 8,
        "device": "cpu",
        "seed": 3,
    }
    return make_config(settings={**defaults, **settings})


def engine_of(config: Config, workers: int, model: nn.Module | None = None) -> Any:
    """The Ray engine of a config."""
    config = make_config(config, {"engine": "ray", "workers": workers})
    return ray_engine(config, build_problem(config, model=model)[0], {**NO_OWN, "model": model})


@cache
def _cached_problem(text: str) -> tuple[Problem, Partition]:
    """Problem and partition of a config, independent of the algorithm."""
    return build_problem(Config.model_validate(yaml.safe_load(text)))


def walk(
    config: Config, engine: Engine | None = None, rounds: int = 5, model: nn.Module | None = None
) -> dict[str, Tensor]:
    """Everything that server and clients hold after some rounds; the default engine is a loop in this process."""
    problem, partition = (
        _cached_problem(config.model_copy(update={"algorithm": "fedavg"}).to_yaml())
        if model is None
        else build_problem(config, model=model)
    )
    replay = Replay(config, problem, partition, workers=1)
    if engine is not None:
        replay.engine = engine
    loss = torch.zeros(())
    cost: Any = None
    for _ in range(rounds):
        outcome = replay.advance()
        loss, cost = outcome.loss, outcome.cost
    moment = replay.moment
    tensors = {"weights": moment.model.weights, "buffers": moment.model.buffers, "loss": loss}
    tensors |= {f"server/{name}": value for name, value in flat_state(moment.states).items()}
    for number, (state, statistics) in replay._changed.items():
        tensors |= {f"client {number}/{name}": value for name, value in flat_state(state).items()}
        if statistics is not None:
            tensors[f"client {number}/statistics"] = statistics
    tensors["cost"] = torch.tensor([cost.backward_passes, cost.samples, cost.floats_down, cost.floats_up])
    return tensors


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two results of ``walk`` are bit-identical."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)
