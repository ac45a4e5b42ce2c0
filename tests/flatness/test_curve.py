"""Curves of low loss between models, and alignment of hidden units by permutation."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import UserError
from fedflat.flatness import Objective, aligned, barrier, curve_of, path_of
from fedflat.flatness.landscapes.curve import bezier_control


class Ring(nn.Module):
    """The loss (|w|^2 - 1)^2 in the plane: its minima form a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.0]).double())

    def forward(self, inputs: Tensor) -> Tensor:
        return ((self.weight @ self.weight - 1) ** 2).expand(len(inputs))


def test_a_curve_goes_around_the_barrier_of_the_straight_line() -> None:
    data = (torch.zeros(4, 1), torch.zeros(4))
    objective = Objective(Ring(), lambda output, target: output.mean(), data, batch_size=2)
    ends = {"a": torch.tensor([1.0, 0.0]).double(), "b": torch.tensor([0.0, 1.0]).double()}
    straight, curved = path_of(objective, ends, points=21), curve_of(objective, ends, steps=200, lr=0.05, points=21)
    heights = [barrier(path.axes[0], path.values["loss"]).height for path in (straight, curved)]
    assert heights[0] == pytest.approx(0.25)  # half way, |w|^2 = 1/2
    assert heights[1] < 0.01
    assert curved.metadata["curved"] and not straight.metadata["curved"]
    assert curved.values["loss"][0] == curved.values["loss"][-1] == pytest.approx(0)  # the ends stay in place


def test_the_control_point_is_trained_with_adam() -> None:
    """The loss is linear, so the first step has the length of the learning rate, which then decays."""
    objective = Objective(
        nn.Linear(1, 1, bias=False), lambda output, target: output.mean(), (torch.full((2, 1), 3.0), torch.zeros(2))
    )
    a, b = torch.tensor([0.0]), torch.tensor([1.0])
    assert bezier_control(objective, a, b, steps=1, lr=0.1).item() == pytest.approx(0.4, abs=1e-5)
    rates = 0.1 * (1 + 3 / 4 + 2 / 4 + 1 / 4)  # t varies, so later steps are only about as long as their rate
    assert bezier_control(objective, a, b, steps=4, lr=0.1).item() == pytest.approx(0.5 - rates, abs=0.03)


def test_batches_are_drawn_in_proportion_to_their_sizes() -> None:
    sizes: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        sizes.append(len(output))
        return output.mean()

    objective = Objective(nn.Linear(1, 1, bias=False), loss, (torch.ones(5, 1), torch.zeros(5)), batch_size=4)
    bezier_control(objective, torch.zeros(1), torch.ones(1), steps=200)
    assert 140 < sizes.count(4) < 180 and len(sizes) == 200


def convolutional() -> nn.Sequential:
    features = nn.Sequential(nn.Conv2d(2, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2))
    network = nn.Sequential(features, nn.Flatten(), nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, 3))
    network(torch.randn(9, 2, 6, 6))  # statistics that differ between channels
    return network.eval()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_permuted_network_is_restored(seed: int) -> None:
    torch.manual_seed(seed)
    network, inputs = convolutional(), torch.randn(4, 2, 6, 6)
    permuted, channels, units = convolutional(), torch.randperm(5), torch.randperm(7)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for name in ("0.0.weight", "0.1.weight", "0.1.bias", "0.1.running_mean", "0.1.running_var"):
        state[name] = state[name][channels]
    state["2.weight"] = state["2.weight"].view(7, 5, 4)[:, channels].flatten(1)
    state["2.weight"], state["2.bias"] = state["2.weight"][units], state["2.bias"][units]
    state["4.weight"] = state["4.weight"][:, units]
    permuted.load_state_dict(state)
    torch.testing.assert_close(permuted(inputs), network(inputs))
    restored = aligned(permuted, network)
    for name, tensor in network.state_dict().items():
        assert torch.equal(restored.state_dict()[name], tensor), name


def test_alignment_keeps_the_function_and_reduces_the_distance() -> None:
    torch.manual_seed(0)
    first, second = (
        nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)
    )
    inputs, nearer = torch.randn(5, 4), aligned(second, first)
    torch.testing.assert_close(nearer(inputs), second(inputs))
    objective = Objective(first, F.cross_entropy, (inputs, torch.arange(5) % 2))
    distances = [path_of(objective, {"a": first, "b": end}, points=2).metadata["distance"] for end in (second, nearer)]
    assert distances[1] < 0.95 * distances[0]


