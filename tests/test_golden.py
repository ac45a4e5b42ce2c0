"""Every algorithm reproduces its golden iterates with the loop engine, and with lanes if it sees matrices."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine

from .quadratics import descent_of, problem_of, text_of, walk
from .reference import GOLDEN, GOLDEN_SOFTMAX, golden, golden_softmax


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    row = GOLDEN[name]
    text = text_of(row.method, **row.parameters)
    assert row.error(walk(text, golden(), descent=descent_of(row.parameters)).x) < 1e-9


@pytest.mark.parametrize(
    "engine", [partial(LoopEngine, workers=1), partial(LaneEngine, lanes=2)], ids=["loop", "lanes"]
)
@pytest.mark.parametrize("name", GOLDEN_SOFTMAX)
def test_golden_of_softmax_regression(name: str, engine: partial[LoopEngine | LaneEngine]) -> None:
    method, parameters, eta, first, third = GOLDEN_SOFTMAX[name]
    setting = golden_softmax().but(eta=eta)
    x = walk(
        text_of(method, **parameters), setting, descent=descent_of(parameters), engine=engine(problem_of(setting))
    ).x
    assert np.abs(np.array([x[0], x[2]]) - np.array([first, third])).max() < 1e-11
