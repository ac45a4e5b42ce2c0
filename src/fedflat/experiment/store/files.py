"""Files and folders: atomic writes, YAML, locks, and readable errors of the operating system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from fedflat.errors import UserError
from fedflat.yaml_text import load_yaml

_ADVICE = {
    "No space left on device": "free some space",
    "File too large": "raise the limit on file sizes (ulimit -f)",
}
"""What to do about an error of the operating system, by its text."""


@contextmanager
def explain_os_error(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn an ``OSError`` about ``path`` into a ``UserError``; ``doing`` is the verb in its message."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = _ADVICE.get(reason, "choose another folder with --out")
        raise UserError(
            f"cannot {doing} {path}: {reason.lower()}; {advice} and start again (continue a run with fedflat resume)"
        ) from None


def create_folder(path: Path) -> None:
    """Create a folder and its parents."""
    with explain_os_error(path, "create the folder"):
        path.mkdir(parents=True, exist_ok=True)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file atomically: to a temporary file first, which replaces ``path`` once it is on disk.

    A killed process thus leaves either the old file or the new one, never half of it.
    """
    temporary = path.with_name(path.name + ".part")
    with explain_os_error(path):
        try:
            with temporary.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; raises a ``UserError`` unless it contains a mapping."""
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} contains no settings; expected a YAML mapping such as 'algorithm: fedavg'")
    return values


LOCK_FILE = ".lock"
"""File in a folder that carries its lock; it is empty and stays after release."""
_HELD_HERE: set[Path] = set()
"""The folders that this process has locked."""


class LockedError(UserError):
    """The folder is in use, by another process or elsewhere in this one."""


class Lock:
    """An exclusive lock on a folder, which is created if it does not exist.

    Args:
        folder: the folder to lock.
        subject: the path to name in messages, if it is not ``folder`` itself.
    """

    def __init__(self, folder: Path, subject: Path | None = None) -> None:
        self._given, self._subject = folder, subject or folder
        self._folder = folder.absolute()  # the process may change its working directory
        self._lock: FileLock | None = None

    def acquire(self, wait: bool = False) -> None:
        """Lock the folder; if it is locked already, wait for it or raise ``LockedError``."""
        create_folder(self._given)
        lock = FileLock(self._folder / LOCK_FILE, thread_local=False)
        with explain_os_error(self._given, "lock"):
            try:
                lock.acquire(blocking=wait)
            except Timeout:
                raise LockedError(self._in_use()) from None
        self._lock = lock
        _HELD_HERE.add(self._folder.resolve())

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._lock is not None:
            _HELD_HERE.discard(self._folder.resolve())
            self._lock.release()
            self._lock = None

    def _in_use(self) -> str:
        """The message for a folder that is already locked."""
        if self._folder.resolve() in _HELD_HERE:
            return (
                f"this process is already working on {self._subject}, in an open fedflat.rounds or another thread; "
                "end that with .close() or .result(), or choose another out"
            )
        return f"another process is working on {self._subject}; wait for it, or choose another --out"


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder within the context; if it is taken, wait for it or raise ``LockedError``."""
    lock = Lock(folder)
    lock.acquire(wait)
    try:
        yield
    finally:
        lock.release()


def is_free(folder: Path) -> bool:
    """Whether the folder is unlocked at this moment."""
    try:
        with locked(folder):
            return True
    except LockedError:
        return False
