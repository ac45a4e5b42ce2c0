"""Supervised child processes: start, exchange messages over a pipe, notice death, clean up.

Parallel runs, parallel searches, the CPU engine's workers and the benchmark all build on :class:`ChildProcess`.
Also counts the CPU cores that this process may use.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from fedflat.errors import UserError
from fedflat.operating_system import (
    cores_in_affinity_mask,
    descendants,
    interrupts_blocked,
    kill_processes,
    process_masks,
    set_process_masks,
)
from fedflat.registry import load_plugins, loaded_plugins

PATIENCE = 5.0
"""Seconds that a child has to exit before it is killed."""
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
"""How children start. With ``forkserver``, they are forks of a process that has imported fedflat and torch once."""
_start_lock = threading.RLock()
"""Held while a process starts, which changes this process's environment for a moment."""
_starter: int | None = None  # the process that has started children or the fork server; a fork of it has another id


class ChildDied(Exception):
    """A child process exited without an answer; the message says how, e.g. ``"ended unexpectedly"``."""


class ChildKilled(ChildDied):
    """A signal killed a child process."""


class ChildProcess:
    """A child process and the parent's end of a two-way pipe to it.

    The child loads the parent's plugins and calls ``target(pipe, *args)`` with one torch thread. It does not run the
    user's script again, so that scripts need no ``if __name__ == "__main__"`` guard. It never sees Ctrl-C or a closed
    terminal: the parent does, and then closes its children. If the parent is killed, the child ends at once.

    Args:
        target: function that the child can import.
        args: picklable arguments of ``target`` after its end of the pipe.
        daemon: end the child with the parent; a daemonic child cannot start processes.
        environment: variables that only the child gets.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *args: object,
        daemon: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not can_start_children():
            raise UserError(
                "this process cannot start others, because it is daemonic, as in multiprocessing.Pool, or a fork of a "
                "process that has started some; use a single process (workers=1, jobs=1)"
            )
        context: Any = multiprocessing.get_context(START_METHOD)
        self.pipe, child_pipe = context.Pipe()
        with _start_lock:
            variables = {**os.environ, **(environment or {})}
            arguments = (variables, process_masks(), list(loaded_plugins()), target, child_pipe, *args)
            self.process = context.Process(target=_run, args=arguments, daemon=daemon)
            start_fork_server(environment)
            with _starts_process(environment):
                self.process.start()
        child_pipe.close()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return int(self.process.pid)

    @property
    def is_alive(self) -> bool:
        """Whether the child is still running."""
        return bool(self.process.is_alive())

    def send(self, message: object) -> None:
        """Send a message; if the child has died, the next :meth:`receive` reports it."""
        with suppress(ConnectionError):
            self.pipe.send(message)

    def receive(self) -> Any:
        """Wait for the child's next message.

        Raises:
            ChildDied: the child exited first.
        """
        try:
            return self.pipe.recv()
        except (EOFError, OSError, RuntimeError) as error:
            # Tensors in a message lie in shared memory of the child; if it has died, reading them raises any of these.
            self.process.join(PATIENCE)
            if self.is_alive and not isinstance(error, EOFError | ConnectionError):
                raise
            signal_number = -(self.process.exitcode or 0)  # the exit code of a killed process is minus the signal
            if signal_number <= 0:
                raise ChildDied("ended unexpectedly") from None
            if signal_number == 9:  # sent by the system when memory runs out
                raise ChildKilled("was killed, most likely because memory ran out") from None
            raise ChildKilled(f"was killed by {signal.Signals(signal_number).name}") from None


def can_start_children() -> bool:
    """Whether this process can start children: it is not daemonic, and no fork of a process that has started some.

    Such a fork inherits the pipes of the other process, which may be training clients.
    """
    return _starter in (None, os.getpid()) and not multiprocessing.current_process().daemon


def start_fork_server(environment: Mapping[str, str] | None = None) -> None:
    """Start the fork server, which imports fedflat and torch in the background.

    No effect without ``forkserver``, or in a process that cannot start children.

    Args:
        environment: variables that it gets in addition to those of this process, unless it is already running.
    """
    if START_METHOD == "forkserver" and can_start_children():
        forkserver.set_forkserver_preload(["fedflat.engines.cpu.engine"])
        with _starts_process(environment):
            forkserver.ensure_running()


def end_with_parent() -> None:
    """Let this child process and its descendants end as soon as its parent has ended, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        try:
            kill_processes(descendants(os.getpid()))  # a benchmark may have paused them, so they cannot end themselves
        finally:
            os._exit(1)  # without cleaning up, which could wait for children or for locks

    threading.Thread(target=watch, daemon=True).start()


