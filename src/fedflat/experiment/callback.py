"""Callbacks: observe a run while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fedflat.errors import UserError

if TYPE_CHECKING:  # the command line imports this module before torch
    from fedflat.algorithms import Algorithm
    from fedflat.data import Partition
    from fedflat.engines.problem.problem import Problem
    from fedflat.engines.round.contract import Engine, ModelState
    from fedflat.experiment.config import Config
    from fedflat.experiment.store.checkpoint import ServerState
    from fedflat.experiment.store.run_folder import Record, RunFolder


class RunProgress(Protocol):
    """The attributes of a run that callbacks can read, even in another process."""

    @property
    def config(self) -> Config:
        """The run's complete config."""

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The evaluations in order; in another process, only the newest one."""

    @property
    def primary(self) -> str:
        """Name of the primary model: the last average, or ``server`` if there are no averages."""

    @property
    def metric(self) -> str:
        """Name of the primary metric."""


class RunView(RunProgress, Protocol):
    """The attributes of a run that callbacks can read in its own process."""

    @property
    def server(self) -> ServerState:
        """The server's model and state."""

    @property
    def problem(self) -> Problem:
        """Data, network and task."""

    @property
    def partition(self) -> Partition:
        """The examples of each client."""

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""

    @property
    def engine(self) -> Engine:
        """The engine that trains cohorts."""

    @property
    def folder(self) -> RunFolder | None:
        """The run folder, if there is one."""

    def models(self) -> dict[str, ModelState]:
        """The current models by name: ``server``, further models of the drift slot, and averages that have begun."""


class Callback:
    """Base class of callbacks; override the methods of interest.

    >>> class Norm(Callback):
    ...     def round_done(self, run):
    ...         print(run.rounds, float(run.server.model.weights.norm()))
    """

    def began(self, run: RunView) -> None:
        """Called before the first round, and again when a run is resumed."""

    def round_done(self, run: RunView) -> None:
        """Called after every round, before its evaluation."""

    def evaluated(self, run: RunView) -> None:
        """Called after every evaluation, which is ``run.history[-1]``."""

    def ended(self, run: RunView, record: Record) -> None:
        """Called when the run ends or pauses, with its outcome."""


class RemoteCallback(Callback):
    """Base class of callbacks that can observe runs in other processes.

    Such a callback can read only the attributes of ``RunProgress``, and may miss rounds and evaluations.
    """

    def began(self, run: RunProgress) -> None:
        """Called before the first round, and again when a run is resumed."""

    def round_done(self, run: RunProgress) -> None:
        """Called after a round; rounds that follow each other quickly may share one call."""

    def evaluated(self, run: RunProgress) -> None:
        """Called after an evaluation, which is ``run.history[-1]``."""

    def ended(self, run: RunProgress, record: Record) -> None:
        """Called when the run ends or pauses, with its outcome."""


def require_remote(callbacks: Sequence[Callback]) -> tuple[RemoteCallback, ...]:
    """Check that all callbacks can observe runs in other processes, and return them."""
    remote = []
    for callback in callbacks:
        if not isinstance(callback, RemoteCallback):
            raise UserError(
                f"{type(callback).__name__} cannot observe runs in other processes; "
                "derive it from fedflat.RemoteCallback, or run in this process"
            )
        remote.append(callback)
    return tuple(remote)
