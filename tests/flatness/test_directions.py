"""Directions: filter normalisation by its definition, and the same random numbers for all models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.batches import normal
from fedflat.flatness.landscapes.directions import directions_around, filter_normalised
from fedflat.models.layout import Layout


class Small(nn.Module):
    """A convolution, a normalisation and a linear layer, with filters of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.GroupNorm(1, 3)
        self.linear = nn.Linear(5, 4)
        with torch.no_grad():
            self.conv.weight[1] *= 100
            self.linear.weight[2] *= 0.01


def flat(model: nn.Module) -> tuple[Layout, Tensor]:
    layout = Layout.of_parameters(model)
    return layout, layout.flatten({name: p.detach() for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def small() -> tuple[Layout, Tensor]:
    torch.manual_seed(0)
    return flat(Small().double())


def test_every_filter_of_a_convolution_has_the_models_norm(small: tuple[Layout, Tensor]) -> None:
    layout, weights = small
    raw = normal(weights, 3, "landscape")
    views, own, before = (layout.views(v) for v in (filter_normalised(layout, raw, weights), weights, raw))
    for j in range(3):
        assert views["conv.weight"][j].norm() == pytest.approx(float(own["conv.weight"][j].norm()))
        by_hand = before["conv.weight"][j] / before["conv.weight"][j].norm() * own["conv.weight"][j].norm()
        torch.testing.assert_close(views["conv.weight"][j], by_hand)


def test_every_row_of_a_linear_layer_has_the_models_norm(small: tuple[Layout, Tensor]) -> None:
    layout, weights = small
    (direction,) = directions_around(layout, weights, seed=1, count=1)
    rows = layout.views(direction)["linear.weight"].norm(dim=1)
    torch.testing.assert_close(rows, layout.views(weights)["linear.weight"].norm(dim=1))
    assert rows[2] < 0.05 * rows[0]


def test_one_dimensional_tensors_are_not_moved(small: tuple[Layout, Tensor]) -> None:
    layout, weights = small
    views = layout.views(directions_around(layout, weights)[0])
    one_dimensional = {name for name, view in views.items() if view.ndim == 1}
    assert one_dimensional == {"conv.bias", "norm.weight", "norm.bias", "linear.bias"}
    assert all(not views[name].any() for name in one_dimensional)


def test_scaled_tensors_with_one_dimension_count_as_one_filter(small: tuple[Layout, Tensor]) -> None:
    layout, weights = small
    views, own = layout.views(directions_around(layout, weights, one_dimensional="scaled")[0]), layout.views(weights)
    assert views["norm.weight"].norm() == pytest.approx(float(own["norm.weight"].norm()))
    assert not views["norm.bias"].any()  # zero in the model, so zero here


def test_a_dead_filter_is_not_moved(small: tuple[Layout, Tensor]) -> None:
    layout, weights = small
    dead = weights.clone()
    layout.views(dead)["conv.weight"][0] = 0
    direction = directions_around(layout, dead)[0]
    assert direction.isfinite().all()
    assert not layout.views(direction)["conv.weight"][0].any()


def test_a_zero_filter_of_a_direction_stays_zero(small: tuple[Layout, Tensor]) -> None:
    layout, weights = small
    assert not filter_normalised(layout, torch.zeros_like(weights), weights).any()


@given(st.floats(0.01, 100), st.integers(0, 5))
@settings(max_examples=20)
def test_the_scale_of_the_random_numbers_does_not_matter(factor: float, seed: int) -> None:
    layout, weights = flat(nn.Linear(4, 3).double())
    raw = normal(weights, seed, "landscape")
    torch.testing.assert_close(
        filter_normalised(layout, factor * raw, weights), filter_normalised(layout, raw, weights)
    )


def test_rescaling_a_network_rescales_its_direction(small: tuple[Layout, Tensor]) -> None:
    """Landscapes of different networks are comparable: a filter that is k times larger moves k times as far."""
    layout, weights = small
    larger = weights.clone()
    layout.views(larger)["conv.weight"][2] *= 7
    one, other = (layout.views(directions_around(layout, w)[0]) for w in (weights, larger))
    torch.testing.assert_close(other["conv.weight"][2], 7 * one["conv.weight"][2])
    torch.testing.assert_close(other["linear.weight"], one["linear.weight"])


def test_random_numbers_depend_only_on_seed_and_index() -> None:
    like = torch.zeros(1000)
    one = normal(like, 0, "landscape")
    assert torch.equal(one, normal(like, 0, "landscape"))
    assert not torch.equal(one, normal(like, 0, "landscape", 1))
    assert not torch.equal(one, normal(like, 1, "landscape"))
    assert abs(float(one.mean())) < 0.15
    assert 0.9 < float(one.std()) < 1.1


def test_two_directions_of_a_large_model_are_nearly_orthogonal() -> None:
    layout, weights = flat(nn.Linear(300, 50))
    first, second = directions_around(layout, weights)
    assert abs(float(torch.cosine_similarity(first, second, dim=0))) < 0.03


def test_invalid_requests_are_rejected() -> None:
    layout, weights = flat(nn.Linear(2, 2))
    with pytest.raises(UserError, match="expected 6"):
        filter_normalised(layout, torch.zeros(5), weights)
    with pytest.raises(UserError, match="expected one of scaled, zero"):
        filter_normalised(layout, torch.zeros(6), weights, "keep")  # type: ignore[arg-type]