def receive_from_parent(pipe: Connection) -> Any:
    """Wait, in a child, for the parent's next message.

    Raises:
        UserError: the message contains an object whose class or function the child cannot import.
        EOFError: the parent has closed the pipe.
    """
    try:
        return pipe.recv()
    except (ImportError, AttributeError) as error:  # raised by pickle; the message has been consumed
        raise UserError(
            f"a worker process cannot import a class or function that it needs ({error}); define it in a module that "
            "every process can import, such as a file in the working directory or an installed package, "
            "or use a single process (workers=1, jobs=1)"
        ) from None


def wait_for_any(children: Iterable[ChildProcess]) -> list[ChildProcess]:
    """Block until a child has sent a message or died; returns all such children."""
    by_pipe: dict[Any, ChildProcess] = {child.pipe: child for child in children}
    return [by_pipe[pipe] for pipe in wait(list(by_pipe))]


def close_children(children: Iterable[ChildProcess], patience: float = PATIENCE) -> None:
    """Close the pipes, give the children ``patience`` seconds each to exit, and kill those that do not."""
    children = list(children)
    for child in children:
        child.pipe.close()
    for child in children:
        child.process.join(patience)
        if child.is_alive:
            child.process.kill()
            child.process.join()


def is_sendable(value: object) -> bool:
    """Whether a value can be sent to a child: it is picklable and nothing in it is defined in the running script.

    A pickle names the module of every class and function; that of the running script is ``__main__``.
    """
    buffer = io.BytesIO()
    try:
        _WithoutTensors(buffer).dump(value)
    except Exception:  # a user's object may raise anything, torch's parametrised modules a RuntimeError
        return False
    return b"__main__" not in buffer.getvalue()


class _WithoutTensors(pickle.Pickler):
    """Pickles everything except tensors, which pickling would move to shared memory."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle the call ``int()`` as a placeholder for a tensor, and anything else as usual."""
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented


def sendable_error(error: Exception) -> Exception:
    """The error itself if it can be pickled and unpickled, otherwise a RuntimeError with its class and message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # the class of the error may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _run(
    environment: Mapping[str, str],
    masks: tuple[int, set[int]],
    plugins: list[str],
    target: Callable[..., None],
    pipe: Connection,
    *args: object,
) -> None:
    """Main function of a child: load the parent's plugins and call ``target``.

    A fork server keeps the environment, umask and CPU affinity it started with, so the child gets the parent's.
    """
    set_process_masks(*masks)
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    load_plugins(plugins)
    target(pipe, *args)


@contextmanager
def _starts_process(environment: Mapping[str, str] | None) -> Iterator[None]:
    """The context in which a child or the fork server starts; it gets the variables in ``environment``."""
    global _starter  # noqa: PLW0603
    _starter = os.getpid()
    # A fork server would otherwise import modules from the current folder, such as a user's statistics.py.
    variables = {"PYTHONSAFEPATH": "1", **(environment or {})}
    with _start_lock, _environment(variables), _without_main(), interrupts_blocked():
        yield


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the running script, which a spawned process would import as its main module."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


CGROUP_ROOT, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Control groups, and the file that lists this process's groups: one ``id:controllers:path`` per line.

Version 2 of cgroups lists a single group, without controllers.
"""
_core_limit: int | None = None


def use_cores(limit: int) -> None:
    """Limit what ``available_cores`` returns in this process, for processes that share the machine."""
    global _core_limit  # noqa: PLW0603
    _core_limit = limit


def available_cores() -> int:
    """The number of cores that this process may train on: its limit, or all usable ones if it can start children."""
    if not can_start_children():
        return 1
    return usable_cores() if _core_limit is None else _core_limit


def usable_cores() -> int:
    """The number of cores in this process's affinity mask, limited by its CPU quota (rounded up)."""
    return max(1, math.ceil(min(cores_in_affinity_mask(), cpu_quota())))


def cpu_quota() -> float:
    """The number of CPU cores that Linux control groups (cgroups) allow, e.g. 1.5 after ``docker --cpus 1.5``.

    A group inherits the limits of all its parents, so the smallest one counts. The result is infinity without a limit.
    """
    smallest = math.inf
    for line in _read(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):  # e.g. a group that only limits memory
            continue
        group = CGROUP_ROOT / controllers
        for part in ("", *Path(path).parts[1:]):  # from the root group down to this process's
            group /= part
            smallest = min(smallest, _group_quota(group))
    return smallest


def _group_quota(group: Path) -> float:
    """The cores that one control group allows: its CPU time (quota) per period; infinity without a limit."""
    limit = _read(group / "cpu.max")
    if limit:  # version 2: "quota period", or "max period" without a limit
        quota, _, period = limit.partition(" ")
    else:  # version 1: a file for each; the quota is -1 without a limit
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() else math.inf


def _read(file: Path) -> str:
    """The content of a file; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
