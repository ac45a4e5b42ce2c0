"""Files and folders: atomic and durable writes, logs, YAML, locks, and clear messages for ``OSError``."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

import yaml
from filelock import FileLock, Timeout

from fedflat.errors import MachineFailed, UserError, similar_file
from fedflat.operating_system import BINARY, sync_folder
from fedflat.yaml_text import load_yaml

_AGAIN = "and start again (continue a run with fedflat resume)"
_ADVICE = {
    "Permission denied": "make it writable, or choose another folder",
    "No space left on device": f"free some space {_AGAIN}",
    "Disk quota exceeded": f"free some space {_AGAIN}",
    "File too large": f"raise the limit on file sizes (ulimit -f) {_AGAIN}",
}
"""What to do about an ``OSError``, by its ``strerror``."""


class DamagedFile(UserError):
    """A file of a run is missing, incomplete or changed; the message names it."""


@contextmanager
def explain_os_error(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn an ``OSError`` about ``path`` into ``MachineFailed``, whose message begins "cannot {doing} {path}"."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = _ADVICE.get(reason, "choose another folder")
        raise MachineFailed(f"cannot {doing} {path}: {reason.lower()}; {advice}") from None


def require_folder(file: Path) -> None:
    """Raise a ``UserError`` unless the folder of a file exists."""
    if not file.absolute().parent.is_dir():
        raise UserError(f"{file} cannot be written: folder {file.parent} does not exist; create it first")


def require_no_file(folder: Path) -> None:
    """Raise a ``UserError`` if a path, or one of its parents, is a file and thus cannot be a folder."""
    with explain_os_error(folder, "create the folder"):
        existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing is not None and not existing.is_dir():
        raise UserError(f"{existing} is a file; expected a folder")


def create_folder(path: Path) -> None:
    """Create a folder and its parents; durable on return."""
    require_no_file(path)
    with explain_os_error(path, "create the folder"):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:  # a new folder is durable once the folder that contains it is synced
            sync_folder(folder.parent)


def write_atomically(path: Path, data: bytes | str, exclusive: bool = False, mode: int = 0o666) -> None:
    """Write a file atomically: to a temporary file first, which replaces ``path`` once its content is on disk.

    A killed process or a power failure thus leaves either the old content or the new one, never a mixture. A symlink
    stays, and the file it points to is written.

    Args:
        path: the file.
        data: its new content.
        exclusive: whether a lock keeps others from writing the file concurrently. The temporary file then has a
            fixed name, so that the next write replaces one that a killed process has left.
        mode: permissions of the file, before the umask is applied.

    Raises:
        UserError: ``path`` exists and is not a regular file, e.g. a folder or a fifo; or it cannot be written.
    """
    require_regular(path)
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    owner = "" if exclusive else f".{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f"{path.name}{owner}.part")
    with explain_os_error(path):
        try:
            _write(temporary, data, os.O_TRUNC, sync=True, mode=mode)
            rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def require_regular(path: Path) -> None:
    """Raise a ``UserError`` if a path exists and is neither a regular file nor a symlink to one or to nothing."""
    with explain_os_error(path):
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise UserError(f"{path} is {kind}; choose another name")


def rename(path: Path, target: Path) -> None:
    """Give a file another name in the same folder, replacing ``target``; durable on return."""
    path.replace(target)
    sync_folder(target.parent)


def append(path: Path, text: str) -> None:
    """Append text to a file; it is durable only after ``sync``."""
    with explain_os_error(path):
        _write(path, text, os.O_APPEND, sync=False)


def truncate(path: Path, length: int) -> None:
    """Cut a file to ``length`` bytes; create it if it does not exist."""
    with explain_os_error(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | BINARY, 0o666)
        try:
            os.ftruncate(descriptor, length)
        finally:
            os.close(descriptor)


def sync(path: Path) -> None:
    """Make the content of a file durable, so that a power failure does not lose it."""
    with explain_os_error(path):
        _write(path, b"", 0, sync=True)


def _write(path: Path, data: bytes | str, flags: int, *, sync: bool, mode: int = 0o666) -> None:
    """Write data to a file opened with additional ``flags`` of ``os.open``; ``sync`` waits until it is on disk.

    A new file has the permissions ``mode``, before the umask is applied.
    """
    view = memoryview(data.encode() if isinstance(data, str) else data)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags | BINARY, mode)
    try:
        while view:  # a single call may write only some of the bytes
            view = view[os.write(descriptor, view) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_log(
    path: Path, required: Mapping[str, type | UnionType], length: int | None = None
) -> list[dict[str, Any] | None]:
    """Read a log with one JSON object per line; an incomplete last line, which a killed process may leave, is ignored.

    Args:
        path: the log; a missing file counts as an empty log.
        required: keys that every object must have, with the types of their values.
        length: number of bytes to read; default: all.

    Returns:
        One object per line; None for a line that is damaged or lacks a required key.
    """

    def parse(line: str) -> dict[str, Any] | None:
        try:
            values = json.loads(line)
            return values if all(isinstance(values[key], kind) for key, kind in required.items()) else None
        except (ValueError, LookupError, TypeError):
            return None

    text = path.read_bytes()[:length].decode(errors="replace") if path.is_file() else ""
    complete_lines = text.split("\n")[:-1]  # what follows the last newline is empty or incomplete
    return [parse(line) for line in complete_lines]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; raises a ``UserError`` unless it contains a mapping."""
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}{similar_file(path)}; expected a YAML file") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; expected a YAML file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split()).replace('in "<unicode string>", line', "at line")
        raise UserError(f"{path} is not valid YAML: {message}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} contains no settings; expected a YAML mapping such as 'algorithm: fedavg'")
    return values


LOCK_FILE = ".lock"
"""Empty file in a folder, through which the folder is locked; the file stays when the lock is released."""
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

    def acquire(self, timeout: float = 0) -> None:
        """Lock the folder; if it is still locked after ``timeout`` seconds (-1: no limit), raise ``LockedError``."""
        create_folder(self._given)
        lock = FileLock(self._folder / LOCK_FILE, thread_local=False)
        with explain_os_error(self._given, "lock"):
            try:
                lock.acquire(timeout)
            except Timeout:
                message = f"another process is working on {self._subject}; wait for it, or choose another --out"
                if self._folder.resolve() in _HELD_HERE:
                    message = (
                        f"this process is already working on {self._subject}, in an open fedflat.rounds or another "
                        "thread; end that with .close() or .result(), or choose another folder (out)"
                    )
                raise LockedError(message) from None
        self._lock = lock
        _HELD_HERE.add(self._folder.resolve())

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._lock is not None:
            _HELD_HERE.discard(self._folder.resolve())
            self._lock.release()
            self._lock = None


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder within the context; if it is taken, wait for it or raise ``LockedError``."""
    lock = Lock(folder)
    lock.acquire(-1 if wait else 0)
    try:
        yield
    finally:
        lock.release()


def is_free(folder: Path) -> bool:
    """Whether the folder is unlocked at this moment; creates no files."""
    if not (folder / LOCK_FILE).exists():
        return True
    try:
        with locked(folder):
            return True
    except LockedError:
        return False
