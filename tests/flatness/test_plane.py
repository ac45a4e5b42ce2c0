"""The plane through three models: basis, coordinates, values on a quadratic, and models that span no plane."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Model
from fedflat.flatness.landscapes.path import path_of
from fedflat.flatness.landscapes.plane import Plane, plane_landscape, plane_of, spread_axis
from fedflat.flatness.landscapes.points import models_of, require_same_shapes
from fedflat.flatness.objective import Objective
from fedflat.models.layout import Layout

EMPTY = torch.zeros(0, dtype=torch.float64)


def three(seed: int = 0, size: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).double() for _ in range(3)]


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_the_basis_is_orthonormal_and_spans_the_three_models(seed: int) -> None:
    a, b, c = three(seed)
    plane = Plane.through(a, b, c)
    gram = torch.stack([plane.u, plane.v]) @ torch.stack([plane.u, plane.v]).T
    torch.testing.assert_close(gram, torch.eye(2).double())
    for model, corner in zip((a, b, c), plane.corners, strict=True):
        torch.testing.assert_close(plane.at(*corner), model)
        assert plane.coordinates(model) == pytest.approx(corner, abs=1e-12)
        assert plane.distance(model) == pytest.approx(0, abs=1e-12)


def test_coordinates_are_those_of_the_paper() -> None:
    """u = b - a; v = (c - a) - <c - a, b - a> / ||b - a||^2 (b - a), computed by hand."""
    a, b, c = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([4.0, 4.0, 0.0]), torch.tensor([1.0, 5.0, 2.0])
    plane = Plane.through(a, b, c)
    torch.testing.assert_close(plane.u, torch.tensor([0.6, 0.8, 0.0]).double())
    # c - a = (0, 5, 2) has 4 along u, which leaves (-2.4, 1.8, 2), of length sqrt(13)
    torch.testing.assert_close(plane.v, torch.tensor([-2.4, 1.8, 2.0]).double() / 13**0.5)
    np.testing.assert_allclose(plane.corners, [(0, 0), (5, 0), (4, 13**0.5)])


def test_shares_reproduce_every_point() -> None:
    a, b, c = three(1)
    plane = Plane.through(a, b, c)
    for x, y in ((0.0, 0.0), (0.7, -1.3), (3.0, 2.0)):
        shares = plane.barycentric(x, y)
        assert sum(shares) == pytest.approx(1)
        torch.testing.assert_close(shares[0] * a + shares[1] * b + shares[2] * c, plane.at(x, y))
    assert plane.barycentric(*plane.corners[2]) == pytest.approx((0, 0, 1))


def test_a_model_off_the_plane_is_projected_onto_it() -> None:
    a, b, c = three(2, size=3)
    plane = Plane.through(a, b, c)
    normal = torch.linalg.cross(plane.u, plane.v)
    beside = plane.at(0.4, 0.9) + 1.5 * normal
    assert plane.coordinates(beside) == pytest.approx((0.4, 0.9))
    assert plane.distance(beside) == pytest.approx(1.5)


def test_on_a_quadratic_every_value_is_the_closed_form() -> None:
    models = {name: Model(w, EMPTY) for name, w in zip(("global", "client", "averaged"), three(5), strict=True)}
    scale = torch.arange(1.0, 13.0).double()
    found = plane_landscape(models, lambda m: {"train_loss": 0.5 * (scale * m.weights**2).sum()}, points=6)
    plane = Plane.through(*(m.weights for m in models.values()))
    a, u, v = (t.numpy() for t in (plane.origin, plane.u, plane.v))
    s = scale.numpy()
    for i, x in enumerate(found.axes[0]):
        for j, y in enumerate(found.axes[1]):
            slopes, curves = (
                x * (s * a * u).sum() + y * (s * a * v).sum(),
                x * x * (s * u * u).sum() + y * y * (s * v * v).sum(),
            )
            closed = 0.5 * (s * a * a).sum() + slopes + 0.5 * curves + x * y * (s * u * v).sum()
            assert found.values["train_loss"][i, j] == pytest.approx(closed)
    assert [mark.name for mark in found.marks] == ["global", "client", "averaged"]
    for mark, model in zip(found.marks, models.values(), strict=True):
        assert mark.values["train_loss"] == pytest.approx(float(0.5 * (scale * model.weights**2).sum()))
    assert found.metadata["distances"]["global to client"] == pytest.approx(found.marks[1].position[0])


def test_the_grid_contains_every_model_with_a_margin() -> None:
    models = {str(n): Model(w, EMPTY) for n, w in enumerate([*three(7), *three(8)])}
    found = plane_landscape(models, lambda m: {"train_loss": m.weights.sum()}, points=3, margin=0.1)
    assert len(found.marks) == 6
    assert all(mark.distance == 0 for mark in found.marks[:3])
    assert all(mark.distance > 0 for mark in found.marks[3:])
    for i, axis in enumerate(found.axes):
        places = [mark.position[i] for mark in found.marks]
        room = 0.1 * (max(places) - min(places))
        assert axis[0] == pytest.approx(min(places) - room)
        assert axis[-1] == pytest.approx(max(places) + room)


def test_buffers_are_combined_as_weights_are() -> None:
    """Buffers that are a linear function of the weights stay that function on the whole plane."""
    models = {str(n): Model(w, w[:4] * 3 - 1) for n, w in enumerate(three(9))}
    found = plane_landscape(models, lambda m: {"gap": (m.buffers - (3 * m.weights[:4] - 1)).abs().max()}, points=5)
    np.testing.assert_allclose(found.values["gap"], 0, atol=1e-12)


def test_float32_models_are_exact_at_their_positions() -> None:
    models = {str(n): Model(w.float(), EMPTY.float()) for n, w in enumerate(three(4, size=1000))}
    plane = Plane.through(*(m.weights for m in models.values()))
    for model, corner in zip(models.values(), plane.corners, strict=True):
        torch.testing.assert_close(plane.at(*corner).float(), model.weights, rtol=1e-6, atol=1e-7)


def test_models_that_span_no_plane_are_refused() -> None:
    a, b, _ = three()
    with pytest.raises(UserError, match="identical"):
        Plane.through(a, b, b)
    with pytest.raises(UserError, match="fedflat flatness path"):
        Plane.through(a, b, 0.25 * a + 0.75 * b)
    with pytest.raises(UserError, match="got 2"):
        plane_landscape({"a": Model(a, EMPTY), "b": Model(b, EMPTY)}, lambda m: {"train_loss": m.weights.sum()})
    for margin in (-0.5, float("nan")):
        with pytest.raises(UserError, match=f"margin={margin}"):
            plane_landscape({name: Model(a, EMPTY) for name in "abc"}, lambda m: {}, margin=margin)


def test_the_first_difference_in_shape_is_named() -> None:
    one, other = Layout(("w", "b"), ((2, 3), (2,))), Layout(("w", "b"), ((2, 4), (2,)))
    require_same_shapes({"runs/a": one, "runs/b": one})
    with pytest.raises(
        UserError,
        match=r"^runs/a and runs/b have different shapes and cannot lie on one plane: w is 2x3 .* 2x4 in the second$",
    ):
        require_same_shapes({"runs/a": one, "runs/b": other})
    with pytest.raises(UserError, match="only the second has c"):
        require_same_shapes({"a": one, "b": Layout(("w", "b", "c"), ((2, 3), (2,), ()))})


def test_an_axis_over_positions() -> None:
    assert spread_axis([1.0, 3.0, 2.0], 5, 0.5) == (0.0, 1.0, 2.0, 3.0, 4.0)


def test_a_plane_through_any_modules() -> None:
    """The loss at a point of the plane is that of a module with the combined weights."""
    torch.manual_seed(0)
    modules: dict[str, Tensor | nn.Module] = {name: nn.Linear(3, 2).double() for name in "abc"}
    inputs, targets = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    objective = Objective(modules["a"], nn.functional.mse_loss, (inputs, targets))
    found = plane_of(objective, modules, points=3)
    for mark, module in zip(found.marks, modules.values(), strict=True):
        assert mark.values["loss"] == pytest.approx(nn.functional.mse_loss(module(inputs), targets).item())
    middle = found.axes[0][1], found.axes[1][1]
    shares = Plane.through(
        *(objective.layout.flatten(dict(m.named_parameters())).detach() for m in modules.values())
    ).barycentric(*middle)
    output = sum(share * module(inputs) for share, module in zip(shares, modules.values(), strict=True))
    assert found.values["loss"][1, 1] == pytest.approx(nn.functional.mse_loss(output, targets).item())
    with pytest.raises(UserError, match=r"have different shapes.*weight is 2x3 in the first and 2x4 in the second"):
        plane_of(objective, {**modules, "d": nn.Linear(4, 2)})
    with pytest.raises(UserError, match=r"a has 5 .* 8"):
        plane_of(objective, {"a": torch.zeros(5)})


def with_batchnorm(seed: int) -> nn.Module:
    """A network whose BatchNorm statistics depend on the seed, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double()
        network(1 + seed + (1 + seed) * torch.randn(50, 4).double())
    return network.eval()


