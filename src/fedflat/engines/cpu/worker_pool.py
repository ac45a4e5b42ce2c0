"""Worker processes: one thread each, started once, fed over pipes; weights travel through shared memory."""

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

KEPT = 2**28
"""Bytes up to which a worker keeps freed memory, and takes it in one piece from what it has."""


class Pool:
    """Worker processes that each hold one object at a time and call its methods."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.turn: object = None
        """Whose values the workers hold: engines take turns where runs go on side by side."""
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            start_without_main(process)
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    @property
    def alive(self) -> bool:
        """Whether every worker is still there."""
        return bool(self.pipes) and all(process.is_alive() for process in self.processes)

    def share(self, name: str, value: object) -> None:
        """Give every worker a value under a name."""
        for pipe in self.pipes:
            self._send(pipe, ("share", name, value))

    def map(self, call: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> list[Any]:
        """``call(shared, *task)`` for every task, spread over the workers; results in the order of the tasks.

        Whatever breaks it off ends the workers, whose answers the next caller would take for its own.
        """
        waiting = list(enumerate(tasks))[::-1]
        results: list[Any] = [None] * len(waiting)
        busy: dict[Connection, int] = {}
        try:
            for pipe in self.pipes:
                self._next(pipe, call, waiting, busy)
            while busy:
                for pipe in cast("list[Connection]", wait(list(busy))):
                    failed, result = self._received(pipe)
                    if failed:
                        raise result
                    results[busy.pop(pipe)] = result
                    self._next(pipe, call, waiting, busy)
        except BaseException:
            self.close(patience=0.2)
            raise
        return results

    def _next(
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

    def _received(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except (EOFError, ConnectionError):
            raise self._lost() from None
        return answer

    def _lost(self) -> UserError:
        codes = [p.exitcode for p in self.processes if not p.is_alive()]
        self.close()
        killed = (
            "was killed, most likely because memory ran out"
            if any(c and c < 0 for c in codes)
            else "ended unexpectedly"
        )
        return UserError(
            f"a worker process {killed}; use fewer of them (--workers 1) or a smaller batch, then go on with fedflat resume"
        )

    def close(self, patience: float = 5.0) -> None:
        """End the workers, those that are busy after some seconds."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=patience)
            if process.is_alive():
                process.kill()
        self.pipes = []


_pool: Pool | None = None


def pool_of(workers: int) -> Pool:
    """The pool of this process, started anew only when its size changes: starting workers costs seconds."""
    global _pool  # noqa: PLW0603
    if _pool is None or len(_pool.pipes) != workers or not _pool.alive:
        if _pool is not None:
            _pool.close()
        _pool = Pool(workers)
    return _pool


def _close_pool() -> None:
    if _pool is not None:
        try:
            _pool.close()
        except KeyboardInterrupt:
            _pool.close(patience=0)


# Where this process is itself one of multiprocessing's, which knows no ``atexit``, workers would be ended in the middle of what they do.
Finalize(None, _close_pool, exitpriority=0)


_most_cores: int | None = None


def use_cores(most: int) -> None:
    """Let this process use so many cores at most: one of several that share a machine."""
    global _most_cores  # noqa: PLW0603
    _most_cores = most


def keep_memory() -> None:
    """Let this process keep what it frees, where the C library can: a step frees and takes the same megabytes again and again."""
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
            library.mallopt(option, KEPT)


def available_cores() -> int:
    """The cores this process may really use."""
    return usable_cores() if _most_cores is None else _most_cores


def can_travel(value: object) -> bool:
    """Whether a value can be sent to a worker: not when it is defined in the running script, which workers do not import."""
    buffer = io.BytesIO()
    try:
        _WithoutTensors(buffer).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return b"__main__" not in buffer.getvalue()


class _WithoutTensors(pickle.Pickler):
    """Looks at everything but tensors, which would be moved to shared memory by looking."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented


def start_without_main(process: Any) -> None:
    """Start a spawned process that does not run the user's script again: a script then needs no ``if __name__ == "__main__"``.

    Nor does it hear of Ctrl-C, which is for the process that started it, and which it would tell of at length.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with _without_interruption():
            process.start()
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _without_interruption() -> Iterator[None]:
    """Processes that are started meanwhile inherit it; here, an interruption is heard of afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # whose own start would end it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def shortage_of_shared_memory_told() -> Iterator[None]:
    """Turn shared memory that is full, of which containers have little, into a sentence that says what to change."""
    try:
        yield
    except RuntimeError as error:
        if "</torch_" not in str(error):  # the file that torch cannot make
            raise
        raise UserError(
            f"data and weights do not fit in the memory that worker processes share ({str(error).rpartition(': ')[2].lower()}); enlarge it "
            "(/dev/shm, in Docker with --shm-size=8g) or use --workers 1; a run that had begun goes on with fedflat resume"
        ) from None


def travelling(error: Exception) -> Exception:
    """An error as it can be sent: itself, or where its class cannot be read again, what it says."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of any kind: the class may ask for anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    keep_memory()
    shared: dict[str, Any] = {}
    while True:
        try:
            kind, what, value = pipe.recv()
            if kind == "share":
                shared[what] = value
                continue
            try:
                pipe.send((False, what(shared, *value)))
            except Exception as error:  # what went wrong in a worker is raised again where the run is
                pipe.send((True, travelling(error)))
        except (EOFError, KeyboardInterrupt, ConnectionError, FileNotFoundError):  # whoever asked is gone
            return
