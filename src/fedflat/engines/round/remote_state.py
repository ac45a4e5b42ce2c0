"""The state of a client that is still on the worker that trained it, fetched when it is read or when there is time."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping

from fedflat.algorithms.algorithm import States
from fedflat.algorithms.slot import State

Read = Callable[[], States]


class RemoteState(Mapping[str, State]):
    """A client's state by slot after a certain round, wherever it is stored.

    Args:
        stamp: distinguishes this state from other states of the same client.
        fetch: gets the state from its worker and passes it to ``deliver``.
    """

    def __init__(self, stamp: int, fetch: Callable[[], None]) -> None:
        self.stamp = stamp
        self._fetch = fetch
        self._read: Read | None = None
        self._store: Callable[[States], Read] | None = None

    def deliver(self, states: States) -> None:
        """Take the state that has arrived: pass it to the store if there is one, otherwise keep it in memory."""
        self._read = self._store(states) if self._store else lambda: states
        self._store, self._fetch = None, _do_nothing  # both hold references to earlier states

    def store_with(self, store: Callable[[States], Read]) -> None:
        """Persist the state once it has arrived; ``store`` returns a reader."""
        if self._read is None:
            self._store = store
        else:
            self._read = store(self._read())

    def fetch(self) -> None:
        """Get the state from its worker, unless it has arrived."""
        if self._read is None:
            self._fetch()

    def states(self) -> States:
        """The state, fetched if necessary."""
        self.fetch()
        assert self._read is not None
        return self._read()

    def __getitem__(self, slot: str) -> State:
        return self.states()[slot]

    def __iter__(self) -> Iterator[str]:
        return iter(self.states())

    def __len__(self) -> int:
        return len(self.states())

    def items(self) -> ItemsView[str, State]:
        """Slots and their state, read once."""
        return self.states().items()


def _do_nothing() -> None:
    """Replaces the fetch of a state that has arrived."""
