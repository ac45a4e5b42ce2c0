"""What server and nodes must agree on before they work together, as short hashes."""

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
"""Letters of what is told beside its hash."""


@dataclass(frozen=True)
class Identity:
    """The version of fedflat, the algorithm, the model, how clients train, and what their labels stand for."""

    fedflat: str
    algorithm: str
    model: str
    training: str
    classes: str

    def values(self) -> dict[str, str]:
        """As plain values, to be sent."""
        return asdict(self)

    def differences(self, other: Mapping[str, Any], here: str, there: str) -> str:
        """What differs, with both sides' values; empty where nothing does."""
        found = [
            f"{name} is {value} {here} but {other.get(name, 'not said')} {there}"
            for name, value in self.values().items()
            if other.get(name) != value
        ]
        return "; ".join(found)


def identity_of(problem: Problem, training: Training) -> Identity:
    """The identity of a problem and of how its clients train."""
    version = importlib.import_module("fedflat").__version__  # the package itself stands above all layers
    algorithm, classes = canonical(training.algorithm), ", ".join(problem.data.classes)
    return Identity(
        version, _named(algorithm), model_hash(problem, training), _training_hash(training), _named(classes)
    )


def model_hash(problem: Problem, training: Training) -> str:
    """A hash of the names and shapes of all that is trained; of first weights too, where clients start their own state from them."""
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
    """How clients train, without what the server alone does."""
    parts = (
        training.descent,
        training.schedule,
        training.plan,
        training.seed,
        training.clients,
        training.own_statistics,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _named(text: str) -> str:
    return f"{shorten(text, LONGEST, placeholder='...')} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
