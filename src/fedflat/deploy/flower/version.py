"""Checks that Flower is installed and new enough."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from fedflat.errors import UserError

OLDEST = (1, 41)
INSTALL = "pip install 'fedflat[flower]'"


def require_flower() -> None:
    """Raise ``UserError`` if Flower is missing or too old."""
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise UserError(f"deployment needs Flower, which is not installed; install it with: {INSTALL}") from None
    check_version(installed)


def check_version(installed: str) -> None:
    """Raise ``UserError`` if a version of Flower is too old; older versions use different ports and messages.

    >>> check_version("1.41.0"), check_version("2.0.0rc1")
    (None, None)
    """
    major_and_minor = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if major_and_minor < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(f"Flower {installed} is too old; fedflat needs {oldest} or newer: {INSTALL}")
