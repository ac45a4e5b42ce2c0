"""The identity of an experiment: values and short hashes that must be equal at the server and at every node."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

from fedflat.algorithms import canonical
from fedflat.data import Dataset
from fedflat.data.hashing import bounded_hash
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Training

LONGEST = 200
"""Maximum number of characters shown before the hash of a text."""


@dataclass(frozen=True)
class Identity:
    """What server and sites must agree on before they train together; each side computes its own and compares.

    Attributes:
        fedflat: version of the package.
        algorithm: the algorithm with all parameters, and its hash.
        model: hash of the model's layout and frozen weights.
        training: hash of the settings of local training.
        classes: names of the classes, and their hash.
        normalisation: hash of the constants that inputs and targets are normalised by; ``none`` without any.
    """

    fedflat: str
    algorithm: str
    model: str
    training: str
    classes: str
    normalisation: str

    def values(self) -> dict[str, str]:
        """Return the fields as a dictionary, to be sent."""
        return asdict(self)

    def differences(self, other: Mapping[str, Any], here: str, there: str) -> str:
        """Describe the fields in which ``other`` differs; empty if none does.

        Args:
            other: the values received from the other side.
            here: names this side in the text, e.g. "at the server".
            there: names the other side.
        """
        differing = {name: value for name, value in self.values().items() if other.get(name) != value}
        texts = (f"{name} is {v} {here} but {other.get(name, 'missing')} {there}" for name, v in differing.items())
        return "; ".join(texts)


def identity_of(problem: Problem, training: Training) -> Identity:
    """Return the identity of a problem (model, task and data) and of how clients train on it."""
    version = importlib.import_module("fedflat").__version__  # above all layers, so not imported statically
    return Identity(
        fedflat=version,
        algorithm=_with_hash(canonical(training.algorithm)),
        model=model_hash(problem, training),
        training=_training_hash(training),
        classes=_with_hash(", ".join(problem.data.classes)),
        normalisation=normalisation_hash(problem.data),
    )


def normalisation_hash(data: Dataset) -> str:
    """Return a hash of mean and standard deviation of inputs and targets; ``none`` if the dataset has none of them.

    Only the hash is sent, because the constants may be statistics of a site's own data. They are hashed in float32, so
    that copies in float32 and float64 agree.
    """
    constants = (data.mean, data.std, data.target_mean, data.target_std)
    return bounded_hash(constants) if any(constants) else "none"


def model_hash(problem: Problem, training: Training) -> str:
    """Return a hash of everything about the model that server and sites must agree on.

    It covers names and shapes of trained parameters and buffers, the dtype and the frozen weights. Initial weights are
    included only if the algorithm's client state starts from them; otherwise clients receive all from the server.
    """
    digest = hashlib.sha256()
    for layout in (problem.layout, problem.buffer_layout):
        names_and_shapes = [(name, tuple(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)]
        digest.update(repr(names_and_shapes).encode())
    digest.update(str(problem.dtype).encode())
    digest.update(problem.frozen.fingerprint().encode())
    initial_values = [field.start for fields in training.algorithm.client_fields().values() for field in fields]
    if "model" in initial_values:
        weights, _, _ = problem.initial_state()
        digest.update(weights.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def _training_hash(training: Training) -> str:
    """Return a hash of the settings of local training; the server's own settings do not count."""
    parts = (
        training.descent,
        training.schedule,
        training.plan,
        training.seed,
        training.clients,
        training.own_statistics,
        training.privacy,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _with_hash(text: str) -> str:
    """Return a text, shortened if necessary, with the hash of the full text."""
    return f"{shorten(text, LONGEST, placeholder='...')} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
