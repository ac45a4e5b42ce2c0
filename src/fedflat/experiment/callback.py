"""Callbacks: whoever wants to see a run while it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from fedflat.experiment.run import Run
    from fedflat.experiment.store.record import Record


class Callback:
    """Told of every round; override what is of interest. ``run.server`` and ``run.history`` hold all there is to see."""

    from_afar: ClassVar[bool] = False
    """Whether it looks at a run's ``config``, ``server.rounds``, ``history[-1]``, ``primary`` and metric alone, and does not mind missing
    a round now and then: it can then watch runs in other processes."""

    def began(self, run: Run) -> None:
        """Before the first round, or before going on after a restart."""

    def round_done(self, run: Run) -> None:
        """After every round."""

    def evaluated(self, run: Run) -> None:
        """After every evaluation; ``run.history[-1]`` is the newest."""

    def ended(self, run: Run, record: Record) -> None:
        """After the last round."""
