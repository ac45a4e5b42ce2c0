"""The checks that users call: they pass what is right, and name what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.drift.base import Drift
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.perturbation.sam import Sam
from fedflat.algorithms.slot import At, Fields, Gradient, Returned, State, vector
from fedflat.algorithms.named import NAMED
from fedflat.errors import UserError
from fedflat.testing import Broken, check_algorithm, check_model, check_partition


@pytest.mark.parametrize("name", NAMED)
def test_every_algorithm_of_the_table_keeps_what_all_must(name: str) -> None:
    assert len(check_algorithm(name)) >= 8


def test_scaffold_keeps_its_claims() -> None:
    check_algorithm("scaffold", claims=["with equal clients it is FedAvg", "finds the joint optimum"])
    check_algorithm("fedsam", limits={"rho": 0.0})
    check_algorithm("fedgamma", limits={"rho": 0.0}, becomes="scaffold")


# --- sign errors and other mistakes, as users make them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrongCorrection(Scaffold):
    def begin(self, at: At) -> State:
        return {"correction": at.client["c"] - at.server["c"]}


@dataclass(frozen=True)
class Uphill(Drift):
    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return -g


@dataclass(frozen=True)
class Downhill(Sam):
    def offset(self, at: At, gradient: Gradient) -> tuple[Tensor | None, State]:
        offset, changed = super().offset(at, gradient)
        return (None if offset is None else -offset), changed


@dataclass(frozen=True)
class Noisy(Drift):
    def direction(self, g: Tensor, at: At, gradient: Gradient) -> Tensor:
        return g + 0.01 * torch.from_numpy(np.random.normal(size=len(g)))  # noqa: NPY002


SHARED: list[Tensor] = []


@dataclass(frozen=True)
class Gossip(Drift):
    """Clients that leave a note for the next one."""

    def on_client(self) -> Fields:
        return (vector("c"),)

    def finish(self, at: At) -> tuple[State, State]:
        SHARED.append(at.moved)
        return {"c": sum(SHARED, torch.zeros_like(at.y))}, {}


@dataclass(frozen=True)
class Undeclared(Drift):
    def finish(self, at: At) -> tuple[State, State]:
        return {"c": at.moved}, {}


@dataclass(frozen=True)
class WrongWay(Drift):
    def aggregate(self, back: Returned, server: State) -> tuple[Tensor, State]:
        return back.z - back.displacement, {}


@pytest.mark.parametrize(
    ("method", "claims", "identity"),
    [
        (Algorithm(WrongCorrection()), [], "all clients together come nearer to their joint optimum"),
        (algorithm("fedprox"), ["finds the joint optimum"], "finds the joint optimum"),
        (Algorithm(Uphill()), [], "one client with a small rate descends"),
        (Algorithm(WrongWay()), [], "one client with a small rate descends"),
        (Algorithm(perturbation=Downhill(0.1)), [], "perturbations climb"),
        (Algorithm(Noisy()), [], "the same seed gives the same bits"),
        (Algorithm(Gossip()), [], "clients keep their state to themselves"),
        (Algorithm(Undeclared()), [], "what is kept and sent is what is declared"),
        (algorithm("feddyn"), ["with equal clients it is FedAvg"], "with equal clients it is FedAvg"),
    ],
    ids=lambda value: type(value.drift).__name__ if isinstance(value, Algorithm) else None,
)
def test_mistakes_are_named(method: Algorithm, claims: list[str], identity: str) -> None:
    SHARED.clear()
    with pytest.raises(Broken) as told:
        check_algorithm(method, claims=claims)
    assert told.value.identity == identity
    assert identity in str(told.value)


def test_a_limit_that_does_not_hold_is_named() -> None:
    with pytest.raises(Broken, match=r"at rho=0.1 it is fedavg"):
        check_algorithm("fedsam", limits={"rho": 0.1})
    with pytest.raises(UserError, match="there is no parameter 'rhoo'"):
        check_algorithm("fedsam", limits={"rhoo": 0.1})
    with pytest.raises(UserError, match="there is no claim"):
        check_algorithm("fedsam", claims=["is best"])


# --- partitions and models -----------------------------------------------------------------------------------------------------------------


def halves(labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    return np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)


@pytest.mark.parametrize(
    ("divide", "identity"),
    [
        (lambda labels, clients, seed: halves(labels, clients, seed)[1:], "as many clients as asked for"),
        (lambda labels, clients, seed: [*halves(labels, clients - 1, seed), np.array([], int)], "no client is empty"),
        (lambda labels, clients, seed: [p + 1 for p in halves(labels, clients, seed)], "positions lie in the data"),
        (lambda labels, clients, seed: [halves(labels, clients, seed)[0]] * clients, "no example is given out twice"),
        (lambda labels, clients, seed: [p[1:] for p in halves(labels, clients, seed)], "every example is given out"),
        (
            lambda labels, clients, seed: halves(labels, clients, np.random.randint(10**6)),
            "the same seed gives the same partition",
        ),  # noqa: NPY002
        (lambda labels, clients, seed: halves(labels, clients, 0), "another seed gives another partition"),
    ],
)
def test_wrong_splits_are_named(divide: object, identity: str) -> None:
    assert identity in check_partition(halves)
    with pytest.raises(Broken) as told:
        check_partition(divide)  # type: ignore[arg-type]
    assert told.value.identity == identity


class Hidden(nn.Module):
    """Keeps its weights where nobody finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.elsewhere = [torch.randn(3, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.elsewhere[0].T


class Mixing(nn.Module):
    """Centres a batch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x - x.mean(0))
        return out


def test_wrong_models_are_named() -> None:
    assert "every tensor takes part" in check_model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (4,), 3)
    for model, identity in (
        (nn.Linear(4, 5), "one row of logits per example"),
        (nn.LSTM(4, 3), "one row of logits per example"),
        (Mixing(), "examples are scored one by one"),
        (
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
            "examples are scored one by one",
        ),
        (Hidden(), "its output follows the weights it is given"),
        (nn.Sequential(nn.Linear(4, 3), _Idle()), "every tensor takes part"),
    ):
        with pytest.raises(Broken) as told:
            check_model(model, (4,), 3)
        assert told.value.identity == identity


def test_a_model_is_checked_in_the_precision_of_runs_whatever_its_own() -> None:
    double = nn.Linear(4, 3).double()
    assert "every tensor takes part" in check_model(double, (4,), 3) and double.weight.dtype == torch.float64


def test_a_model_for_other_inputs_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"Linear cannot be used on inputs of shape \(5,\): "):
        check_model(nn.Linear(4, 3), (5,), 3)
    with pytest.raises(UserError, match=r"'cnn' is no model; expected a torch\.nn\.Module"):
        check_model("cnn", (3, 32, 32), 10)  # type: ignore[arg-type]


class _Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x
