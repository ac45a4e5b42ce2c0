"""Checks that a supported version of Flower is installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from fedflat.errors import UserError

OLDEST, NEWEST = (1, 41), (1, 42)
"""Supported versions; fedflat imports private modules of Flower, which may change with any version."""
INSTALL = "pip install 'fedflat[flower]'"


def require_flower() -> None:
    """Raise ``UserError`` if Flower is missing or its version is not supported."""
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise UserError(f"deployment needs Flower, which is not installed; install it with: {INSTALL}") from None
    check_version(installed)


def check_version(installed: str) -> None:
    """Raise ``UserError`` if a version of Flower is not supported.

    >>> check_version("1.41.0"), check_version("1.42.1")
    (None, None)
    """
    major_and_minor = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if not OLDEST <= major_and_minor <= NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise UserError(f"Flower {installed} is not supported; fedflat needs {oldest} to {newest}: {INSTALL}")
