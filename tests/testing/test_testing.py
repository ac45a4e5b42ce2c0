"""The checks accept valid components and name the property that others violate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.drift.dyn import Dyn
from fedflat.algorithms.drift.prox import Prox
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.named import NAMED
from fedflat.algorithms.perturbation.lesam import Lesam
from fedflat.algorithms.perturbation.sam import Sam
from fedflat.algorithms.slot import CohortMeans, Drift, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.errors import UserError
from fedflat.testing import Broken, algorithms, check_algorithm, check_model, check_partition

TOGETHER = "clients drift no further apart than with FedAvg"


@pytest.mark.parametrize("name", list(NAMED)[::6])
def test_named_algorithms_have_the_common_properties(name: str) -> None:
    has_drift = algorithm(name).drift != Drift()  # else the claim compares FedAvg with itself
    assert len(check_algorithm(name, claims=[TOGETHER] if has_drift else [])) >= 10


@pytest.fixture
def only_claims_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the common properties: the test above checks them."""
    monkeypatch.setattr(algorithms, "ALWAYS", {})
    monkeypatch.setattr(algorithms, "ROUNDS_TO_CONVERGE", 50)


@pytest.mark.usefixtures("only_claims_and_limits")
def test_claims_and_limits_hold() -> None:
    check_algorithm("scaffold", claims=["with equal clients it is FedAvg", "finds the joint optimum"])
    check_algorithm("fedsam", limits={"rho": 0.0})
    check_algorithm("fedgamma", limits={"rho": 0.0}, becomes="scaffold")


@dataclass(frozen=True)
class WrongCorrection(Scaffold):
    def begin(self, ctx: LocalContext) -> State:
        return {"correction": ctx.client["c"] - ctx.server["c"]}


@dataclass(frozen=True)
class Uphill(Drift):
    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return -g


@dataclass(frozen=True)
class Downhill(Sam):
    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        offset, changed = super().offset(ctx, gradient)
        return (None if offset is None else -offset), changed


@dataclass(frozen=True)
class Fading(Drift):
    """Divides by zero for a client with a single step."""

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g * (1 - 0.5 * ctx.step / (ctx.steps - 1))


@dataclass(frozen=True)
class Noisy(Drift):
    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + 0.01 * torch.from_numpy(np.random.normal(size=len(g)))  # noqa: NPY002


@dataclass(frozen=True)
class Undercounted(Sam):
    @property
    def ascent_passes(self) -> int:
        return 0


@dataclass(frozen=True)
class CorrectedLater(Drift):
    """Computes one more gradient per step from the second round on."""

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return 0.5 * (g + gradient(ctx.y)) if ctx.round else g


SHARED: list[Tensor] = []


@dataclass(frozen=True)
class Gossip(Drift):
    """Clients share state with each other."""

    def on_client(self) -> Fields:
        return (vector("c"),)

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        SHARED.append(ctx.displacement)
        return {"c": sum(SHARED, torch.zeros_like(ctx.y))}, {}


@dataclass(frozen=True)
class WrongWay(Drift):
    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        return means.z - means.displacement, {}


@dataclass(frozen=True)
class Forgetful(Drift):
    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        return means.displacement, {}


@pytest.mark.parametrize(
    ("method", "identity"),
    [
        (Algorithm(WrongCorrection()), "all clients together approach the joint optimum"),
        (Algorithm(Uphill()), "a single client descends at a small learning rate"),
        (Algorithm(WrongWay()), "a single client descends at a small learning rate"),
        (Algorithm(Forgetful()), "tiny local steps hardly move the server model"),
        (Algorithm(perturbation=Downhill(0.1)), "perturbations increase the loss"),
        (Algorithm(Noisy()), "runs are deterministic"),
        (Algorithm(Gossip()), "client states are independent"),
        (Algorithm(Fading()), "clients may have unequal numbers of examples and steps"),
    ],
    ids=lambda value: type(value.drift).__name__ if isinstance(value, Algorithm) else None,
)
def test_mistakes_are_named(method: Algorithm, identity: str) -> None:
    SHARED.clear()
    with pytest.raises(Broken) as caught:
        check_algorithm(method)
    assert caught.value.property_name == identity
    assert identity in str(caught.value)


def test_undeclared_gradients_are_counted() -> None:
    with pytest.raises(Broken, match=r": 2 computed in round 0, 1 declared \(ascent_passes=0, extra_passes=0"):
        check_algorithm(Algorithm(perturbation=Undercounted()))
    with pytest.raises(Broken, match=r": 3 computed in round 1, 2 declared \(ascent_passes=1, extra_passes=0"):
        check_algorithm(Algorithm(CorrectedLater(), Sam()))


@dataclass(frozen=True)
class Repelled(Prox):
    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g - self.mu * (ctx.y - ctx.z)


@dataclass(frozen=True)
class WrongDual(Dyn):
    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        state, sent = super().finish(ctx)
        return {name: 2 * ctx.client[name] - value for name, value in state.items()}, sent


@pytest.mark.usefixtures("only_claims_and_limits")
@pytest.mark.parametrize("drift", [WrongCorrection(), Repelled(mu=0.1), WrongDual()])
def test_mild_sign_errors_of_a_drift_are_named(drift: Drift) -> None:
    with pytest.raises(Broken, match=TOGETHER):
        check_algorithm(Algorithm(drift), claims=[TOGETHER])


@pytest.mark.usefixtures("only_claims_and_limits")
def test_offsets_without_gradients_may_claim_to_increase_the_loss() -> None:
    check_algorithm("fedlesam", claims=[algorithms.ASCENT])
    with pytest.raises(Broken, match="check the sign of the offset"):
        check_algorithm(Algorithm(perturbation=Receding()), claims=[algorithms.ASCENT])


