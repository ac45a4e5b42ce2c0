"""Worker processes: one thread each, started once and reused, fed over pipes; weights travel through shared memory."""

from __future__ import annotations

import ctypes
import io
import pickle
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, cast

import torch
import torch.multiprocessing as multiprocessing

from fedflat.cores import usable_cores
from fedflat.errors import UserError

MALLOC_THRESHOLD = 2**28
"""Bytes of freed memory that a process keeps, and largest allocation that it serves from them."""


class ProcessPool:
    """Worker processes that hold shared values by name and call functions with them.

    Attributes:
        turn: identifies the engine whose values the workers hold; engines take turns when runs alternate.
    """

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.turn: object = None
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            start_without_main(process)
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    @property
    def alive(self) -> bool:
        """Whether every worker is running."""
        return bool(self.pipes) and all(process.is_alive() for process in self.processes)

    def share(self, name: str, value: object) -> None:
        """Send a value to every worker, under a name."""
        for pipe in self.pipes:
            self._send(pipe, ("share", name, value))

    def map(self, call: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> list[Any]:
        """``call(shared, *task)`` for every task, spread over the workers; results are in the order of the tasks.

        Any exception, Ctrl-C included, stops the workers, because the next caller would receive their stale answers.
        """
        waiting = list(enumerate(tasks))[::-1]
        results: list[Any] = [None] * len(waiting)
        busy: dict[Connection, int] = {}
        try:
            for pipe in self.pipes:
                self._start_next(pipe, call, waiting, busy)
            while busy:
                for pipe in cast("list[Connection]", wait(list(busy))):
                    failed, result = self._receive(pipe)
                    if failed:
                        raise result
                    results[busy.pop(pipe)] = result
                    self._start_next(pipe, call, waiting, busy)
        except BaseException:
            self.close(patience=0.2)
            raise
        return results

    def _start_next(
        self, pipe: Connection, call: Callable[..., Any], waiting: list[Any], busy: dict[Connection, int]
    ) -> None:
        if waiting:
            busy[pipe], task = waiting.pop()
            self._send(pipe, ("call", call, task))

    def _send(self, pipe: Connection, message: object) -> None:
        try:
            pipe.send(message)
        except (BrokenPipeError, ConnectionError):
            raise self._lost() from None

    def _receive(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except (EOFError, ConnectionError):
            raise self._lost() from None
        return answer

    def _lost(self) -> UserError:
        codes = [process.exitcode for process in self.processes if not process.is_alive()]
        self.close()
        killed = any(code and code < 0 for code in codes)
        reason = "was killed, most likely because memory ran out" if killed else "ended unexpectedly"
        return UserError(
            f"a worker process {reason}; use fewer workers (--workers 1) or a smaller batch size, "
            "then continue with fedflat resume"
        )

    def close(self, patience: float = 5.0) -> None:
        """Stop the workers; kill those that are still busy after ``patience`` seconds each."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=patience)
            if process.is_alive():
                process.kill()
        self.pipes = []


_pool: ProcessPool | None = None


def process_pool(workers: int) -> ProcessPool:
    """The pool of this process, restarted only if its size changes or a worker died: starting workers takes seconds."""
    global _pool  # noqa: PLW0603
    if _pool is None or len(_pool.pipes) != workers or not _pool.alive:
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


_core_limit: int | None = None


def use_cores(most: int) -> None:
    """Limit this process to ``most`` cores, if several processes share the machine."""
    global _core_limit  # noqa: PLW0603
    _core_limit = most


def available_cores() -> int:
    """Cores that this process may use."""
    return usable_cores() if _core_limit is None else _core_limit


def keep_memory() -> None:
    """Make malloc keep freed memory: every training step frees and allocates the same megabytes again."""
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        for option in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
            library.mallopt(option, MALLOC_THRESHOLD)


def can_travel(value: object) -> bool:
    """Whether a value can be sent to a worker: it is picklable and not defined in the running script."""
    buffer = io.BytesIO()
    try:
        _WithoutTensors(buffer).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return b"__main__" not in buffer.getvalue()


class _WithoutTensors(pickle.Pickler):
    """Pickles everything except tensors, which pickling would move to shared memory."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented


def start_without_main(process: Any) -> None:
    """Start a spawned process that does not import the user's script, so that it needs no ``__main__`` guard.

    The process ignores Ctrl-C, which its parent handles.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with _interrupts_blocked():
            process.start()
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT; processes started meanwhile inherit the mask, this one receives the signal afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def sendable(error: Exception) -> Exception:
    """The error itself if it can be unpickled, otherwise a RuntimeError with its class and message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # the class of the error may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _serve(pipe: Connection) -> None:
    """Main loop of a worker: store shared values, call functions with them."""
    torch.set_num_threads(1)
    keep_memory()
    shared: dict[str, Any] = {}
    while True:
        try:
            kind, name_or_call, value = pipe.recv()
            if kind == "share":
                shared[name_or_call] = value
                continue
            try:
                pipe.send((False, name_or_call(shared, *value)))
            except Exception as error:  # raised again in the process that asked
                pipe.send((True, sendable(error)))
        except (EOFError, KeyboardInterrupt, ConnectionError, FileNotFoundError):  # the parent is gone
            return
