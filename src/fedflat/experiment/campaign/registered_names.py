"""Names of the user's own, of algorithms, parts and models: known to the process that registered them, and to those it tells."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fedflat.algorithms import registration
from fedflat.engines.cpu.worker_pool import can_travel
from fedflat.experiment.config import Config
from fedflat.models import MODELS, ModelSpec

Told = list[bytes]
"""Names and what they stand for, each by itself: one that another process cannot import is no reason not to know the others."""


def tell() -> Told:
    """The names that another process can know."""
    return [pickle.dumps(named) for named in _own_names().items() if can_travel(named)]


def learn(told: Told) -> None:
    """Know names of another process; what cannot be had here is missed where it is used."""
    for one in told:
        with suppress(Exception):
            name, what = pickle.loads(one)
            _name(name, what)


def stuck(configs: Iterable[Config]) -> list[str]:
    """Names in some configs that stand for what the running script defines, and which no other process can know."""
    fixed = {name for name, what in _own_names().items() if not can_travel(what)}
    used = {word for config in configs for word in re.findall(r"[\w-]+", f"{config.algorithm} {config.model}")}
    return sorted(fixed & used)


def _own_names() -> dict[str, Any]:
    """What this process knows by name and a new one would not."""
    return registration.registered() | {
        name: spec for name, spec in MODELS.items() if not spec.__module__.startswith("fedflat.")
    }


def _name(name: str, what: Any) -> None:
    if isinstance(what, type) and issubclass(what, ModelSpec):
        MODELS.register(name, what)
    else:
        registration.register(name, what)
