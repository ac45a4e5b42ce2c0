"""Worker processes: one thread each, started once and reused, fed over pipes; weights travel through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from fedflat.errors import UserError
from fedflat.processes import (
    PATIENCE,
    ChildDied,
    ChildProcess,
    close_children,
    keep_memory,
    receive_from_parent,
    sendable,
    wait_for_any,
)


class ProcessPool:
    """Worker processes that hold shared values by name and call functions with them.

    Attributes:
        turn: identifies the engine whose values the workers hold; engines take turns when runs alternate.
    """

    def __init__(self, workers: int) -> None:
        self.children = [ChildProcess(_serve) for _ in range(workers)]
        self.turn: object = None

    @property
    def alive(self) -> bool:
        """Whether every worker is running."""
        return bool(self.children) and all(child.is_alive for child in self.children)

    def share(self, name: str, value: object) -> None:
        """Send a value to every worker, under a name."""
        for child in self.children:
            child.send(("share", name, value))

    def map(self, call: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> list[Any]:
        """``call(shared, *task)`` for every task, spread over the workers; results are in the order of the tasks.

        Any exception, Ctrl-C included, stops the workers, because the next caller would receive their stale answers.
        """
        waiting = list(enumerate(tasks))[::-1]
        results: list[Any] = [None] * len(waiting)
        busy: dict[ChildProcess, int] = {}

        def start_next(child: ChildProcess) -> None:
            if waiting:
                busy[child], task = waiting.pop()
                child.send(("call", call, task))

        try:
            for child in self.children:
                start_next(child)
            while busy:
                for child in wait_for_any(busy):
                    failed, result = child.receive()
                    if failed:
                        raise result
                    results[busy.pop(child)] = result
                    start_next(child)
        except ChildDied as death:
            raise UserError(
                f"a worker process {death}; use fewer workers (--workers 1) or a smaller batch size, "
                "then continue with fedflat resume"
            ) from None
        finally:
            if busy:
                self.close(patience=0.2)
        return results

    def close(self, patience: float = PATIENCE) -> None:
        """Stop the workers; kill those that are still busy after ``patience`` seconds each."""
        close_children(self.children, patience)
        self.children = []


_pool: ProcessPool | None = None


def process_pool(workers: int) -> ProcessPool:
    """The pool of this process, restarted only if its size changes or a worker died: starting workers takes seconds."""
    global _pool  # noqa: PLW0603
    if _pool is None or len(_pool.children) != workers or not _pool.alive:
        if _pool is not None:
            _pool.close()
        _pool = ProcessPool(workers)
    return _pool


def _close_pool() -> None:
    if _pool is not None:
        try:
            _pool.close()
        except KeyboardInterrupt:
            _pool.close(patience=0)


# Not atexit, which does not run in multiprocessing's child processes: their workers would be killed during a task.
Finalize(None, _close_pool, exitpriority=0)


@contextmanager
def explain_full_shared_memory() -> Iterator[None]:
    """Replace torch's error for full shared memory, which is small in containers, by one that says what to change."""
    try:
        yield
    except RuntimeError as error:
        if "</torch_" not in str(error):  # the name of the file that torch could not create
            raise
        reason = str(error).rpartition(": ")[2].lower()
        raise UserError(
            f"data and weights do not fit into the shared memory of the worker processes ({reason}); enlarge /dev/shm "
            "(in Docker with --shm-size=8g) or use --workers 1, then continue with fedflat resume"
        ) from None


def _serve(pipe: Connection) -> None:
    """Main loop of a worker: store shared values, call functions with them."""
    keep_memory()
    shared: dict[str, Any] = {}
    while True:
        try:
            try:
                kind, name_or_call, value = receive_from_parent(pipe)
            except UserError as error:  # raised in the parent in place of the next result
                pipe.send((True, error))
                continue
            if kind == "share":
                shared[name_or_call] = value
                continue
            try:
                pipe.send((False, name_or_call(shared, *value)))
            except Exception as error:  # raised again in the process that asked
                pipe.send((True, sendable(error)))
        except (EOFError, KeyboardInterrupt, ConnectionError, FileNotFoundError):  # the parent is gone
            return
