"""Landscapes on quadratics, where every value is known; their files, and values that are not finite."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.landscapes import grid
from fedflat.flatness.landscapes.directions import directions_around
from fedflat.flatness.landscapes.grid import Landscape, Mark, Model, evaluate_models
from fedflat.flatness.landscapes.landscape import landscape_around, landscape_of, symmetric_axis
from fedflat.flatness.landscapes.path import path_of
from fedflat.flatness.objective import Objective
from fedflat.models.layout import Layout

LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), ((3, 2), (3,), (1, 3)))
EMPTY = torch.zeros(0, dtype=torch.float64)


def quadratic(size: int = LAYOUT.size) -> tuple[Tensor, Tensor]:
    """A positive definite matrix and a centre."""
    generator = torch.Generator().manual_seed(0)
    root, centre = (
        torch.randn(size, size, generator=generator).double(),
        torch.randn(size, generator=generator).double(),
    )
    return root @ root.T + torch.eye(size).double(), centre


A, CENTRE = quadratic()


def loss(model: Model) -> dict[str, Tensor]:
    offset = model.weights - CENTRE
    return {"train_loss": 0.5 * offset @ A @ offset, "norm": model.weights.norm()}


def test_two_dimensions_match_the_closed_form() -> None:
    found = landscape_around(LAYOUT, Model(CENTRE, EMPTY), loss, radius=0.5, points=7, seed=4)
    d, e = (v.numpy() for v in directions_around(LAYOUT, CENTRE, 4))
    matrix = A.numpy()
    for i, x in enumerate(found.axes[0]):
        for j, y in enumerate(found.axes[1]):
            expected = 0.5 * (x * x * d @ matrix @ d + 2 * x * y * d @ matrix @ e + y * y * e @ matrix @ e)
            assert found.values["train_loss"][i, j] == pytest.approx(expected, abs=1e-12)
    assert found.at("train_loss", 0, 0) == 0 and found.at("norm", 0, 0) == pytest.approx(float(CENTRE.norm()))
    assert found.marks == (Mark("model", (0.0, 0.0), values={"train_loss": 0.0, "norm": float(CENTRE.norm())}),)


def test_one_dimension_is_a_parabola() -> None:
    found = landscape_around(LAYOUT, Model(CENTRE, EMPTY), loss, dimensions=1, radius=2, points=9)
    (d,) = directions_around(LAYOUT, CENTRE, count=1)
    curvature = float(d @ A @ d)
    np.testing.assert_allclose(found.values["train_loss"], [0.5 * curvature * x * x for x in found.axes[0]], atol=1e-12)


def test_away_from_the_minimum_the_slope_is_the_gradient() -> None:
    start = CENTRE + 0.3
    found = landscape_around(LAYOUT, Model(start, EMPTY), loss, dimensions=1, radius=1e-3, points=3)
    (d,) = directions_around(LAYOUT, start, count=1)
    slope = (found.values["train_loss"][2] - found.values["train_loss"][0]) / 2e-3
    assert slope == pytest.approx(float(d @ A @ (start - CENTRE)), rel=1e-9)


def test_model_and_buffers_are_unchanged() -> None:
    weights, buffers = CENTRE.clone(), torch.tensor([5.0], dtype=torch.float64)
    seen = []

    def watch(model: Model) -> dict[str, Tensor]:
        seen.append(float(model.buffers))
        return {"train_loss": model.weights.sum()}

    landscape_around(LAYOUT, Model(weights, buffers), watch, points=3)
    assert torch.equal(weights, CENTRE)
    assert seen == [5.0] * 10  # nine points, and the model itself


def test_values_are_fetched_in_groups_and_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "FETCH_EVERY", 4)
    told: list[tuple[int, int]] = []
    models = (Model(torch.full((1,), float(n)), EMPTY) for n in range(10))
    found = evaluate_models(lambda model: {"value": model.weights[0]}, models, 10, lambda *where: told.append(where))
    assert found["value"].tolist() == list(range(10))
    assert told == [(4, 10), (8, 10), (10, 10)]


def test_no_gradients_are_recorded() -> None:
    weights = torch.ones(2, requires_grad=True)
    found = evaluate_models(
        lambda model: {"free": torch.tensor(float((model.weights * 2).requires_grad))}, [Model(weights, EMPTY)], 1
    )
    assert found["free"].tolist() == [0.0]


def test_the_middle_of_an_odd_axis_is_exactly_the_model() -> None:
    for points in (3, 7, 41):
        axis = symmetric_axis(0.1, points)
        assert axis[points // 2] == 0.0
        assert axis[0] == -0.1
        assert axis[-1] == 0.1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"points": 1}, "at least 2"),
        ({"radius": 0.0}, "above 0"),
        ({"radius": math.nan}, "above 0"),
        ({"radius": math.inf}, "above 0"),
        ({"dimensions": 3}, "dimensions=3"),
    ],
)
def test_impossible_landscapes_are_refused(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        landscape_around(LAYOUT, Model(CENTRE, EMPTY), loss, **wrong)  # type: ignore[arg-type]


def test_any_objective_has_a_landscape() -> None:
    """The landscape of an objective is its loss at every point; its path is the line between two vectors."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    objective = Objective(module, nn.functional.mse_loss, (torch.randn(9, 3), torch.randn(9, 2)))
    found = landscape_of(objective, points=3, radius=0.5, seed=2)
    first, second = directions_around(objective.layout, objective.weights, seed=2)
    for i, x in enumerate(found.axes[0]):
        for j, y in enumerate(found.axes[1]):
            assert found.values["loss"][i, j] == pytest.approx(
                float(objective.loss(objective.weights + x * first + y * second)), rel=1e-5
            )
    way = path_of(objective, {"here": objective.weights, "zero": torch.zeros(8)}, points=3)
    assert way.values["loss"][1] == pytest.approx(float(objective.loss(objective.weights / 2)), rel=1e-6)


def test_a_landscape_survives_json_with_values_that_are_not_finite() -> None:
    def steep(model: Model) -> dict[str, Tensor]:
        far = (model.weights - CENTRE).norm()
        return {"train_loss": torch.where(far > 2, math.inf, far), "test_loss": torch.where(far > 3, math.nan, far)}

    found = landscape_around(LAYOUT, Model(CENTRE, EMPTY), steep, points=9).with_metadata(run="runs/a", examples=100)
    assert found.not_finite("train_loss") > found.not_finite("test_loss") > 0
    text = json.dumps(found.document(), allow_nan=False)
    again = Landscape.from_document(json.loads(text))
    assert again.axes == found.axes
    assert again.marks == found.marks
    assert again.metadata == found.metadata
    for name, values in found.values.items():
        np.testing.assert_array_equal(again.values[name], values)


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"axes": [[0.0, 1.0]]}, {"values": {"train_loss": [["x"]]}}, {"marks": None}]
)
def test_other_documents_are_rejected(change: dict[str, object]) -> None:
    document = landscape_around(LAYOUT, Model(CENTRE, EMPTY), loss, points=3).document()
    with pytest.raises(UserError):
        Landscape.from_document({**document, **change})
    with pytest.raises(UserError, match="fedflat flatness landscape"):
        Landscape.from_document({})