@dataclass(frozen=True)
class Receding(Lesam):
    def begin(self, ctx: LocalContext) -> State:
        return {name: -value for name, value in super().begin(ctx).items()}


@pytest.mark.usefixtures("only_claims_and_limits")
@pytest.mark.parametrize(
    ("name", "claim"), [("fedprox", "finds the joint optimum"), ("feddyn", "with equal clients it is FedAvg")]
)
def test_a_false_claim_is_named(name: str, claim: str) -> None:
    with pytest.raises(Broken) as caught:
        check_algorithm(name, claims=[claim])
    assert caught.value.property_name == claim
    assert claim in str(caught.value)


@pytest.mark.usefixtures("only_claims_and_limits")
def test_a_violated_limit_is_named() -> None:
    with pytest.raises(Broken, match=r"at rho=0.1 it is fedavg"):
        check_algorithm("fedsam", limits={"rho": 0.1})
    with pytest.raises(UserError, match=r"'rhoo'.*rho"):
        check_algorithm("fedsam", limits={"rhoo": 0.1})
    with pytest.raises(UserError, match="claim 'is best'"):
        check_algorithm("fedsam", claims=["is best"])


def halves(labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    return np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)


@pytest.mark.parametrize(
    ("divide", "identity"),
    [
        (lambda labels, clients, seed: halves(labels, clients, seed)[1:], "the number of clients is as requested"),
        (lambda labels, clients, seed: [*halves(labels, clients - 1, seed), np.array([], int)], "no client is empty"),
        (lambda labels, clients, seed: [p + 1 for p in halves(labels, clients, seed)], "indices are within the data"),
        (lambda labels, clients, seed: [halves(labels, clients, seed)[0]] * clients, "no example is assigned twice"),
        (lambda labels, clients, seed: [p[1:] for p in halves(labels, clients, seed)], "every example is assigned"),
        (
            lambda labels, clients, seed: halves(labels, clients, np.random.randint(10**6)),  # noqa: NPY002
            "the same seed gives the same partition",
        ),
        (lambda labels, clients, seed: halves(labels, clients, 0), "another seed gives another partition"),
    ],
)
def test_wrong_partitions_are_named(divide: object, identity: str) -> None:
    assert identity in check_partition(halves)
    with pytest.raises(Broken) as caught:
        check_partition(divide)  # type: ignore[arg-type]
    assert caught.value.property_name == identity


def test_partitions_are_checked_by_name() -> None:
    assert check_partition("iid+held-out") == check_partition(halves)
    for invalid, message in ((3, "expected a function"), ("natural", "determines the number of clients")):
        with pytest.raises(UserError, match=message):
            check_partition(invalid)  # type: ignore[arg-type]


class Hidden(nn.Module):
    """Keeps its weights outside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.elsewhere = [torch.randn(3, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.elsewhere[0].T


class Mixing(nn.Module):
    """Centres each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x - x.mean(0))
        return out


class Refusing(nn.Module):
    """Raises an error without a message."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError


def test_wrong_models_are_named() -> None:
    assert "every parameter has a gradient" in check_model(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (4,), 3
    )
    for model, identity in (
        (nn.Linear(4, 5), "one row of outputs per example"),
        (nn.LSTM(4, 3), "one row of outputs per example"),
        (Mixing(), "examples are scored independently"),
        (
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
            "examples are scored independently",
        ),
        (Hidden(), "the output depends on the parameters"),
        (nn.Sequential(nn.Linear(4, 3), _Idle()), "every parameter has a gradient"),
    ):
        with pytest.raises(Broken) as caught:
            check_model(model, (4,), 3)
        assert caught.value.property_name == identity


def test_models_of_numbers_and_labels_are_checked_with_their_loss() -> None:
    shrinking = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))  # [batch]
    for model, columns, task in ((shrinking, 1, "mse"), (nn.Linear(4, 2), 2, "huber"), (nn.Linear(4, 3), 3, "bce")):
        assert "every parameter has a gradient" in check_model(model, (4,), columns, task=task)
    with pytest.raises(Broken, match=r"the output is \(4,\), expected \(4, 1\)"):
        check_model(shrinking, (4,), 1, task="bce")
    with pytest.raises(Broken, match="every parameter has a gradient"):  # the gradient of the cross-entropy of 1 class
        check_model(nn.Linear(4, 1), (4,), 1)
    with pytest.raises(UserError, match="mse"):
        check_model(nn.Linear(4, 1), (4,), 1, task="msee")


def test_models_are_checked_in_float32() -> None:
    double = nn.Linear(4, 3).double()
    assert "every parameter has a gradient" in check_model(double, (4,), 3) and double.weight.dtype == torch.float64


def test_wrong_inputs_are_rejected() -> None:
    with pytest.raises(UserError, match=r"Linear .*\(5,\): "):
        check_model(nn.Linear(4, 3), (5,), 3)
    with pytest.raises(UserError, match=r"Bilinear does not accept inputs of shape \(4,\): .* missing 1 required"):
        check_model(nn.Bilinear(4, 4, 2), (4,), 2)
    with pytest.raises(UserError, match=r"Refusing does not accept inputs of shape \(4,\): ValueError"):
        check_model(Refusing(), (4,), 3)
    with pytest.raises(UserError, match=r"'cnn' .*torch\.nn\.Module"):
        check_model("cnn", (3, 32, 32), 10)  # type: ignore[arg-type]


class _Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x
