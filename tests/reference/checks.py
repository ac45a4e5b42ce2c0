"""Settings and helpers that the tests of the numpy reference share."""

from typing import Any

import numpy as np
import pytest

from . import (
    METHODS,
    Recording,
    Setting,
    Trace,
    bed,
    draw_cohorts,
)
from .trace import Vector

FULL, PARTIAL = bed(rounds=8), bed(rounds=12, size=2)
FULL_OR_PARTIAL = pytest.mark.parametrize("setting", [FULL, PARTIAL], ids=["full", "partial"])
ALL = pytest.mark.parametrize("name", METHODS)


def run(setting: Setting, name: str, **parameters: Any) -> Trace:
    return setting.run(METHODS[name], **parameters)


def uneven(setting: Setting) -> Setting:
    """The same with a rate that decays over the rounds and unequal numbers of local steps."""
    return setting.but(eta=np.linspace(0.06, 0.03, len(setting.cohorts)), steps=[7, 3, 5, 1, 4])


def same(left: Any, right: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=atol)


def end(setting: Setting, name: str, rounds: int, size: int | None = None, **parameters: Any) -> Vector:
    cohorts = draw_cohorts(rounds, setting.problem.N, size)
    return run(setting.but(cohorts=cohorts), name, **parameters).x[-1]


def recorded(setting: Setting, name: str, **parameters: Any) -> tuple[Trace, list[tuple[int, Vector, Vector]]]:
    problem = Recording(setting.problem)
    return run(setting.but(problem=problem), name, **parameters), problem.calls
