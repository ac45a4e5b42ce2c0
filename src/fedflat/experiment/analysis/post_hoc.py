"""Post-hoc measurements of a run: on its saved models, and on rounds replayed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import flat_fields
from fedflat.data import Dataset
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.task import Task
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Figures, measure_cohort
from fedflat.experiment.analysis.observer import FixedSample
from fedflat.experiment.analysis.reopen import reopen, require_model, state_of
from fedflat.experiment.analysis.replay import (
    Moment,
    Replay,
    missing_state,
    moment_at_checkpoint,
    moment_at_model,
    moment_at_start,
)
from fedflat.experiment.analysis.theory import Theory, theory
from fedflat.experiment.config import Config, FlatnessSettings
from fedflat.experiment.store.checkpoint import CHECKPOINT
from fedflat.experiment.store.run_folder import Record, model_file, saved_rounds
from fedflat.flatness.theory.noise import Constants

Progress = Callable[[str], None]


@dataclass
class PostHoc:
    """A run with its problem and a fixed sample of examples and clients."""

    record: Record
    wanted: FlatnessSettings = field(default_factory=FlatnessSettings)
    own: dict[str, Any] = field(default_factory=dict)
    progress: Progress = lambda text: None

    def __post_init__(self) -> None:
        self.config = _on_this_machine(self.record.config)
        self.problem, self.partition = reopen(
            self.record, config=self.config, method="post_hoc", with_initial_weights=True, **self.own
        )
        self.first = ModelState(*self.problem.initial())
        self.sample = FixedSample(self.problem, self.partition, self.wanted)
        self.algorithm = algorithm(self.config.algorithm)

    @cached_property
    def ended(self) -> int:
        """Number of rounds at the end of the run, or at its last evaluation."""
        if not self.record.history:
            raise UserError(f"{self._where} has no evaluation yet; continue it with fedflat resume {self._where}")
        return self.record.rounds

    def model_rounds(self, name: str = "server") -> list[int]:
        """Rounds at which a model is available: the start, saved rounds, and the end."""
        saved = saved_rounds(self.record.folder.path, name) if self.record.folder else []
        start = [self.config.init_rounds] if name == "server" else []
        return sorted({*start, *saved, *([self.ended] if self._has_last(name) else [])})

    def model(self, rounds: int, name: str = "server") -> ModelState:
        """A model after ``rounds``."""
        if rounds == self.config.init_rounds and name == "server":
            return self.first
        return state_of(
            self.record, name, self.problem, None if rounds == self.ended and self._has_last(name) else rounds
        )

    def _has_last(self, name: str) -> bool:
        if name in self.record.models:
            return True
        return self.record.folder is not None and (self.record.folder.path / model_file(name)).exists()

    @property
    def _where(self) -> str:
        return str(self.record.folder.path) if self.record.folder else "this run"

    def gaps(self) -> dict[str, list[Figures]]:
        """The generalisation gap of every model at every available round."""
        gaps: dict[str, list[Figures]] = {}
        for name in self.record.evaluated or ["server"]:
            for rounds in self.model_rounds(name):
                self.progress(f"gap of {name} after round {rounds}")
                with one_thread():
                    gaps.setdefault(name, []).append({"round": rounds, **self.sample.gap(self.model(rounds, name))})
        return gaps

    def accuracies(self, name: str = "server") -> list[Figures]:
        """Accuracies and feature norms of a model at every available round."""
        name, rows = require_model(self.record, name), []
        for rounds in self.model_rounds(name):
            self.progress(f"accuracies after round {rounds}")
            with one_thread():
                model = self.model(rounds, name)
                rows.append(
                    {"round": rounds, "accuracy": self.sample.classes(model), "features": self.sample.features(model)}
                )
        return rows

    def constants(self, name: str = "server") -> list[Figures]:
        """L, beta, sigma and sigma_g of a model at every available round."""
        name, rows = require_model(self.record, name), []
        for rounds in self.model_rounds(name):
            self.progress(f"gradients after round {rounds}")
            with one_thread():
                constants, gradients = self.sample.constants(self.model(rounds, name))
            rows.append({"round": rounds, "constants": constants.known(), "gradients": gradients})
        return rows

    def theory(self, seen: Sequence[Figures] | None = None) -> Theory:
        """Theorem 5.1 with the run's empirical constants; ``seen`` is the result of ``constants`` if already
        computed.
        """
        rows = [*self.constants(), *self.logged_constants()] if seen is None else seen
        return theory(
            self.config, self.partition, self.problem.data.num_classes, [Constants(**row["constants"]) for row in rows]
        )

    def moments(self) -> tuple[list[Moment], str]:
        """All moments from which a round can be replayed, and the reason why others cannot."""
        moments = {0: moment_at_start(self.algorithm, self.first, self.config)}
        lacks = missing_state(self.algorithm, self.config)
        saved = [rounds for rounds in self.model_rounds() if rounds]
        if not lacks:
            moments |= {
                rounds: moment_at_model(rounds, self.model(rounds), self.algorithm, self.config) for rounds in saved
            }
        if self.record.folder is not None and (self.record.folder.path / CHECKPOINT).exists():
            last = moment_at_checkpoint(self.record.folder, self.algorithm, self.problem, self.config, self.first)
            moments[last.rounds] = last
        left = [rounds for rounds in saved if rounds not in moments]
        missing = f"{self.config.algorithm} needs {lacks}, which only the last checkpoint has"
        why = f"rounds after {', '.join(map(str, left))} cannot be replayed: {missing}" if left else ""
        return [moments[rounds] for rounds in sorted(moments)], why

    def clients(self, numbers: Sequence[int] | None = None, curvature: bool = True) -> tuple[list[Figures], str]:
        """Drift and lambda_max of clients in replayed rounds, and the reason why other rounds cannot be replayed."""
        moments, why = self.moments()
        rows = []
        for moment in moments:
            replay = Replay(
                self.config,
                self.problem,
                self.partition,
                moment,
                workers=1 if self.problem.device.type == "cpu" else None,
            )
            members = replay.members(numbers)
            self.progress(f"replaying round {moment.rounds + 1} with {len(members)} clients")
            outcome = replay.train(members)
            with one_thread():
                figures = measure_cohort(self.algorithm, members, outcome, moment.states)
                if curvature:
                    models = replay.local_models(members, outcome)
                    self.progress(f"curvature of {len(members)} clients' models in round {moment.rounds + 1}")
                    figures["local"] = self.sample.local_curvature(models, members)
            rows.append({"round": moment.rounds + 1, "source": "replayed", **figures})
        return rows, why

    def logged(self) -> list[Figures]:
        """Cohort measurements logged during training."""
        records = [record for record in self.record.history if "cohort" in record.get("flatness", {})]
        return [{"round": record["round"], "source": "logged", **record["flatness"]["cohort"]} for record in records]

    def logged_constants(self) -> list[Figures]:
        """Constants logged during training, at rounds without a saved model."""
        saved = set(self.model_rounds())
        logged = {
            record["round"]: record["flatness"]
            for record in self.record.history
            if "constants" in record.get("flatness", {})
        }
        return [
            {"round": rounds, "constants": row["constants"], "gradients": row["gradients"]}
            for rounds, row in logged.items()
            if rounds not in saved and None not in row["constants"].values()
        ]

    def require_saved_rounds(self) -> None:
        """Reject a run of which only the initial model is available."""
        folder = self.record.folder
        if (
            len(self.model_rounds()) > 1
            or self.logged()
            or (folder is not None and (folder.path / CHECKPOINT).exists())
        ):
            return
        raise UserError(
            f"{self._where} has no checkpoint, no saved models (run --save-every N) and no log (run --flatness every=N)"
        )

    def require_client_vectors(self) -> None:
        """Reject algorithms whose clients have no control variate or dual."""
        if not any(field.vector for field in flat_fields(self.algorithm.client_fields()).values()):
            raise UserError(
                f"clients of {self.config.algorithm} have no control variate or dual; use scaffold or fedmoswa"
            )


def _on_this_machine(config: Config) -> Config:
    """A run's config for the available device."""
    if config.engine.device == "cpu":
        return config
    engine = config.engine.model_copy(update={"device": "auto"})
    if engine.precision == "bf16" and not torch.cuda.is_available():
        engine = engine.model_copy(update={"precision": "float32"})
    return config.model_copy(update={"engine": engine})


def post_hoc(
    record: Record,
    *,
    dataset: Dataset | None = None,
    network: Any = None,
    task: Task | None = None,
    progress: Progress = lambda text: None,
    **wanted: Any,
) -> PostHoc:
    """Open a run for post-hoc measurements; ``wanted`` are settings of the config section ``flatness``."""
    return PostHoc(record, FlatnessSettings(**wanted), {"dataset": dataset, "network": network, "task": task}, progress)