def test_models_that_are_not_defined_are_rejected() -> None:
    normalised = nn.Sequential(nn.Linear(2, 4), nn.GroupNorm(2, 4), nn.Linear(4, 1))
    residual, shallow = nn.TransformerEncoderLayer(4, 1), nn.Sequential(nn.Linear(2, 1))
    grouped = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1, groups=2), nn.Conv2d(2, 1, 1))
    early = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 4), nn.Linear(4, 1))
    square, activation = nn.Linear(4, 4), nn.ReLU()
    shared = nn.Sequential(nn.Linear(2, 4), square, activation, square, activation, nn.Linear(4, 1))
    sequence = nn.Sequential(nn.Linear(2, 4), nn.Flatten(), nn.Linear(12, 1))  # inputs [n, 3, 2]
    for model, reason in (
        (normalised, "1 is .*GroupNorm"),
        (residual, "the model is .*TransformerEncoderLayer"),
        (shallow, "no hidden layer"),
        (grouped, "1 is a grouped convolution"),
        (early, "0 does not normalise"),
        (shared, "3 shares its weights"),
        (sequence, "2 has 12 inputs for 4 linear units"),
    ):
        with pytest.raises(UserError, match=reason):
            aligned(model, model)
    with pytest.raises(UserError, match="different shapes"):
        aligned(shallow, normalised)


def test_a_module_that_applies_its_children_in_turn_can_be_rebuilt_as_a_chain() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU()), nn.Linear(12, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x).flatten(1))

    model = Net()
    with pytest.raises(UserError, match=r"the model is .*Net.*(nn\.Sequential\(.*\)), which keeps") as raised:
        aligned(model, model)
    advice = str(raised.value).split("rebuild it as ")[1].split(", which keeps")[0]
    rebuilt = eval(advice, {"nn": nn, "OrderedDict": OrderedDict, "m": model})
    assert rebuilt.state_dict().keys() == model.state_dict().keys()
    inputs = torch.randn(4, 1, 3, 3)
    torch.testing.assert_close(rebuilt(inputs), model(inputs))
    torch.testing.assert_close(aligned(rebuilt, rebuilt)(inputs), model(inputs))


def test_curves_that_are_not_defined_are_rejected() -> None:
    ends = {"a": convolutional(), "b": convolutional()}
    objective = Objective(ends["a"], F.cross_entropy, (torch.randn(4, 2, 6, 6), torch.arange(4) % 3))
    with pytest.raises(UserError, match="BatchNorm statistics"):
        curve_of(objective, ends)
    with pytest.raises(UserError, match="steps=0"):
        curve_of(objective, {"a": objective.weights, "b": objective.weights}, steps=0)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Linear(16, 5)),
        (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(2), nn.Linear(64, 3)),
        (nn.Linear(6, 8), nn.MaxPool1d(3, 1, 1), nn.Linear(8, 3)),
        (nn.Conv1d(1, 4, 3), nn.Flatten(), nn.MaxPool1d(2), nn.Linear(8, 3)),
    ],
    ids=["linear layer on positions", "incomplete flattening", "pooling of units", "pooling after flattening"],
)
def test_models_that_mix_positions_and_units_are_not_aligned(layers: tuple[nn.Module, ...]) -> None:
    with pytest.raises(UserError, match="cannot be aligned"):
        aligned(nn.Sequential(*layers), nn.Sequential(*layers))


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(1, 3), nn.Linear(144, 3)),
        (nn.Conv2d(1, 4, 3), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)),
        (nn.Flatten(), nn.AvgPool1d(2), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 3)),
    ],
    ids=["explicit dimensions", "pooling of flattened positions", "pooling of inputs"],
)
def test_flattening_and_pooling_that_keep_the_order_of_units(layers: tuple[nn.Module, ...]) -> None:
    first, second = nn.Sequential(*layers), copy.deepcopy(nn.Sequential(*layers))
    for parameter in second.parameters():
        nn.init.normal_(parameter)
    inputs = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(aligned(second, first)(inputs), second(inputs))
