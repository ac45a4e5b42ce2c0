"""The order in which each method returns eigenvalues."""

from __future__ import annotations

import pytest
import torch

from fedflat import flatness

from .networks import Quadratic, symmetric


@pytest.mark.parametrize("method", ["lanczos", "power"])
@pytest.mark.parametrize(("by", "values"), [("value", [3.0, 1.0, -8.0]), ("magnitude", [-8.0, 3.0, 1.0])])
def test_by_value_or_by_magnitude(method: str, by: str, values: list[float]) -> None:
    saddle = Quadratic(symmetric(torch.tensor(values)), torch.zeros(3).double(), torch.ones(3).double()).objective()
    found = flatness.spectrum(saddle, 3, method=method, by=by, iterations=200, trace_draws=0)
    assert found.eigenvalues == pytest.approx(values, abs=1e-3)
