"""Every engine gives the results of the loop engine, for every part of an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import SLOTS
from fedflat.algorithms.named import NAMED, RELEASED
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.lane import Lane
from fedflat.engines.gpu.step import StepResult, compiled_step, steps_agree
from fedflat.engines.problem.problem import Problem

from ..compositions import EVERY_PART
from ..quadratics import problem_of, walk
from ..reference import bed, golden_softmax

TEXTS = [
    *EVERY_PART,
    *(f"{name}(variant=released)" for name in RELEASED if name not in ("fedexp", "fedlesam", "fednsam")),
    "fedavg",
    "fedmoswa(option=I)",
    "fedspeed(share=0.5)",
    "feddyn+asam(perturb_from=total)",
    "feddyn+relaxed(server=average)",
    "scaffold(option=I)+relaxed",
    "fedscam+relaxed",
]


def test_every_part_is_compared() -> None:
    named, compared = (
        {type(getattr(one, slot)) for one in algorithms for slot in SLOTS}
        for algorithms in ([*NAMED.values(), *RELEASED.values()], [algorithm(text) for text in EVERY_PART])
    )
    assert named <= compared


def test_lanes_know_the_labels_of_their_clients() -> None:
    """Clients with unequal numbers of samples have unequal labels, from which FedDisco chooses their weights."""
    setting = bed(rounds=2, size=3).but(steps=[4, 3, 5, 1, 2])
    loop, plain = (
        walk(text, setting, engine=LoopEngine(problem_of(setting), workers=1)) for text in ("feddisco", "fedavg")
    )
    lanes = walk("feddisco", setting, engine=LaneEngine(problem_of(setting), lanes=2))
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-12
    assert np.abs(np.array(loop.x) - np.array(plain.x)).max() > 1e-3


class OnDeviceAlone(TorchDispatchMode):
    """Rejects what a CUDA graph cannot capture: copies from the host and reads from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("text", TEXTS)
def test_lanes_agree_with_the_loop_and_stay_on_the_device(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []

    def captured(lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
        lane._warm_up(work)  # which may overwrite tensors
        recording = iter([OnDeviceAlone()])  # a graph records one call

        def replay() -> None:
            with next(recording, nullcontext()):
                work()
            replayed.append(work)

        return replay

    monkeypatch.setattr(Lane, "_captured", captured)
    setting = bed(rounds=2, size=3)
    loop = walk(text, setting, decay=0.9, engine=LoopEngine(problem_of(setting, quick=True), workers=1))
    lanes = walk(text, setting, decay=0.9, engine=LaneEngine(problem_of(setting), lanes=2))
    assert len(replayed) > len(lanes.x), "begin, step and finish"
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-12
    assert loop.outcomes[-1].cost == lanes.outcomes[-1].cost
    for one, other in zip(loop.outcomes, lanes.outcomes, strict=True):
        assert torch.isclose(one.loss, other.loss)


TRACED = [
    "scaffold(option=I)+fedadamw",
    "adabest+scam",
    "fedwmsam(variant=released)",
    "fedmoswa+asam",
    "fedsmoo",
    "fedmuon",
    "fedgloss(ramp=2)",
    "fedgmt+sol",
]
"""Texts whose parts cover the kinds of operations in local steps."""


@pytest.mark.parametrize("text", TRACED)
def test_the_step_compiles_to_one_graph(text: str) -> None:
    """Traced into one graph without a break, as for a GPU; Muon with a matrix, and a teacher with logits."""
    setting = golden_softmax() if "muon" in text or "gmt" in text else bed(rounds=2, size=3)
    loop = walk(text, setting, engine=LoopEngine(problem_of(setting, quick=True), workers=1))
    traced = walk(
        text, setting, engine=LaneEngine(problem_of(setting), step=partial(compiled_step, backend="eager", strict=True))
    )
    assert np.abs(np.array(loop.x) - np.array(traced.x)).max() < 1e-12


def test_a_step_that_does_not_compile_runs_eagerly() -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no compiler here")

    setting = bed(rounds=2, size=3)
    loop = walk("fedsam", setting, engine=LoopEngine(problem_of(setting, quick=True), workers=1))
    with pytest.warns(UserWarning, match="could not be compiled"):
        lanes = walk(
            "fedsam", setting, engine=LaneEngine(problem_of(setting), step=partial(compiled_step, backend=broken))
        )  # type: ignore[arg-type]
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-12


def test_a_wrong_compiled_step_is_detected() -> None:
    def wrong(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *values: tuple(
            -value if isinstance(value, torch.Tensor) and value.ndim == 1 else value for value in graph(*values)
        )

    setting = bed(rounds=2, size=3)
    loop = walk("scaffold", setting, engine=LoopEngine(problem_of(setting, quick=True), workers=1))
    engine = LaneEngine(problem_of(setting), step=partial(compiled_step, backend=wrong))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="without compilation") as caught:
        lanes = walk("scaffold", setting, engine=engine)
    assert len([one for one in caught if one.category is UserWarning]) == 1  # torch may give RuntimeWarnings
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-12


def test_a_correct_compiled_step_is_used() -> None:
    used = []

    def careful(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            used.append(1)
            return graph(*values)

        return run

    setting = bed(rounds=2, size=3)
    loop = walk("scaffold", setting, engine=LoopEngine(problem_of(setting, quick=True), workers=1))
    engine = LaneEngine(problem_of(setting), step=partial(compiled_step, backend=careful))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        lanes = walk("scaffold", setting, engine=engine)
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-12
    assert len(used) > 5


@pytest.mark.parametrize("random", [True, False])
def test_a_random_step_is_not_a_compiler_error(random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = bed(rounds=1, size=2)
    problem, real = problem_of(setting), Problem.loss_and_gradient

    def shaken(self: Problem, vector: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        loss, gradient = real(self, vector, *rest)
        return loss, gradient + 10 * (torch.randn_like(gradient) if random else torch.ones_like(gradient))

    monkeypatch.setattr(Problem, "loss_and_gradient", shaken)  # of eager steps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        walk("fedavg", setting, engine=LaneEngine(problem, step=partial(compiled_step, backend="eager")))
    assert any("without compilation" in str(w.message) for w in caught) is not random


@pytest.mark.parametrize("wrong", ["statistics", "integer_buffers", "loss"])
def test_compiled_steps_are_compared_in(wrong: str) -> None:
    y, statistics = torch.zeros(3), torch.ones(2)
    local: Any = SimpleNamespace(drift=SimpleNamespace(y=y))
    step = StepResult([torch.ones(3)], statistics + 0.1, {"count": torch.tensor(1)}, torch.tensor(2.0), 1)
    assert steps_agree(step, step, local, statistics)
    others = {"statistics": statistics + 0.3, "integer_buffers": {"count": torch.tensor(0)}, "loss": torch.tensor(2.5)}
    assert not steps_agree(step._replace(**{wrong: others[wrong]}), step, local, statistics)


def test_a_step_too_large_to_be_compared_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = bed(rounds=2, size=2)
    loop = walk("fedavg", setting, engine=LoopEngine(problem_of(setting, quick=True), workers=1))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Problem, "loss_and_gradient", full)  # of eager steps
    lanes = walk(
        "fedavg", setting, engine=LaneEngine(problem_of(setting), step=partial(compiled_step, backend="eager"))
    )
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-12
