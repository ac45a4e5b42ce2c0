"""Registrations and plugins of a test, undone afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedflat import registry as registry_module
from fedflat.algorithms.composition import PART_REGISTRIES
from fedflat.algorithms.named import NAMED
from fedflat.data import DATASETS
from fedflat.experiment.config import _canonical
from fedflat.models import MODELS

REGISTRIES = (NAMED, *PART_REGISTRIES.values(), MODELS, DATASETS)


@contextmanager
def registries_restored() -> Iterator[Callable[[], None]]:
    """Forget the components and plugins that are registered or loaded within; the function does so at once."""
    before = [set(registry) for registry in REGISTRIES]

    def forget() -> None:
        for path in registry_module.loaded_plugins():
            sys.modules.pop(Path(path).stem)
        registry_module._loaded.clear()
        _canonical.cache_clear()
        for registry, names in zip(REGISTRIES, before, strict=True):
            for name in set(registry) - names:
                registry.unregister(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry_module, "_loaded", {})
        patch.setattr(sys, "path", [*sys.path])
        yield forget
        forget()
