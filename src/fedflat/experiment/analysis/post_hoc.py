"""A run looked at afterwards: at the models that it kept, and at rounds that are trained again from them."""

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
from fedflat.experiment.analysis.cohort import Figures, cohort_figures
from fedflat.experiment.analysis.fixed_sample import Look
from fedflat.experiment.analysis.reopen import reopen, require_model, state_of
from fedflat.experiment.analysis.replay import Moment, Replay, at_checkpoint, at_model, needs_vectors, start_of
from fedflat.experiment.analysis.theory import Theory, theory
from fedflat.experiment.config import Config, FlatnessSettings
from fedflat.experiment.store.checkpoint import CHECKPOINT
from fedflat.experiment.store.record import Record, model_file, saved_rounds
from fedflat.flatness.theory.noise import Constants

Progress = Callable[[str], None]


@dataclass
class Afterwards:
    """A run, with the problem it was about, and a fixed look at it."""

    record: Record
    wanted: FlatnessSettings = field(default_factory=FlatnessSettings)
    own: dict[str, Any] = field(default_factory=dict)
    progress: Progress = lambda text: None

    def __post_init__(self) -> None:
        self.config = _here(self.record.config)
        self.problem, self.partition = reopen(
            self.record, config=self.config, call="flatness", as_begun=True, **self.own
        )
        self.first = ModelState(*self.problem.initial())
        self.look = Look(self.problem, self.partition, self.wanted)
        self.algorithm = algorithm(self.config.algorithm)

    # --- models ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def ended(self) -> int:
        """After how many rounds the run ended, or was last evaluated."""
        if not self.record.history:
            raise UserError(f"{self._where} has evaluated nothing yet; go on with it (fedflat resume {self._where})")
        return self.record.rounds

    def model_rounds(self, name: str = "server") -> list[int]:
        """After which rounds a model of the run is there: at the start, where it was kept on the way, and at the end."""
        kept = saved_rounds(self.record.folder.path, name) if self.record.folder else []
        start = [self.config.init_rounds] if name == "server" else []
        return sorted({*start, *kept, *([self.ended] if self._has_last(name) else [])})

    def model(self, rounds: int, name: str = "server") -> ModelState:
        """A model after so many rounds."""
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

    # --- figures of models -------------------------------------------------------------------------------------------------------

    def gaps(self) -> dict[str, list[Figures]]:
        """The gap of every model, at every round after which it is there."""
        found: dict[str, list[Figures]] = {}
        for name in self.record.evaluated or ["server"]:
            for rounds in self.model_rounds(name):
                self.progress(f"the gap of {name} after round {rounds}")
                with one_thread():
                    found.setdefault(name, []).append({"round": rounds, **self.look.gap(self.model(rounds, name))})
        return found

    def seen(self, name: str = "server") -> list[Figures]:
        """Accuracies and feature norms of a model, at every round after which it is there."""
        name, found = require_model(self.record, name), []
        for rounds in self.model_rounds(name):
            self.progress(f"accuracies after round {rounds}")
            with one_thread():
                model = self.model(rounds, name)
                found.append(
                    {"round": rounds, "accuracy": self.look.classes(model), "features": self.look.features(model)}
                )
        return found

    def constants(self, name: str = "server") -> list[Figures]:
        """L, beta, sigma and sigma_g of a model, at every round after which it is there."""
        name, found = require_model(self.record, name), []
        for rounds in self.model_rounds(name):
            self.progress(f"gradients after round {rounds}")
            with one_thread():
                constants, apart = self.look.constants(self.model(rounds, name))
            found.append({"round": rounds, "constants": constants.plain(), "gradients": apart})
        return found

    def theory(self, seen: Sequence[Figures] | None = None) -> Theory:
        """Theorem 5.1 with the constants that the run's models showed; ``seen`` are those of ``constants`` where they are known."""
        looks = [*self.constants(), *self.logged_constants()] if seen is None else seen
        return theory(
            self.config, self.partition, self.problem.data.num_classes, [Constants(**one["constants"]) for one in looks]
        )

    # --- rounds trained again ----------------------------------------------------------------------------------------------------

    def moments(self) -> tuple[list[Moment], str]:
        """Every moment from which a round can be trained again, and in words why others cannot."""
        moments = {0: start_of(self.algorithm, self.first, self.config)}
        lacks = needs_vectors(self.algorithm, self.config)
        kept = [rounds for rounds in self.model_rounds() if rounds]
        if not lacks:
            moments |= {rounds: at_model(rounds, self.model(rounds), self.algorithm, self.config) for rounds in kept}
        if self.record.folder is not None and (self.record.folder.path / CHECKPOINT).exists():
            last = at_checkpoint(self.record.folder, self.algorithm, self.problem, self.config, self.first)
            moments[last.rounds] = last
        left = [rounds for rounds in kept if rounds not in moments]
        missing = f"{self.config.algorithm} needs {lacks}, which are kept at the last checkpoint only"
        why = f"rounds after {', '.join(map(str, left))} cannot be trained again: {missing}" if left else ""
        return [moments[rounds] for rounds in sorted(moments)], why

    def clients(self, numbers: Sequence[int] | None = None, curvature: bool = True) -> tuple[list[Figures], str]:
        """Drift and lambda_max of clients whose round is trained again, at every moment from which it can be; and why not at others."""
        moments, why = self.moments()
        found = []
        for moment in moments:
            replay = Replay(
                self.config,
                self.problem,
                self.partition,
                moment,
                workers=1 if self.problem.device.type == "cpu" else None,
            )
            members = replay.members(numbers)
            self.progress(f"training round {moment.rounds + 1} again, with {len(members)} clients")
            outcome = replay.train(members)
            with one_thread():
                figures = cohort_figures(self.algorithm, members, outcome, moment.states)
                if curvature:
                    models = replay.local_models(members, outcome)
                    self.progress(f"curvature of {len(members)} clients' models in round {moment.rounds + 1}")
                    figures["local"] = self.look.local_curvature(models, members)
            found.append({"round": moment.rounds + 1, "source": "trained again", **figures})
        return found, why

    def logged(self) -> list[Figures]:
        """What the run logged itself about its cohorts."""
        records = [record for record in self.record.history if "cohort" in record.get("flatness", {})]
        return [{"round": record["round"], "source": "logged", **record["flatness"]["cohort"]} for record in records]

    def logged_constants(self) -> list[Figures]:
        """What the run logged itself about its constants, where no model of that round was kept."""
        kept = set(self.model_rounds())
        looks = {
            record["round"]: record["flatness"]
            for record in self.record.history
            if "constants" in record.get("flatness", {})
        }
        return [
            {"round": rounds, "constants": look["constants"], "gradients": look["gradients"]}
            for rounds, look in looks.items()
            if rounds not in kept and None not in look["constants"].values()
        ]

    def require_something(self) -> None:
        """Refuse a run of which nothing but its start is there."""
        folder = self.record.folder
        if (
            len(self.model_rounds()) > 1
            or self.logged()
            or (folder is not None and (folder.path / CHECKPOINT).exists())
        ):
            return
        raise UserError(
            f"{self._where} has kept nothing to look at: no checkpoint (yet), no models on the way (run --save-every N), no log "
            "(run --flatness every=N)"
        )

    def require_vectors(self) -> None:
        """Refuse to show control variates of an algorithm whose clients keep none."""
        if not any(one.vector for one in flat_fields(self.algorithm.client_fields()).values()):
            raise UserError(
                f"clients of {self.config.algorithm} keep no control variate or dual; scaffold, feddyn or fedmoswa have some"
            )


def _here(config: Config) -> Config:
    """A run's config on the device that is here."""
    if config.engine.device == "cpu":
        return config
    engine = config.engine.model_copy(update={"device": "auto"})
    if engine.precision == "bf16" and not torch.cuda.is_available():
        engine = engine.model_copy(update={"precision": "float32"})
    return config.model_copy(update={"engine": engine})


def afterwards(
    record: Record,
    *,
    data: Dataset | None = None,
    network: Any = None,
    task: Task | None = None,
    progress: Progress = lambda text: None,
    **wanted: Any,
) -> Afterwards:
    """A run to be looked at; ``wanted`` are the settings of config's section flatness."""
    return Afterwards(record, FlatnessSettings(**wanted), {"data": data, "network": network, "task": task}, progress)
