"""Files that are either there, whole, or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedflat.errors import UserError


@contextmanager
def explain_os_error(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn what the operating system says about a path into one sentence."""
    try:
        yield
    except OSError as error:
        advice = {
            "No space left on device": "free some space",
            "File too large": "raise the limit on file sizes (ulimit -f)",
        }
        why = error.strerror or str(error)
        then = advice.get(why, "choose another folder with --out")
        raise UserError(
            f"cannot {doing} {path}: {why.lower()}; {then}, then start again; a run that had begun goes on with fedflat resume"
        ) from None


def create_folder(path: Path) -> None:
    """Make a folder and its parents."""
    with explain_os_error(path, "create the folder"):
        path.mkdir(parents=True, exist_ok=True)


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file to the side, and put it in place once it is complete and on disk."""
    aside = path.with_name(path.name + ".part")
    with explain_os_error(path):
        try:
            with aside.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
