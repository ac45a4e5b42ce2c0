"""Worker processes: one thread each, started once and reused, fed over pipes; weights travel through shared memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from fedflat.errors import UserError
from fedflat.operating_system import keep_memory
from fedflat.plugins import loaded_plugins
from fedflat.processes import (
    PATIENCE,
    ChildDied,
    ChildProcess,
    close_children,
    receive_from_parent,
    sendable_error,
    wait_for_any,
)


class ProcessPool:
    """Worker processes that hold shared values by name and call functions with them.

    Attributes:
        owner: token of the engine whose values the workers hold; several engines may use the pool in turn.
        plugins: the plugins that the workers have loaded.
    """

    def __init__(self, workers: int) -> None:
        """Start ``workers`` processes, which load the plugins that this process has loaded so far."""
        self.children = [ChildProcess(_serve) for _ in range(workers)]
        self.owner: object = None
        self.plugins = loaded_plugins()

    @property
    def is_alive(self) -> bool:
        """Whether every worker is running."""
        return bool(self.children) and all(child.is_alive for child in self.children)

    def share(self, name: str, value: object) -> None:
        """Send a value to every worker, under a name."""
        for child in self.children:
            child.send(("share", name, value))

    def map(self, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> list[Any]:
        """``function(shared, *task)`` for every task, spread over the workers; results are in the order of the tasks.

        ``shared`` are the values that the worker has received through ``share``, by name. Any exception, Ctrl-C
        included, stops the workers, because the next caller would receive their stale results.
        """
        waiting = deque(enumerate(tasks))
        results: list[Any] = [None] * len(waiting)
        busy: dict[ChildProcess, int] = {}  # the index of each child's task

        def start_next(child: ChildProcess) -> None:
            """Send the next waiting task, if any, to an idle worker."""
            if waiting:
                busy[child], task = waiting.popleft()
                child.send(("call", function, task))

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
            if busy:  # only after an exception
                self.close(patience=0.2)
        return results

    def close(self, patience: float = PATIENCE) -> None:
        """Stop the workers; kill those that are still busy after ``patience`` seconds each."""
        close_children(self.children, patience)
        self.children = []


_pool: ProcessPool | None = None


def process_pool(workers: int) -> ProcessPool:
    """The pool of ``workers`` processes that all engines of this process share.

    A new one, which takes seconds to start, replaces it if the number of workers or the loaded plugins have changed, or
    if a worker has died.
    """
    global _pool  # noqa: PLW0603
    is_usable = _pool is not None and _pool.is_alive and _pool.plugins == loaded_plugins()
    if _pool is None or len(_pool.children) != workers or not is_usable:
        if _pool is not None:
            _pool.close()
        _pool = ProcessPool(workers)
    return _pool


def _close_pool() -> None:
    """Stop the workers of this process; a second Ctrl-C kills them at once."""
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
    """Run a worker until the parent closes the pipe: store the values it shares, and call functions with them.

    Answers each call with (failed, result), where the result of a failed call is its exception.
    """
    keep_memory()
    shared: dict[str, Any] = {}
    while True:
        try:
            try:
                message = receive_from_parent(pipe)
            except UserError as error:  # raised in the parent in place of the next result
                pipe.send((True, error))
                continue
            if message[0] == "share":
                _, name, value = message
                shared[name] = value
                continue
            _, function, task = message
            try:
                pipe.send((False, function(shared, *task)))
            except Exception as error:  # raised again by the parent
                pipe.send((True, sendable_error(error)))
        except (EOFError, KeyboardInterrupt, ConnectionError, FileNotFoundError):  # the parent is gone
            return
