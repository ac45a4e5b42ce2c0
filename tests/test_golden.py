"""Every algorithm reproduces its golden iterates with the loop engine."""

from __future__ import annotations

import numpy as np
import pytest

from .quadratics import text_of, walk
from .reference import GOLDEN, golden


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    method, parameters, expected = GOLDEN[name]
    assert np.abs(np.array(walk(text_of(method, **parameters), golden()).x) - np.array(expected)).max() < 1e-9
