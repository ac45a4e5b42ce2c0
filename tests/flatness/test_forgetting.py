"""Forgetting: by hand, and as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedflat.errors import UserError
from fedflat.flatness.clients import forgetting

accuracies = arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(1, 4)), elements=st.floats(0, 1))


def test_forgetting_computed_by_hand() -> None:
    found = forgetting([[0.1, 0.9, 0.5], [0.9, 0.2, 0.5], [0.4, 0.7, 0.5]])
    assert found.lost == pytest.approx([0.5, 0.2, 0.0])
    assert found.swing == pytest.approx([(0.8 + 0.5) / 2, (0.7 + 0.5) / 2, 0.0])
    assert found.lowest == pytest.approx([0.4, 0.2, 0.5])


@settings(max_examples=60)
@given(accuracies)
def test_rising_accuracies_are_never_forgotten(values) -> None:
    rising = np.sort(values, axis=0)
    assert max(forgetting(rising.tolist()).lost) <= 0


@settings(max_examples=60)
@given(accuracies)
def test_the_total_change_is_at_least_the_final_loss(values) -> None:
    found = forgetting(values.tolist())
    for lost, swing in zip(found.lost, found.swing, strict=True):
        assert swing * (len(values) - 1) >= lost - 1e-12
        assert -1 <= lost <= 1


@pytest.mark.parametrize("values", [[], [[0.5, 0.5]], [0.1, 0.2]])
def test_one_measurement_is_not_enough(values) -> None:
    with pytest.raises(UserError, match=r"flatness.every"):
        forgetting(values)
