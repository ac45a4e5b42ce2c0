"""What a plan costs: rounds, and hours on this machine by a probe of a few local steps for each model and dataset."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from fedflat.algorithms import algorithm
from fedflat.engines.cpu.worker_pool import available_cores
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import device_of
from fedflat.papers.plan import Planned
from fedflat.papers.small import at_hand

EXAMPLES = 64
"""Test examples that a probe evaluates."""
PATIENCE = 60.0
"""Seconds after which no further probe is begun."""


@dataclass(frozen=True)
class Pace:
    """How fast this machine is with one model on one dataset."""

    step: float
    """Seconds of one local step with one backward pass, of as many clients as are trained at once."""
    example: float
    """Seconds to evaluate one example."""
    at_once: int
    clients: int
    examples: int
    """Training examples of all clients together."""
    tested: int

    def seconds(self, config: Config, rounds: int) -> float:
        """How long some rounds of a run take."""
        built, t, f = algorithm(config.algorithm), config.training, config.federation
        steps = t.local_steps or t.local_epochs * math.ceil(self.examples / self.clients / t.batch_size)
        waves = math.ceil(min(f.clients_per_round, self.clients) / self.at_once)
        models = 1 + len(built.averages)
        evaluations = rounds / config.evaluation.every + min(config.evaluation.final, rounds)
        tested = min(self.tested, config.evaluation.examples or self.tested)
        return rounds * waves * steps * built.backward_passes * self.step + evaluations * models * tested * self.example


@dataclass(frozen=True)
class Cost:
    """What is left to be done of a plan."""

    runs: int
    done: int
    rounds: int
    seconds: float | None
    """None where some of it could not be probed."""
    reason: str = ""


def cost_of(runs: Iterable[Planned], probing: bool = True) -> Cost:
    """The rounds that are left, and the time they take by a probe of each model and dataset."""
    runs = list(runs)
    left = [(run, rounds) for run in runs if (rounds := run.rounds_left)]
    total, seconds, reason, begun = sum(rounds for _, rounds in left), 0.0, "", time.monotonic()
    paces: dict[str, Pace] = {}
    for run, rounds in left:
        key = _kind(run.config)
        if not probing or (key not in paces and time.monotonic() - begun > PATIENCE):
            reason = "not probed" if not probing else f"no probe after {PATIENCE:.0f} s"
        elif key not in paces and not at_hand(run.config.data.dataset, run.config.data.dir):
            reason = f"{run.config.data.dataset} is not here yet"
        else:
            try:
                paces[key] = paces.get(key) or probe(run.config)
            except UserError as mistake:
                reason = str(mistake)
                continue
            seconds += paces[key].seconds(run.config, rounds)
    return Cost(len(runs), sum(run.done for run in runs), total, None if reason else seconds, reason)


def probe(config: Config) -> Pace:
    """Two rounds of one local step of plain SGD, of which the second counts."""
    on_gpu = device_of(config).type != "cpu"
    at_once = min(config.federation.clients_per_round, config.engine.lanes) if on_gpu else 1
    workers = 1 if on_gpu else min(config.engine.workers or available_cores(), config.federation.clients_per_round)
    tiny = config.model_copy(
        update={
            "algorithm": "fedavg",
            "init": None,
            "init_head": "given",
            "init_rounds": 0,
            "training": config.training.model_copy(update={"rounds": 2, "local_epochs": 1, "local_steps": 1}),
            "federation": config.federation.model_copy(update={"clients_per_round": at_once, "sampling": "fixed"}),
            "evaluation": config.evaluation.model_copy(update={"every": 2, "final": 0, "examples": EXAMPLES}),
            "engine": config.engine.model_copy(update={"workers": 1, "compile": "off"}),
        }
    )
    watch = _Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(tiny, callbacks=(watch,))
        run.go()
    tested = len(run.problem.data.test)
    clients = len(run.partition.clients)
    step, evaluation = watch.rounds[-1] - watch.rounds[0], watch.evaluations[-1] - watch.rounds[-1]
    examples = sum(len(indices) for indices in run.partition.described_clients)
    return Pace(step, evaluation / min(EXAMPLES, tested) / workers, at_once * workers, clients, examples, tested)


class _Watch(Callback):
    """Notes when rounds and evaluations end."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.evaluations: list[float] = []

    def round_done(self, run: RunView) -> None:
        self.rounds.append(time.monotonic())

    def evaluated(self, run: RunView) -> None:
        self.evaluations.append(time.monotonic())


def _kind(config: Config) -> str:
    """What the pace depends on."""
    data = config.data
    return "\n".join(
        (
            config.model,
            data.dataset,
            data.partition,
            str(data.clients),
            data.augmentation,
            str(config.training.batch_size),
        )
    )
