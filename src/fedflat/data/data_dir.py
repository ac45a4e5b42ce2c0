"""The data directory: where dataset files are stored on this machine."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "FEDFLAT_DATA"


def data_dir(explicit: str | Path | None = None) -> Path:
    """Return ``explicit`` if given, else ``$FEDFLAT_DATA``, else ``fedflat/data`` under the user's cache directory."""
    chosen = explicit if explicit is not None else os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else user_cache() / "data"


def user_cache() -> Path:
    """Return the ``fedflat`` folder in the user's cache (``$XDG_CACHE_HOME``, else ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedflat"
