"""Whether Flower is here, and new enough."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from fedflat.errors import UserError

OLDEST = (1, 41)
INSTALL = "pip install 'fedflat[flower]'"


def require_flower() -> None:
    """Refuse to go on without a Flower that has what is needed."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise UserError(f"deployment runs on Flower, which is not installed; install it with: {INSTALL}") from None
    check_version(found)


def check_version(found: str) -> None:
    """Refuse a version of Flower that is too old.

    >>> check_version("1.41.0"), check_version("2.0.0rc1")
    (None, None)
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"Flower {found} is too old, since its ports and messages were others; fedflat needs {oldest} or newer: {INSTALL}"
        )
