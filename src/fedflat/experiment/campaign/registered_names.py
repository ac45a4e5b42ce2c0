"""Names that users register (algorithms, slots, models, datasets), passed on to the processes that run experiments."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fedflat.algorithms import composition
from fedflat.data import DATASETS
from fedflat.data.sources.user_function import FunctionSource
from fedflat.experiment.config import Config
from fedflat.models import MODELS
from fedflat.processes import is_sendable

PickledNames = list[bytes]
"""(name, component) pairs, pickled one by one so that one failed import does not affect the others."""


def pickled_names() -> PickledNames:
    """The registered names whose components can be sent to another process."""
    return [pickle.dumps(pair) for pair in _registered().items() if is_sendable(pair)]


def register_names(names: PickledNames) -> None:
    """Register names from another process; a component that cannot be imported here is reported when it is used."""
    for pickled in names:
        with suppress(Exception):
            name, component = pickle.loads(pickled)
            composition.register(name, component)


def unsendable_names(configs: Iterable[Config]) -> list[str]:
    """Names used in ``configs`` whose components the running script defines, which no other process can import."""
    local = {name for name, component in _registered().items() if not is_sendable(component)}
    texts = " ".join(f"{config.algorithm} {config.model} {config.data.dataset}" for config in configs)
    return sorted(local.intersection(re.findall(r"[\w-]+", texts)))


def _registered() -> dict[str, Any]:
    """User-registered algorithms, parts, models and datasets, by name."""
    models = {name: spec for name, spec in MODELS.items() if not spec.__module__.startswith("fedflat.")}
    datasets = {name: source.function for name, source in DATASETS.items() if isinstance(source, FunctionSource)}
    return composition.registered() | models | datasets
