"""The settings on which the library is compared with the reference; runs of both are cached."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..quadratics import Walk, text_of, walk
from ..reference import METHODS, Quadratics, Setting, Trace, bed

K, STEPS = 4, [4, 3, 5, 1, 2]
DECAY = 0.9
FULL, PARTIAL = bed(rounds=5).but(steps=K), bed(rounds=8, size=2).but(steps=K)


def uneven(setting: Setting) -> Setting:
    """The same with a learning rate that decays every round and unequal numbers of local steps."""
    return setting.but(eta=[0.06 * DECAY**t for t in range(len(setting.cohorts))], steps=STEPS)


SETTINGS: dict[str, Setting] = {
    "full": FULL,
    "partial": PARTIAL,
    "uneven": uneven(FULL),
    "uneven-partial": uneven(PARTIAL),
}

SHORT = {"short": PARTIAL.but(cohorts=PARTIAL.cohorts[:5])}

BY_SAMPLES = (
    "fedavg",
    "fedavgm",
    "fedprox",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "fedexp",
    "fedinit",
    "feddisco",
    "fedscam",
    "fedawa",
    "mime",
    "mimelite",
    "fedsam",
    "fedasam",
    "local_adamw",
    "fedadamw",
    "local_muon",
    "fedmuon",
    "fedgmt",
    "fedsol",
    "fednova",
)
"""Methods whose reference weighs displacements by sample counts."""


def by_samples(setting: Setting) -> Setting:
    """The same problem with as many samples as steps."""
    return setting.but(problem=Quadratics(setting.problem.A, setting.problem.b, setting.steps))


@cache
def library(text: str, setting: str, weighting: str = "uniform", record: bool = False) -> Walk:
    """The library's trajectory in a named setting."""
    return walk(text, (SETTINGS | SHORT)[setting], weighting=weighting, names=("weight",), quick=True, record=record)


@cache
def _reference(method: str, parameters: tuple[tuple[str, Any], ...], setting: str) -> Trace:
    return (SETTINGS | SHORT)[setting].run(METHODS[method], **dict(parameters))


def reference(method: str, setting: str, **parameters: Any) -> Trace:
    """The trace of the reference in a named setting, with equal weights."""
    return _reference(method, tuple(parameters.items()), setting)


def named(method: str, setting: str, **parameters: Any) -> Walk:
    """A method of the reference, run by the library."""
    return library(text_of(method, **parameters), setting)


def same(left: Any, right: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=atol)


def differ(left: Any, right: Any, by: float = 1e-3) -> None:
    assert np.abs(np.asarray(left) - np.asarray(right)).max() > by
