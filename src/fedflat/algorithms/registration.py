"""Algorithms and parts of others: registered in Python, or by a package that is installed."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.composition import PARTS, name_part
from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.lr_schedule import LrSchedule
from fedflat.algorithms.perturbation.base import Perturbation
from fedflat.algorithms.server import Sgd
from fedflat.algorithms.table import NAMED
from fedflat.averaging import Average
from fedflat.errors import UserError

GROUP = "fedflat.algorithms"
"""The group of entry points by which an installed package registers what it brings."""
KINDS: dict[type[Any], str] = {
    Drift: "drift",
    Perturbation: "perturbation",
    LrSchedule: "lr_schedule",
    Sgd: "server",
    Average: "averages",
}

_REGISTERED: dict[str, Algorithm | type[Any]] = {}


def register(name: str, what: Algorithm | type[Any]) -> None:
    """Give a name to an algorithm, or to a slot's class as a part: from then on texts, commands and configs know it.

    A named algorithm is used as any other, ``mine(rho=0.1)+wima``; a part is added to one, ``scaffold+mine``.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise UserError(
            f"'{name}' cannot be the name of an algorithm; expected small letters, digits and hyphens, for example my-sam"
        )
    taken = NAMED.get(name) or (PARTS[name][1] if name in PARTS else None)
    if taken is not None and taken != what:
        raise UserError(f"there is already an algorithm or part '{name}'; choose another name")
    if isinstance(what, Algorithm):
        NAMED[name] = what
    else:
        slot = next((slot for kind, slot in KINDS.items() if isinstance(what, type) and issubclass(what, kind)), None)
        if slot is None:
            kinds = ", ".join(kind.__name__ for kind in KINDS)
            raise UserError(
                f"'{name}' can be registered only as an Algorithm or as a class derived from {kinds}; this is {what!r}"
            )
        name_part(name, slot, what)
    _REGISTERED[name] = what


def registered() -> dict[str, Algorithm | type[Any]]:
    """All that has been registered, by name."""
    return {name: what for name, what in _REGISTERED.items() if name in NAMED or name in PARTS}


@cache
def load_installed() -> tuple[str, ...]:
    """Register what installed packages bring, once; the names, sorted."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    for entry in found:
        try:
            what = entry.load()
        except Exception as error:  # a broken package of others must not break every command, but be told of
            raise UserError(
                f"the installed package {entry.dist.name if entry.dist else entry.value} brings the algorithm '{entry.name}', "
                f"which cannot be loaded ({type(error).__name__}: {error}); update or uninstall it"
            ) from error
        register(entry.name, what)
    return tuple(entry.name for entry in found)
