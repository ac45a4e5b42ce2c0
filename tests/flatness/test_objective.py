"""The loss as a function of flat weights: against torch's derivatives, for every kind of layer and data."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from fedflat import models
from fedflat.engines.problem.task import Classification
from fedflat.errors import UserError
from fedflat.flatness import Objective, Operator, landscape_of, spectrum_of
from fedflat.flatness.curvature.operator import MATRICES
from fedflat.models.layout import Layout

from .networks import NETWORKS, Quadratic, case, symmetric, true_hessian


@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_the_columns_of_the_hessian(name: str) -> None:
    objective, truth = case(name).objective(), true_hessian(name)
    found = objective.hessian_products(None, torch.eye(objective.size).double())
    assert (found - truth).abs().max() < 1e-12 * max(1.0, float(truth.abs().max()))
    v = torch.randn(objective.size, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(objective.hessian_product(None, v), truth @ v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_losses_are_those_of_the_whole_data(name: str) -> None:
    one = case(name)
    objective, network = one.objective(), copy.deepcopy(one.network).eval()
    loss = one.loss(network(one.inputs), one.targets)
    pieces = torch.autograd.grad(loss, list(network.parameters()))
    value, gradient = objective.loss_and_gradient()
    torch.testing.assert_close(value, loss.detach(), rtol=1e-12, atol=0)
    expected = objective.layout.flatten(dict(zip(objective.layout.names, pieces, strict=True)))
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)
    assert objective.gradient().equal(gradient) and objective.loss().shape == ()


@settings(max_examples=10)
@given(batch=st.integers(1, 30))
def test_results_do_not_depend_on_the_batch_size(batch: int) -> None:
    objective, w = case("group norm").objective(batch), case("group norm").objective(24).weights + 0.1
    whole = case("group norm").objective(24)
    v = torch.linspace(-1, 1, whole.size).double()
    torch.testing.assert_close(objective.hessian_product(w, v), whole.hessian_product(w, v), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(objective.loss(w), whole.loss(w), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["group norm", "batch norm"])
def test_results_do_not_depend_on_the_memory_format(name: str) -> None:
    v = torch.linspace(-1, 1, case(name).objective().size).double()
    found = [case(name).objective(channels_last=last).hessian_product(None, v) for last in (True, False)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_the_model_is_unchanged() -> None:
    network = copy.deepcopy(case("batch norm").network)
    network[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [part.training for part in network.modules()]
    objective = Objective(network, F.cross_entropy, (case("batch norm").inputs, case("batch norm").targets))
    objective.check()
    objective.hessian_product(objective.weights + 1, objective.weights)
    assert [part.training for part in network.modules()] == modes and any(modes) and not all(modes)
    assert all(value.equal(before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_derivatives_work_inside_no_grad() -> None:
    objective = case("mlp").objective()
    with torch.no_grad():
        assert objective.hessian_product(None, objective.weights).norm() > 0
    with torch.inference_mode(), pytest.raises(UserError, match=r"inference_mode\(\)"):
        objective.check()


def test_given_buffers_replace_those_of_the_module() -> None:
    one = case("batch norm")
    doubled = {name: 2.0 * b + 1 for name, b in one.network.named_buffers() if b.is_floating_point()}
    network = copy.deepcopy(one.network)
    for name, buffer in network.named_buffers():
        if name in doubled:
            buffer.copy_(doubled[name])
    moved = one.objective(buffers=doubled).loss()
    torch.testing.assert_close(moved, one.loss(network.eval()(one.inputs), one.targets).detach())
    assert moved != one.objective().loss()


def test_tied_and_frozen_parameters() -> None:
    network = nn.Sequential(
        nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
    ).double()
    network[2].weight = network[0].weight
    network[3].bias.requires_grad_(False)
    x, y = torch.randn(6, 3).double(), torch.arange(6) % 2
    objective = Objective(network, F.cross_entropy, (x, y))
    assert objective.size == 9 + 6

    def loss(w: torch.Tensor) -> torch.Tensor:
        shared, last = w[:9].view(3, 3), w[9:].view(2, 3)
        return F.cross_entropy(F.linear(torch.tanh(x @ shared.T) @ shared.T, last, network[3].bias), y)

    truth = torch.autograd.functional.hessian(loss, objective.weights)
    torch.testing.assert_close(objective.hessian_products(None, torch.eye(15).double()), truth)


def test_a_loss_that_is_linear_in_the_weights_has_no_curvature() -> None:
    objective = Objective(nn.Linear(2, 1), lambda output, target: output.mean(), (torch.ones(3, 2), torch.zeros(3)))
    assert objective.hessian_product(None, torch.ones(3)).equal(torch.zeros(3))


def test_a_quadratic_has_its_own_matrix() -> None:
    matrix, centre = symmetric(torch.tensor([3.0, 1.0, -2.0])), torch.tensor([1.0, 2.0, 3.0]).double()
    objective = Quadratic(matrix, centre, torch.zeros(3).double()).objective()
    torch.testing.assert_close(objective.hessian_products(None, torch.eye(3).double()), matrix)
    torch.testing.assert_close(objective.gradient(), -matrix @ centre)


def test_all_kinds_of_data_give_the_same_result() -> None:
    one = case("mlp")
    pair = (one.inputs, one.targets)
    shuffled = DataLoader(TensorDataset(*pair), batch_size=5, shuffle=True)
    listed = [(one.inputs[:10], one.targets[:10]), [one.inputs[10:], one.targets[10:]]]
    losses = [Objective(one.network, one.loss, data).loss() for data in (pair, shuffled, listed, list(pair))]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-12, atol=0)
    frozen = Objective(one.network, one.loss, shuffled)
    assert frozen.loss().equal(frozen.loss()) and frozen.examples == 24


def test_several_inputs_by_position_and_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.weight * left - right

    left, right, target = torch.arange(4.0), torch.ones(4), torch.zeros(4)
    by_place = Objective(Two(), F.mse_loss, [((left, right), target)])
    by_name = Objective(Two(), F.mse_loss, [({"left": left, "right": right}, target)])
    assert by_place.loss() == by_name.loss() == ((2 * left - 1) ** 2).mean()
    assert by_name.subset(2, 0).examples == by_place.subset(2, 0).examples == 2
    assert by_name.subset(2, 0).loss() == by_place.subset(2, 0).loss()


def test_subsets_are_drawn_by_their_seed_without_replacement() -> None:
    inputs, targets = torch.arange(20.0)[:, None], torch.zeros(20, 1)
    one = nn.Linear(1, 1, bias=False)
    for data in ((inputs, targets), [(inputs[:7], targets[:7]), (inputs[7:], targets[7:])]):
        objective = Objective(one, F.mse_loss, data, batch_size=6)
        first, again, other = objective.subset(9, 1), objective.subset(9, 1), objective.subset(9, 2)
        seen = [torch.cat([batch[0] for batch in part.batches]).flatten().tolist() for part in (first, again, other)]
        assert seen[0] == seen[1] != seen[2] and len(set(seen[0])) == 9 and seen[0] == sorted(seen[0])
        torch.testing.assert_close(objective.subset(20, 3).loss(), objective.loss())
    assert first.subset(4, 0).examples == 4


def test_metrics_are_means_over_examples() -> None:
    one = case("mlp")
    objective = one.objective(sums=Classification().sums)
    output = one.network.eval()(one.inputs)
    found = objective.metrics()
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == one.targets).double().mean()))
    assert found["loss"] == pytest.approx(float(objective.loss()), rel=1e-12)
    assert one.objective().metrics() == {"loss": float(objective.loss())}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.dropout(x, 0.5, training=True))


def test_a_random_forward_pass_is_refused() -> None:
    data = (torch.randn(8, 5), torch.arange(8) % 3)
    with pytest.raises(UserError, match="dropout or augmentation"):
        Objective(Dropping(), F.cross_entropy, data).check()
    # Randomness in a layer that is inactive in evaluation mode is accepted.
    Objective(nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)).train(), F.cross_entropy, data).check()


def test_non_finite_losses_and_gradients_are_refused() -> None:
    network = nn.Linear(2, 2)
    with torch.no_grad():
        network.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="loss is nan"):
        Objective(network, F.cross_entropy, (torch.ones(2, 2), torch.zeros(2, dtype=torch.long))).check()
    root = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        root.weight.zero_()
    with pytest.raises(UserError, match="gradient is not finite"):
        Objective(root, lambda output, target: output.abs().sqrt().mean(), (torch.ones(2, 1), torch.zeros(2))).check()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "empty"),
        (3, "int.*DataLoader"),
        ([torch.ones(2, 2)], "Tensor.*pair"),
        ([(torch.ones(2, 2), "ab")], "str.*tensor"),
        ((torch.ones(2, 2), np.ones(2)), r"ndarray.*torch\.from_numpy"),
        ((torch.ones(0, 2), torch.zeros(0)), "batch is empty"),
    ],
)
def test_unreadable_data_is_rejected(data: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Objective(nn.Linear(2, 2), F.mse_loss, data)


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    data, network = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), nn.Linear(2, 3)
    with pytest.raises(UserError, match=r"shape \(4,\)"):
        Objective(network, lambda output, target: F.cross_entropy(output, target, reduction="none"), data).check()
    with pytest.raises(UserError, match="float"):
        Objective(network, lambda output, target: 1.0, data).check()  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("network", [nn.Linear(4, 3), nn.LSTM(4, 3), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))])
def test_inputs_of_another_precision_are_rejected(network: nn.Module) -> None:
    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[0] if isinstance(output, tuple) else output, target)

    data = (torch.randn(6, 4).double(), torch.arange(6) % 3)
    with pytest.raises(UserError, match=r"inputs are float64 but the model is float32.*\.float\(\)"):
        Objective(network, loss, data).check()
    assert Objective(network, loss, data, prepare=torch.Tensor.float).loss() > 0


def test_other_invalid_arguments_are_rejected() -> None:
    objective = case("mlp").objective()
    with pytest.raises(UserError, match="25 examples; expected 1 to 24"):
        objective.subset(25, 0)
    with pytest.raises(UserError, match="expected \\("):
        objective.loss(torch.zeros(3))
    with pytest.raises(UserError, match="no trainable parameters"):
        Objective(nn.Flatten(), F.mse_loss, (torch.ones(2, 2), torch.ones(2)))
    with pytest.raises(UserError, match="batch size is 0"):
        case("mlp").objective(0)


def input_shape(name: str) -> tuple[int, ...]:
    """The first shape of inputs that a model takes."""
    for shape in ((5,), (1, 28, 28), (3, 32, 32), (3, 64, 64)):
        try:
            models.model_spec(name).check(shape)
        except UserError:
            continue
        return shape
    raise AssertionError(f"no inputs known for {name}")


@pytest.mark.parametrize("name", sorted(set(models.names()) - {"vgg11", "resnet18"}))
def test_models_of_the_package_have_symmetric_products(name: str) -> None:
    """All but the two largest, which have the layers of others."""
    shape = input_shape(name)
    torch.manual_seed(0)
    text = f"{name}(depth=1,width=16,heads=2)" if name.startswith("vit") else name
    text = f"{name}(width=0.25)" if name == "mobilenetv2" else text  # smaller and faster
    network = models.build(text, shape, 4).double()
    sequence = len(shape) == 1 and "lstm" in name
    inputs = torch.randint(4, (2, *shape)) if sequence else torch.randn(2, *shape).double()
    # A loss of outputs of any shape, whose gradient is not zero anywhere.
    objective = Objective(network, lambda output, target: output.logsumexp(1).square().mean(), (inputs, torch.zeros(2)))
    u, v = torch.randn(2, objective.size).double() / objective.size**0.5
    of_u, of_v = objective.hessian_products(None, torch.stack([u, v]))
    assert float(v @ of_u) == pytest.approx(float(u @ of_v), rel=1e-8, abs=1e-10)
    assert of_v.norm() > 0
    # The step is small enough to cross hardly any kink of a ReLU, whose curvature derivatives do not contain.
    step = 1e-8 * v
    difference = (objective.gradient(objective.weights + step) - objective.gradient(objective.weights - step)) / 2e-8
    assert (difference - of_v).norm() < 0.05 * of_v.norm()


def test_vectors_in_torchs_order_are_converted_or_rejected() -> None:
    one = case("batch norm")
    objective = one.objective()
    torch_vector = parameters_to_vector(one.network.parameters()).detach()
    assert torch.equal(objective.layout.from_torch_order(torch_vector), objective.weights)
    assert torch.equal(objective.layout.to_torch_order(objective.weights), torch_vector)
    assert torch.equal(objective.vector_of(one.network), objective.weights)
    for wrong in (torch_vector, torch_vector + 0.01 * torch.randn_like(torch_vector)):
        for call in (objective.loss, objective.gradient, lambda w: one.objective(weights=w)):
            with pytest.raises(UserError, match="from_torch_order"):
                call(wrong)
    far = objective.weights + torch.randn_like(torch_vector)  # no order can be told apart, so it is accepted
    assert objective.loss(far).isfinite() and one.objective(weights=far).loss().isfinite()
    with pytest.raises(UserError, match=r"shape \(3,\)"):
        one.objective(weights=torch.zeros(3))


def test_the_order_matters_only_for_convolutions() -> None:
    shapes = ((2, 3), (2,), (4, 1, 3, 3), (4, 5, 1, 1), (2, 3, 4))
    layout = Layout(tuple("abcde"), shapes)
    vector = torch.arange(float(layout.size))
    assert layout.has_torch_order and torch.equal(layout.from_torch_order(vector), vector)
    assert not Layout(("a",), ((1, 2, 1, 2),)).has_torch_order


@pytest.mark.parametrize("reduced", ["module", "function"])
def test_sums_and_class_weights_are_rejected(reduced: str) -> None:
    one, weights = case("mlp"), torch.tensor([1.0, 2.0, 5.0]).double()
    sums, weighted = nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(weight=weights)
    if reduced == "function":  # nothing but the values reveals them
        sums = partial(F.cross_entropy, reduction="sum")
        weighted = partial(F.cross_entropy, weight=weights)
    data = (one.inputs, one.targets)
    with pytest.raises(UserError, match=r"sum over the batch.*reduction='mean'"):
        Objective(one.network, sums, data, batch_size=24).check()
    with pytest.raises(UserError, match=r"class weights.*one batch of 24 examples"):
        landscape_of(Objective(one.network, weighted, data, batch_size=7), points=3)
    Objective(one.network, weighted, data, batch_size=24).check()  # a single batch has one meaning
    Objective(one.network, F.cross_entropy, data, batch_size=7).check()


def test_class_weights_below_one_weight_the_batches() -> None:
    one, weights = case("mlp"), torch.tensor([0.1, 0.3, 0.7]).double()
    order = one.targets.argsort()  # most batches have a single class
    data, loss = (one.inputs[order], one.targets[order]), nn.CrossEntropyLoss(weight=weights)

    def weight(targets: torch.Tensor) -> torch.Tensor:
        return weights[targets].sum()

    whole = Objective(one.network, loss, data, batch_size=24, weight=weight)
    split = Objective(one.network, loss, data, batch_size=5, weight=weight)
    split.check()
    torch.testing.assert_close(split.loss(), loss(one.network(one.inputs), one.targets).detach())
    torch.testing.assert_close(split.gradient(), whole.gradient())
    rows, gradients = torch.eye(split.size).double(), torch.zeros(24, split.size).double()
    for row in range(24):
        gradients[row] = split.with_data([(data[0][[row]], data[1][[row]])]).gradient()
    fisher = gradients.T @ (gradients * (weights[data[1]] / weights[data[1]].sum())[:, None])
    for matrix in MATRICES:
        products = [Operator.of_objective(objective, matrix)(rows) for objective in (split, whole)]
        torch.testing.assert_close(*products)
    torch.testing.assert_close(products[0], fisher)  # the last matrix is the empirical Fisher matrix
    assert split.examples == 24 and spectrum_of(split, count=1).examples == 24
    with pytest.raises(UserError, match="class weights W"):
        Objective(one.network, loss, data, batch_size=5).check()
    with pytest.raises(UserError, match="add up to nan; expected a positive sum"):
        Objective(one.network, loss, data, weight=lambda targets: torch.tensor(torch.nan)).loss()


def test_batches_of_different_shapes_are_checked() -> None:
    network = nn.Sequential(nn.AdaptiveAvgPool1d(3), nn.Linear(3, 2))
    batches = [(torch.randn(4, length), torch.arange(4) % 2) for length in (5, 6)]
    Objective(network, F.cross_entropy, batches).check()


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_normalisation_is_differentiated_twice(dim: int | None) -> None:
    """torch's own second derivative is wrong."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3).double(), dim=dim)
    objective = Objective(layer, F.cross_entropy, (torch.randn(20, 4).double(), torch.randint(3, (20,))))
    hessian = objective.hessian_products(None, torch.eye(objective.size).double())
    step = 1e-5 * torch.eye(objective.size).double()
    gradients = [objective.gradient(objective.weights + sign * row) for row in step for sign in (1, -1)]
    differences = (torch.stack(gradients[::2]) - torch.stack(gradients[1::2])) / 2e-5
    torch.testing.assert_close(hessian, differences, rtol=1e-6, atol=1e-8)


def test_weights_of_16_bits_and_losses_without_gradient_are_rejected() -> None:
    data = (torch.randn(6, 4), torch.randint(3, (6,)))
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(UserError, match=r"model\.float\(\)"):
            Objective(nn.Linear(4, 3).to(dtype), F.cross_entropy, data)
    frozen = nn.Linear(4, 4).bfloat16().requires_grad_(False)
    assert Objective(nn.ModuleList([frozen, nn.Linear(4, 3)]), F.cross_entropy, data).size == 15
    accuracy = Objective(nn.Linear(4, 3), lambda output, target: (output.argmax(1) == target).float().mean(), data)
    with pytest.raises(UserError, match="expected a smooth loss"):
        accuracy.gradient()
