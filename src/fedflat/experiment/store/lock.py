"""Who works on a run: one process at a time, and a process that is killed lets go of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedflat.errors import UserError
from fedflat.experiment.store.atomic_files import create_folder, explain_os_error


class Lock(UserError):
    """Someone else is working on the same run."""


@contextmanager
def claimed(folder: Path, patiently: bool = False, run: Path | None = None) -> Iterator[None]:
    """Keep a folder to oneself, from before there is anything in it; ``Lock`` where another process has it, unless one waits ``patiently``.

    The lock is on the folder itself and the operating system's, so that it leaves no file behind and ends with the process, however
    that ends. Where the folder is part of a ``run``, that is the one which is told of.
    """
    create_folder(folder)
    with explain_os_error(folder, "open"):
        descriptor = os.open(folder, os.O_RDONLY) if os.name == "posix" else None
    try:
        if descriptor is not None:
            _lock(descriptor, run or folder, patiently)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(descriptor: int, folder: Path, patiently: bool) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if patiently else fcntl.LOCK_NB))
    except OSError:
        raise Lock(f"another process is working on {folder}; wait for it, or choose another --out") from None


def is_free(folder: Path) -> bool:
    """Whether no process works on a folder at this moment."""
    try:
        with claimed(folder):
            return True
    except Lock:
        return False
