"""Calls that differ between operating systems; all other code is portable.

Linux and macOS have all of them. Windows has no fork: child processes are spawned instead, except those of the warm
Flower executor, which raises a clear error. Locks (filelock) and shared memory (torch) are portable already.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

from fedflat.errors import UserError

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext

MALLOC_THRESHOLD = 2**28
"""Bytes of freed memory that malloc keeps at most, and size of the largest allocation that it serves from its heap."""
KEEPS_FREED_MEMORY = {"MIMALLOC_PURGE_DELAY": os.environ.get("MIMALLOC_PURGE_DELAY", "1000")}
"""Makes mimalloc, torch's allocator on ARM, keep freed memory for 1000 ms instead of 10 ms.

mimalloc reads this environment variable when torch is loaded, so set it before a process starts.
"""
PROC = Path("/proc")
BINARY = getattr(os, "O_BINARY", 0)
"""Flag for ``os.open``: without it, Windows changes line ends."""


def fork_context(purpose: str) -> ForkContext:
    """The context that starts processes as forks of this one.

    Args:
        purpose: what needs it, for the ``UserError`` on Windows.
    """
    if sys.platform == "win32":
        raise UserError(f"{purpose} forks processes, which Windows cannot do; run it on Linux, macOS or WSL 2")
    return multiprocessing.get_context("fork")


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read up to ``size`` bytes of a file at an offset in bytes."""
    if sys.platform == "win32":
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)
    return os.pread(descriptor, size, offset)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all bytes at an offset; a single system call may write only some of them."""
    view = memoryview(data)
    while view:
        if sys.platform == "win32":
            os.lseek(descriptor, offset, os.SEEK_SET)
            written = os.write(descriptor, view)
        else:
            written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make created, renamed and deleted names in a folder durable; no effect where the system cannot do this."""
    if sys.platform == "win32":
        return
    with suppress(PermissionError):  # the folder may be writable but not readable
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
                raise
        finally:
            os.close(descriptor)


def peak_memory() -> int | None:
    """Largest resident memory of this process so far, in KiB; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak  # macOS counts bytes


def total_memory() -> int:
    """Memory of this machine in bytes; ``sys.maxsize`` where the system does not tell."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cores_in_affinity_mask() -> int:
    """The number of cores on which this process may run; macOS and Windows have no mask and count all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_masks() -> tuple[int, set[int]]:
    """The umask of this process, and the cores on which this thread may run; macOS and Windows give no cores."""
    umask = os.umask(0o077)  # can only be read by setting it
    os.umask(umask)
    return umask, os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def set_process_masks(umask: int, cores: set[int]) -> None:
    """Set what ``process_masks`` returned in another process."""
    os.umask(umask)
    if cores:
        os.sched_setaffinity(0, cores)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory: every training step frees and allocates the same megabytes again."""
    with suppress(OSError, AttributeError, TypeError):  # other systems have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        # M_TRIM_THRESHOLD of malloc.h; from now on, malloc chooses no threshold by itself.
        mallopt(-1, MALLOC_THRESHOLD)
        mallopt(-3, MALLOC_THRESHOLD) or mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; old versions accept at most 32 MiB


def descendants(root: int) -> dict[int, str]:
    """The start times of a process's descendants, in clock ticks, by process id; empty except on Linux."""
    if not sys.platform.startswith("linux"):
        return {}
    return {pid: _start_time(pid) for pid in with_descendants(root)[1:]}


def kill_processes(processes: Mapping[int, str]) -> None:
    """Kill the processes that :func:`descendants` listed; a later process with the same id has another start time."""
    for pid, start_time in processes.items():
        with suppress(ProcessLookupError, PermissionError):
            if start_time and _start_time(pid) == start_time:
                os.kill(pid, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill a process that leads a group, and all others of the group; on Windows, which has no groups, only itself."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            os.kill(leader, signal.SIGTERM)  # ends it at once
        else:
            os.killpg(leader, signal.SIGKILL)


def with_descendants(root: int) -> list[int]:
    """The process ids of a process and its descendants on Linux, starting with ``root`` itself."""
    parents = {int(path.name): _parent(int(path.name)) for path in PROC.iterdir() if path.name.isdigit()}
    pids = [root]
    for pid in pids:  # the list grows while it is traversed
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids


def process_stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the process's name: state, parent, ...; empty if it has exited."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    """The id of a process's parent, or 0 if the process itself has exited."""
    fields = process_stat(pid)
    return int(fields[1]) if fields else 0


def _start_time(pid: int) -> str:
    """The start time of a process, in clock ticks since the machine started; empty if it has exited."""
    return (process_stat(pid)[19:20] or [""])[0]


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT and SIGHUP while child processes are started. No effect on Windows.

    Children inherit the block and keep it, so Ctrl-C, which reaches all processes of a terminal, does not end them;
    they exit when their parent closes their pipes. In this process, blocked signals arrive at the end of the context.
    """
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # it unblocks these signals when it starts, so start it first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
