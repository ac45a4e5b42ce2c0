"""Where datasets lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "FEDFLAT_DATA"


def data_dir(explicit: str | Path | None = None) -> Path:
    """The data folder: the one asked for, else ``$FEDFLAT_DATA``, else ``fedflat/data`` in the user's cache."""
    if explicit is not None:
        return Path(explicit).expanduser()
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedflat" / "data"
