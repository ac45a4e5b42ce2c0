"""Post-hoc measurements of a run: on its saved models, and on rounds replayed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import flat_fields
from fedflat.data import Dataset
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.task import Task
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Measurements, measure_cohort
from fedflat.experiment.analysis.observer import FixedSample
from fedflat.experiment.analysis.reopen import on_device, reopen, require_model, state_of
from fedflat.experiment.analysis.replay import (
    Moment,
    Replay,
    missing_state,
    moment_at_checkpoint,
    moment_at_model,
    moment_at_start,
)
from fedflat.experiment.analysis.theory import Theory, theory, trivial_loss
from fedflat.experiment.config import FlatnessSettings
from fedflat.experiment.store.checkpoint import has_checkpoint
from fedflat.experiment.store.run_folder import Record, model_file, saved_rounds
from fedflat.flatness.theory import Constants

Progress = Callable[[str], None]


@dataclass
class PostHoc:
    """Measures the models and clients of a run after training, on a fixed sample of its data.

    Attributes:
        record: the run to measure.
        settings: numbers of sampled examples and clients, and the seed of these samples.
        user_objects: user-supplied objects of the run by name: ``dataset``, ``network`` and ``task``.
        progress: function that is called with a description of each measurement before it is made.
    """

    record: Record
    settings: FlatnessSettings = field(default_factory=FlatnessSettings)
    user_objects: dict[str, Any] = field(default_factory=dict)
    progress: Progress = lambda text: None

    def __post_init__(self) -> None:
        """Build the run's problem, partition and initial model again on this machine, and draw the fixed sample."""
        trained_on = self.record.config.engine.device
        self.config = on_device(self.record.config, "cpu" if trained_on == "cpu" else "auto")
        self.problem, self.partition = reopen(
            self.record, config=self.config, method="post_hoc", with_initial_weights=True, **self.user_objects
        )
        self.initial_model = ModelState(*self.problem.initial_state())
        self.sample = FixedSample(self.problem, self.partition, self.settings)
        self.algorithm = algorithm(self.config.algorithm)

    @cached_property
    def last_round(self) -> int:
        """Number of rounds at the end of the run, or at its last evaluation."""
        if not self.record.history:
            run = self.record.display_name
            raise UserError(f"{run} has no evaluation yet; continue it with fedflat resume {run}")
        return self.record.rounds

    def model_rounds(self, average: str = "server") -> list[int]:
        """Return the rounds after which a model is available: the start, the rounds with saved models, and the end."""
        rounds = set(saved_rounds(self.record.folder.path, average)) if self.record.folder else set()
        if average == "server":
            rounds.add(self.config.init_rounds)  # 0, unless the run branches off another run's later round
        if self._has_final(average):
            rounds.add(self.last_round)
        return sorted(rounds)

    def model(self, rounds: int, average: str = "server") -> ModelState:
        """Return the model ``average`` as it was after ``rounds`` rounds."""
        if rounds == self.config.init_rounds and average == "server":
            return self.initial_model
        is_final = rounds == self.last_round and self._has_final(average)
        return state_of(self.record, average, self.problem, None if is_final else rounds)

    def _has_final(self, name: str) -> bool:
        """Whether a model is available as of the end of the run."""
        if name in self.record.models:
            return True
        return self.record.folder is not None and (self.record.folder.path / model_file(name)).exists()

    @property
    def _has_checkpoint(self) -> bool:
        return self.record.folder is not None and has_checkpoint(self.record.folder)

    def gaps(self) -> dict[str, list[Measurements]]:
        """Measure generalisation gaps; return, for each model name, one row per round with a stored model."""
        names = self.record.evaluated or ["server"]
        rows = {name: self._over_rounds(name, f"gap of {name}", self.sample.gap) for name in names}
        return {name: of_model for name, of_model in rows.items() if of_model}

    def accuracies(self, average: str = "server") -> list[Measurements]:
        """Measure a model's accuracies per class and client, and its feature norms, at every available round."""
        sample = self.sample
        return self._over_rounds(
            require_model(self.record, average),
            "accuracies",
            lambda model: {"accuracy": sample.classes(model), "features": sample.features(model)},
        )

    def constants(self, average: str = "server") -> list[Measurements]:
        """Measure the constants in the bounds of Liu et al. 2025 (FedSWA), for a model at every available round.

        L is the largest gradient norm of a single example, and beta the smoothness (largest Hessian eigenvalue). sigma
        is the standard deviation of an example's gradient within a client, and sigma_g the mean distance between the
        clients' gradients and the global one.

        Returns:
            One row per round: the ``round``, the ``constants``, and how much the clients' ``gradients`` disagree.
        """

        def measure(model: ModelState) -> Measurements:
            constants, gradients = self.sample.constants(model)
            return {"constants": constants.known(), "gradients": gradients}

        return self._over_rounds(require_model(self.record, average), "gradients", measure)

    def _over_rounds(self, name: str, label: str, measure: Callable[[ModelState], Measurements]) -> list[Measurements]:
        """Measure a model at every available round; ``label`` describes the measurement in progress messages."""
        rows = []
        for round_number in self.model_rounds(name):
            self.progress(f"{label} after round {round_number}")
            with one_thread():
                rows.append({"round": round_number, **measure(self.model(round_number, name))})
        return rows

    def theory(self, constants: Sequence[Measurements] | None = None) -> Theory:
        """Compute the generalisation bounds of Theorem 5.1 in Liu et al. 2025 (FedSWA) from measured constants.

        Args:
            constants: the results of ``constants`` and ``logged_constants``, if already computed.
        """
        rows = [*self.constants(), *self.logged_constants()] if constants is None else constants
        measured = [Constants(**row["constants"]) for row in rows]
        return theory(self.config, self.partition, trivial_loss(self.problem.data), measured)

    def moments(self) -> tuple[list[Moment], str]:
        """Return all moments of the run from which the next round can be replayed, in order of rounds.

        A moment has the model and the state of server and clients: at the start, at a saved model if the algorithm
        needs no other state, and at the last checkpoint. The second value says why rounds after other saved models
        or after the checkpoint cannot be replayed; it is empty if all can.
        """
        start = self.config.init_rounds  # 0, unless the run branches off another run's later round
        moments = {start: moment_at_start(self.algorithm, self.initial_model, self.config)}
        missing = missing_state(self.algorithm, self.config)
        saved = [round_number for round_number in self.model_rounds() if round_number != start]
        if not missing:
            for number in saved:
                moments[number] = moment_at_model(number, self.model(number), self.algorithm, self.config)
        reasons = []
        if self.record.folder is not None and self._has_checkpoint:
            try:
                last = moment_at_checkpoint(
                    self.record.folder, self.algorithm, self.problem, self.config, self.initial_model
                )
                moments[last.rounds] = last
            except UserError as error:  # e.g. of a later version; the other moments do not need it
                reasons.append(f"the last checkpoint cannot be used: {error}")
        left_out = [str(number) for number in saved if number not in moments]
        if left_out:
            reasons.append(
                f"rounds after {', '.join(left_out)} cannot be replayed: "
                f"{self.config.algorithm} needs {missing}, which only the last checkpoint has"
            )
        return [moments[number] for number in sorted(moments)], "; ".join(reasons)

    def clients(self, numbers: Sequence[int] | None = None, curvature: bool = True) -> tuple[list[Measurements], str]:
        """Replay rounds, and measure the drift of their clients and the curvature of the clients' models.

        Args:
            numbers: client numbers; default: the cohort of each round.
            curvature: whether to compute lambda_max, the largest Hessian eigenvalue, of each client's model.

        Returns:
            One row per replayed round, and why the other saved rounds cannot be replayed (else empty).
        """
        moments, reason = self.moments()
        workers = 1 if self.problem.device.type == "cpu" else None  # on a CPU, train in this process
        rows = []
        for moment in moments:
            replay = Replay(self.config, self.problem, self.partition, moment, workers)
            clients = replay.clients(numbers)
            self.progress(f"replaying round {moment.rounds + 1} with {len(clients)} clients")
            outcome = replay.train(clients)
            with one_thread():
                measurements = measure_cohort(self.algorithm, clients, outcome, moment.states)
                if curvature:
                    models = replay.local_models(clients, outcome)
                    self.progress(f"curvature of {len(clients)} clients' models in round {moment.rounds + 1}")
                    measurements["local"] = self.sample.local_curvature(models, clients)
            rows.append({"round": moment.rounds + 1, "source": "replayed", **measurements})
        return rows, reason

    def logged(self) -> list[Measurements]:
        """Return measurements of cohorts that were logged during training, one row per round; empty without a log."""
        rows = []
        for record in self.record.history:
            if "cohort" in record.get("flatness", {}):
                rows.append({"round": record["round"], "source": "logged", **record["flatness"]["cohort"]})
        return rows

    def logged_constants(self) -> list[Measurements]:
        """Return the constants of FedSWA's bounds (L, beta, sigma, sigma_g) that were logged, one row per round.

        Rows are as ``constants`` returns them: ``gradients`` states how much the clients' gradients disagree. Rounds
        whose model is available are left out, because ``constants`` measures them. So are rounds in which a constant
        was not finite, which is logged as None.
        """
        measurable = self.model_rounds()
        rows = []
        for record in self.record.history:
            logged = record.get("flatness", {})
            if "constants" in logged and record["round"] not in measurable and None not in logged["constants"].values():
                values = {"constants": logged["constants"], "gradients": logged["gradients"]}
                rows.append({"round": record["round"], **values})
        return rows

    def require_saved_rounds(self) -> None:
        """Raise a ``UserError`` if only the initial model of the run is available."""
        if len(self.model_rounds()) == 1 and not self.logged() and not self._has_checkpoint:
            raise UserError(
                f"{self.record.display_name} has no checkpoint, no saved models (run --save-every N) and no log "
                "(run --flatness every=N)"
            )

    def require_client_vectors(self) -> None:
        """Raise a ``UserError`` if clients of the run's algorithm have no control variate or dual."""
        if not any(state.vector for state in flat_fields(self.algorithm.client_fields()).values()):
            raise UserError(
                f"clients of {self.config.algorithm} have no control variate or dual; use scaffold or fedmoswa"
            )


def post_hoc(
    record: Record,
    *,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    task: Task | None = None,
    progress: Progress = lambda text: None,
    **settings: Any,
) -> PostHoc:
    """Open a run for post-hoc measurements.

    Args:
        record: the run.
        dataset, network, task: user-supplied dataset, model and task; not needed if the run was made in this process.
        progress: called with a description of each measurement before it is made.
        **settings: settings of the config section ``flatness``: ``examples``, ``clients`` and ``seed``.
    """
    user_objects = {"dataset": dataset, "network": network, "task": task}
    return PostHoc(record, FlatnessSettings(**settings), user_objects, progress)