def test_every_module_keeps_its_batchnorm_statistics() -> None:
    """Modules are evaluated with their own statistics, and points between them with interpolated ones."""
    inputs, targets = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 3
    networks = {name: with_batchnorm(seed) for seed, name in enumerate("abcd")}
    losses = {name: F.cross_entropy(network(inputs), targets).item() for name, network in networks.items()}
    objective = Objective(networks["a"], F.cross_entropy, (inputs, targets))
    plane = plane_of(objective, networks, points=3)
    assert {mark.name: mark.values["loss"] for mark in plane.marks} == pytest.approx(losses)

    path = path_of(objective, {name: networks[name] for name in "bc"}, points=3)
    middle = copy.deepcopy(networks["b"])
    means = {key: (value + networks["c"].state_dict()[key]) / 2 for key, value in middle.state_dict().items()}
    middle.load_state_dict(means)
    expected = [losses["b"], F.cross_entropy(middle(inputs), targets).item(), losses["c"]]
    assert path.values["loss"] == pytest.approx(np.array(expected))
    # A vector has no statistics of its own, so the objective's are used.
    vector = path_of(
        objective,
        {
            "a": networks["a"],
            "b": Layout.of_parameters(networks["b"]).flatten(dict(networks["b"].named_parameters())).detach(),
        },
        points=2,
    )
    assert vector.values["loss"][1] != pytest.approx(losses["b"])
    # Far beyond the ends, variances would be negative; they count as 0.
    assert np.isfinite(path_of(objective, {"a": networks["a"], "d": networks["d"]}, beyond=5).values["loss"]).all()


def test_buffers_that_all_models_share_are_not_interpolated() -> None:
    """0 times the infinite entries of a mask would be NaN."""
    networks = [nn.Linear(2, 2) for _ in range(2)]
    for network in networks:
        network.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    objective = Objective(networks[0], F.mse_loss, (torch.ones(2, 2), torch.ones(2, 2)))
    _, buffers = models_of(objective, dict(zip("ab", networks, strict=True)))
    assert not buffers.names
    networks[1].mask = torch.zeros(3)
    with pytest.raises(UserError, match="cannot lie on one path: mask is 2 in the first and 3 in the second"):
        path_of(objective, dict(zip("ab", networks, strict=True)))
