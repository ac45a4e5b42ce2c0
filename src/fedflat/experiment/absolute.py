"""Paths of a config, written so that they are the same from whatever folder the config is read."""

from __future__ import annotations

import re
from pathlib import Path

_NAMED = re.compile(r"\b((?:arrays|domains|images|listed)\s*\((?:[^()]*,)?\s*path\s*=\s*)([^,()]+?)(?=\s*[,)])")
"""The path of a dataset or a partition that lies in files of the user's; that of ``hub`` is a name."""


def absolute(path: Path) -> Path:
    """A path from the root on, with ``~`` as the user's home."""
    return path.expanduser().absolute()


def with_absolute_paths(text: str) -> str:
    """A text whose files are named from the root on.

    >>> with_absolute_paths("arrays(path=/data/wine.npz)"), with_absolute_paths("hub(path=ylecun/mnist)")
    ('arrays(path=/data/wine.npz)', 'hub(path=ylecun/mnist)')
    """
    return _NAMED.sub(_absolute_path, text)


def _absolute_path(found: re.Match[str]) -> str:
    given = found[2].strip("\"'")
    path = str(absolute(Path(given)))
    is_writable = bool(given) and not set(path) & set(
        ",()"
    )  # the grammar of texts knows no way to write these in a path
    return found[1] + path if is_writable else found[0]
