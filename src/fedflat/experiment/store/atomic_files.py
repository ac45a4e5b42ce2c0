"""Atomic file writes: a file is either complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedflat.errors import UserError

_ADVICE = {
    "No space left on device": "free some space",
    "File too large": "raise the limit on file sizes (ulimit -f)",
}


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


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file atomically: to a temporary file first, which replaces ``path`` once it is on disk."""
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
