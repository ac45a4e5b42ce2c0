"""Mistakes in a user's part: the error names its class and what to change."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedflat.algorithms import Algorithm
from fedflat.algorithms.composition import parts
from fedflat.algorithms.drift import Drift
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.perturbation import Sam
from fedflat.algorithms.server import Sgd
from fedflat.algorithms.slot import Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.errors import UserError
from fedflat.testing import check_algorithm

from ..quadratics import walk
from .settings import PARTIAL


@dataclass(frozen=True)
class OnlyModel(Sgd):
    def step(self, x: torch.Tensor, q: torch.Tensor, state: State) -> Any:
        return x + q


@dataclass(frozen=True)
class OnlyTarget(Drift):
    def aggregate(self, means: Any, state: State) -> Any:
        return means.z + means.displacement


@dataclass(frozen=True)
class OnlyKept(Drift):
    def finish(self, ctx: Any) -> Any:
        return {}


@dataclass(frozen=True)
class UndeclaredState(Sgd):
    def step(self, x: torch.Tensor, q: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        return x + q + state["m"], {}


@dataclass(frozen=True)
class UndeclaredMessage(Sgd):
    def measure(self, displacement: torch.Tensor) -> State:
        return {"norm": displacement.norm()}


@dataclass(frozen=True)
class MissingMessage(Sgd):
    def sends(self) -> Fields:
        return (scalar("norm"),)


@dataclass(frozen=True)
class MistypedRead(Scaffold):
    def direction(self, g: torch.Tensor, ctx: LocalContext, gradient: Gradient) -> torch.Tensor:
        return g + ctx.local["corection"]


@dataclass(frozen=True)
class MistypedState(Scaffold):
    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        state, sent = super().finish(ctx)
        return {f"{name}s": value for name, value in state.items()}, sent


@dataclass(frozen=True)
class MistypedServer(Sgd):
    def on_server(self) -> Fields:
        return (vector("momentum"),)

    def step(self, x: torch.Tensor, q: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        return x + q, {"momentun": q}


@dataclass(frozen=True)
class WrongShape(Scaffold):
    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        state, sent = super().finish(ctx)
        return {name: value.norm() for name, value in state.items()}, sent


@dataclass(frozen=True)
class NoDictionary(Sgd):
    def step(self, x: torch.Tensor, q: torch.Tensor, state: State) -> Any:
        return x + q, None


@dataclass(frozen=True)
class Number(MissingMessage):
    def measure(self, displacement: torch.Tensor) -> State:
        return {"norm": 0.5}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Static(Drift):
    @staticmethod
    def finish(ctx: Any) -> Any:
        return {}


@dataclass(frozen=True)
class NotBegun(Sam):
    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[torch.Tensor, State]:
        return super().offset(ctx, gradient)[0], {"last": ctx.y}


MISTAKES: list[tuple[Algorithm, str]] = [
    (Algorithm(server=OnlyModel()), "OnlyModel must return two values from step or aggregate: a model and the state"),
    (Algorithm(OnlyTarget()), "OnlyTarget must return two values from aggregate: a model and the state"),
    (Algorithm(OnlyKept()), "OnlyKept must return two values from finish: what the client keeps"),
    (Algorithm(Static()), "Static must return two values from finish: what the client keeps"),
    (Algorithm(server=UndeclaredState()), "UndeclaredState.step reads 'm', which does not .* declare .* in on_server"),
    (Algorithm(server=UndeclaredMessage()), "returns 'norm', but UndeclaredMessage.sends declares nothing; add"),
    (
        Algorithm(MistypedRead()),
        r"direction reads 'corection', .*'correction'\? \(available: server state: c; cl",
    ),
    (Algorithm(MistypedState()), "returns 'cs', but MistypedState.on_client declares c; did you mean 'c'"),
    (Algorithm(server=MistypedServer()), "returns 'momentun', but .*on_server declares .*did you mean 'momentum'"),
    (Algorithm(WrongShape()), r"has shape \(\), but WrongShape.on_client declares shape \(5,\)"),
    (Algorithm(perturbation=NotBegun()), "NotBegun changes 'last' in a local step, but begin does not return it"),
    (Algorithm(server=NoDictionary()), "returns None for the fields of NoDictionary.on_server; return a dictionary"),
    (Algorithm(server=MissingMessage()), "MissingMessage.sends declares 'norm', but clients do not send it"),
]


@pytest.mark.parametrize(("mistaken", "message"), MISTAKES, ids=lambda value: str(value).split(" ")[0])
def test_mistakes_in_a_part_are_clear_errors(mistaken: Algorithm, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_algorithm(mistaken)


def test_a_scalar_may_be_a_python_number() -> None:
    assert walk(Algorithm(server=Number()), PARTIAL, quick=True).outcomes[0].message_means["server"]["norm"] == 0.5


def test_the_module_of_a_part_is_short() -> None:
    slots = ("drift", "perturbation", "local_optimiser", "weights")  # those with one module per part
    modules = {inspect.getfile(part) for slot, part in parts().values() if slot in slots}
    lengths = {module: len(Path(module).read_text().splitlines()) for module in modules}
    assert len(lengths) > 30 and {module: length for module, length in lengths.items() if length > 120} == {}
