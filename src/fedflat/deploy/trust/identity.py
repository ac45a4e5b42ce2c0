"""What server and nodes must agree on before they work together, as values and short hashes."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

from fedflat.algorithms import canonical
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Training

LONGEST = 200
"""Longest text shown before its hash."""


@dataclass(frozen=True)
class Identity:
    """Version of fedflat, algorithm, hashes of model and training, and class names."""

    fedflat: str
    algorithm: str
    model: str
    training: str
    classes: str

    def values(self) -> dict[str, str]:
        """The fields as a dictionary, to be sent."""
        return asdict(self)

    def differences(self, other: Mapping[str, Any], here: str, there: str) -> str:
        """What differs, with both sides' values; empty if nothing does. ``here`` and ``there`` name the sides."""
        parts = [
            f"{name} is {value} {here} but {other.get(name, 'missing')} {there}"
            for name, value in self.values().items()
            if other.get(name) != value
        ]
        return "; ".join(parts)


def identity_of(problem: Problem, training: Training) -> Identity:
    """The identity of a problem and its training."""
    version = importlib.import_module("fedflat").__version__  # above all layers, so not imported statically
    algorithm, classes = canonical(training.algorithm), ", ".join(problem.data.classes)
    return Identity(
        version, _with_hash(algorithm), model_hash(problem, training), _training_hash(training), _with_hash(classes)
    )


def model_hash(problem: Problem, training: Training) -> str:
    """Hash of all trained names and shapes, and of the initial weights if clients' state starts from them."""
    digest = hashlib.sha256()
    for layout in (problem.layout, problem.buffers):
        digest.update(
            repr([(name, tuple(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)]).encode()
        )
    digest.update(str(problem.dtype).encode())
    digest.update(problem.frozen.fingerprint().encode())
    starts = [field.start for fields in training.algorithm.client_fields().values() for field in fields]
    if "model" in starts:
        digest.update(problem.initial()[0].cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def _training_hash(training: Training) -> str:
    """Hash of how clients train, without what only the server does."""
    parts = (
        training.descent,
        training.schedule,
        training.plan,
        training.seed,
        training.clients,
        training.own_statistics,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _with_hash(text: str) -> str:
    return f"{shorten(text, LONGEST, placeholder='...')} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
