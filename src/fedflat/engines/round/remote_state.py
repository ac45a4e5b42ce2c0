"""The state of a client that lies with a worker: it comes here when somebody looks at it, or when there is time."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping

from fedflat.algorithms.algorithm import States
from fedflat.algorithms.slot import State

Read = Callable[[], States]


class RemoteState(Mapping[str, State]):
    """A client's state after a certain round, wherever that lies."""

    def __init__(self, stamp: int, bring: Callable[[], None]) -> None:
        self.stamp = stamp
        """What tells it from other states of the same client."""
        self._bring = bring
        self._read: Read | None = None
        self._keeper: Callable[[States], Read] | None = None

    @property
    def is_here(self) -> bool:
        """Whether it has come."""
        return self._read is not None

    def arrived(self, states: States) -> None:
        """Say that it has come; where somebody else keeps it, it is not kept here."""
        self._read = self._keeper(states) if self._keeper else lambda: states
        self._keeper, self._bring = None, _nothing  # they know the state before, and that the one before it

    def kept_by(self, keeper: Callable[[States], Read]) -> None:
        """Let somebody keep it as soon as it is here, who says how to read it again."""
        if self._read is None:
            self._keeper = keeper
        else:
            self._read = keeper(self._read())

    def bring(self) -> None:
        """Have it here."""
        if self._read is None:
            self._bring()

    def states(self) -> States:
        """It, brought here where it is not."""
        self.bring()
        assert self._read is not None
        return self._read()

    def __getitem__(self, slot: str) -> State:
        return self.states()[slot]

    def __iter__(self) -> Iterator[str]:
        return iter(self.states())

    def __len__(self) -> int:
        return len(self.states())

    def items(self) -> ItemsView[str, State]:
        """As of any mapping, read once."""
        return self.states().items()


def _nothing() -> None:
    """What is left to do for a state that is here."""
