"""How long a sweep will take on this machine, by a probe of whole rounds where these are short, and of single steps where they are not."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedflat.experiment.callback import Callback, RunView

if TYPE_CHECKING:
    from fedflat.experiment.campaign.sweep import Planned
    from fedflat.experiment.config import Config

SHORT_ROUND = 3.0
"""Seconds up to which whole rounds are probed; steps alone make short rounds look longer than they are."""
PATIENCE = 30.0
"""Seconds after which no further probe is begun."""


def seconds_ahead(runs: Sequence[Planned], at_once: int) -> tuple[float | None, str]:
    """The seconds that are left of a sweep with so many runs at the same time; None, and why, where that cannot be told."""
    from fedflat.algorithms import algorithm
    from fedflat.engines.cpu.worker_pool import available_cores
    from fedflat.errors import UserError
    from fedflat.papers.small import at_hand

    begun, total = time.monotonic(), 0.0
    paces: dict[Config, float] = {}
    for run in runs:
        rounds = run.rounds_left
        if not rounds:
            continue
        if not at_hand(run.config.data.dataset, run.config.data.dir):
            return None, f"{run.config.data.dataset} is not here yet"
        kind = _kind(run.config, at_once)
        if kind not in paces:
            if time.monotonic() - begun > PATIENCE:
                return None, f"no probe after {PATIENCE:.0f} s"
            try:
                paces[kind] = _seconds_per_round(kind)
            except UserError as mistake:
                return None, str(mistake)
        total += rounds * paces[kind] * algorithm(run.config.algorithm).backward_passes
    return total / max(1, min(at_once, available_cores())), ""


def _kind(config: Config, at_once: int) -> Config:
    """What the pace depends on: the config with plain SGD, whatever its seed, its rate and its last round."""
    training = config.training.model_copy(update={"rounds": 3, "lr": 0.01, "lr_decay": 1.0})
    evaluation = config.evaluation.model_copy(update={"final": 0, "save_every": None})
    engine = config.engine.model_copy(update={"compile": "off", "workers": 1 if at_once > 1 else config.engine.workers})
    fresh = {"algorithm": "fedavg", "seed": 0, "init": None, "init_head": "given", "init_rounds": 0}
    return config.model_copy(update={**fresh, "training": training, "evaluation": evaluation, "engine": engine})


def _seconds_per_round(kind: Config) -> float:
    from fedflat.experiment.run import Run
    from fedflat.papers.cost import probe

    rough = probe(kind).seconds(kind, 1)
    if rough > SHORT_ROUND:
        return rough
    watch = _Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Run(kind, callbacks=(watch,)).go()
    return (watch.ends[-1] - watch.ends[0]) / (len(watch.ends) - 1) if len(watch.ends) > 1 else rough


class _Watch(Callback):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round_done(self, run: RunView) -> None:
        self.ends.append(time.monotonic())
