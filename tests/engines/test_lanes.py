"""Lanes: cohorts that do not fit train in turns, and rare batch sizes are not captured, with the same result."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm
from fedflat.algorithms.perturbation import Perturbation
from fedflat.algorithms.slot import Gradient, LocalContext
from fedflat.algorithms.state import State
from fedflat.bench.setting import RandomImages
from fedflat.data import Examples
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu import layers as gpu_layers
from fedflat.engines.gpu.engine import BATCHES_AT_ONCE, LaneEngine
from fedflat.engines.gpu.lane import SELDOM, DoesNotFit, Lane, explain_capture_errors, memory_needed
from fedflat.engines.gpu.static_state import with_static_tensors
from fedflat.engines.gpu.step import LocalStep, compiled_step, eager_step
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Engine, Training
from fedflat.errors import UserError
from fedflat.experiment.config import parse_config
from fedflat.experiment.run import Run

from ..quadratics import problem_of, walk
from ..reference import bed


def a_run(rounds: int = 2) -> Run:
    values = {
        "algorithm": "scaffold",
        "model": "mlp(hidden=8)",
        "data": {"clients": 8, "partition": "dirichlet(alpha=0.5)"},
        "federation": {"clients_per_round": 5},
        "training": {"rounds": rounds, "local_epochs": 2, "batch_size": 10},
        "evaluation": {"every": rounds},
        "engine": {"name": "lanes", "device": "cpu"},
    }
    return Run(parse_config(values), data=RandomImages(size=300, side=8).dataset())


def trained(rounds: int = 2) -> Run:
    run = a_run(rounds)
    run.execute()
    return run


def lanes_that_fit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a device with memory for only ``count`` lanes."""
    real, seen = Lane._captured, []

    def captured(lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
        if lane not in seen:
            seen.append(lane)
        if seen.index(lane) >= count:
            raise DoesNotFit(3 * 2**30, 2**30)
        return real(lane, work)

    monkeypatch.setattr(Lane, "_captured", captured)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_cohort_that_does_not_fit_is_split(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = trained().server.model.weights
    lanes_that_fit(count, monkeypatch)
    run = trained()
    assert len(run.engine.lanes) == count  # type: ignore[attr-defined]
    assert torch.equal(run.server.model.weights, together)


@pytest.mark.parametrize(("limit", "count"), [(0.5, 2), (3.5, 3), (9, 5)])
def test_lanes_share_a_limited_amount_of_memory(limit: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = trained()
    lane = together.engine.lanes[0]  # type: ignore[attr-defined]
    monkeypatch.setattr("fedflat.engines.gpu.engine.LANE_MEMORY", limit * lane.memory)
    run = trained()
    assert len(run.engine.lanes) == count and not run.engine.is_short_of_memory  # type: ignore[attr-defined]
    assert torch.equal(run.server.model.weights, together.server.model.weights)


def test_a_client_that_does_not_fit_raises_an_error_with_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes_that_fit(0, monkeypatch)
    with pytest.raises(UserError, match=r"needs 3\.0 GB.* 1\.0 GB are free; lower training\.batch_size \(now 10\)"):
        trained()


def test_rare_batch_sizes_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = trained(SELDOM + 4)
    sizes = [set(lane._graphs) for lane in captured.engine.lanes]  # type: ignore[attr-defined]
    used = [lane._uses for lane in captured.engine.lanes]  # type: ignore[attr-defined]
    assert all(size == 10 or uses[size] > SELDOM for some, uses in zip(sizes, used, strict=True) for size in some)
    assert any(set(uses) - some for some, uses in zip(sizes, used, strict=True))
    monkeypatch.setattr("fedflat.engines.gpu.lane.SELDOM", 0)
    assert torch.equal(trained(SELDOM + 4).server.model.weights, captured.server.model.weights)


def test_a_small_batch_whose_capture_does_not_fit_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, refused = trained(3).server.model.weights, []

    def captured(lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
        if (size := (getattr(work, "args", None) or [10])[0]) != 10:
            refused.append((lane, size))
            raise DoesNotFit(3 * 2**30, 2**30)
        return work

    monkeypatch.setattr(Lane, "_captured", captured)
    monkeypatch.setattr("fedflat.engines.gpu.lane.SELDOM", 0)
    run = trained(3)
    assert refused and len(refused) == len(set(refused)), "it is tried once"
    assert len(run.engine.lanes) == 5  # type: ignore[attr-defined]
    assert torch.equal(run.server.model.weights, expected)


def test_a_small_batch_that_fits_in_fewer_lanes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(3).server.model.weights

    def captured(lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
        if (getattr(work, "args", None) or [10])[0] != 10 and len(run.engine.lanes) > 2:  # type: ignore[attr-defined]
            raise DoesNotFit(None, 2**28)  # even without a graph
        return work

    monkeypatch.setattr(Lane, "_captured", captured)
    monkeypatch.setattr("fedflat.engines.gpu.lane.SELDOM", 0)
    run = a_run(3)
    run.execute()
    assert len(run.engine.lanes) <= 2  # type: ignore[attr-defined]
    assert torch.equal(run.server.model.weights, expected)


def test_a_cohort_of_one_trains_as_in_the_loop() -> None:
    values = {
        "algorithm": "scaffold",
        "model": "mlp(hidden=8)",
        "data": {"clients": 8, "partition": "iid"},
        "federation": {"clients_per_round": 1},
        "training": {"rounds": 2, "local_steps": 3},
    }
    data = RandomImages(size=300, side=8).dataset()
    loop, lanes = (
        Run(parse_config({**values, "engine": {"name": name, "device": "cpu", "workers": 1}}), data=data)
        for name in ("loop", "lanes")
    )
    assert torch.allclose(loop.execute().models["server"].weights, lanes.execute().models["server"].weights, atol=1e-6)


TRACED = partial(compiled_step, backend="eager", strict=True)
"""The compiled step, traced but run eagerly."""


@pytest.mark.parametrize(("lanes", "compile"), [(1, "off"), (2, "off"), (5, "off"), (2, "on")])
def test_batch_norm_counters_agree_with_the_loop(lanes: int, compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.experiment.setup.engine.compiled_step", TRACED)
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(
        4, momentum=None if compile == "off" else 0.1
    )  # a momentum that depends on a counter cannot be compiled
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), norm, nn.Linear(4, 10))
    values = {
        "data": {"clients": 8, "partition": "iid"},
        "federation": {"clients_per_round": 5},
        "training": {"rounds": 3, "local_steps": 2, "batch_size": 10},
        "evaluation": {"every": 3},
    }
    data = RandomImages(size=300, side=8).dataset()
    engines = ({"name": "loop", "workers": 1}, {"name": "lanes", "lanes": lanes, "compile": compile})
    loop, side_by_side = (
        Run(parse_config({**values, "engine": {**one, "device": "cpu"}}), data=data, model=model) for one in engines
    )
    loop.execute(), side_by_side.execute()
    counted = loop.server.model.integer_buffers
    assert counted.keys() == side_by_side.server.model.integer_buffers.keys() and counted
    for name, number in counted.items():
        assert int(number) == int(side_by_side.server.model.integer_buffers[name]) == 6
    assert torch.allclose(loop.server.model.buffers, side_by_side.server.model.buffers, atol=1e-5)


@dataclass(frozen=True)
class LookBack(Perturbation):
    """Takes the gradient at the client's previous iterate."""

    def begin(self, at: LocalContext) -> State:
        return {"last": at.z.clone()}

    def offset(self, at: LocalContext, gradient: Gradient) -> tuple[Tensor, State]:
        return at.local["last"] - at.y, {"last": at.y}


@pytest.mark.parametrize("step", [eager_step, TRACED], ids=["as it is", "compiled"])
def test_a_step_may_keep_the_previous_iterate(step: Callable[[Problem, Training], LocalStep]) -> None:
    setting = bed(rounds=2, size=3)
    looking_back = Algorithm(perturbation=LookBack())
    loop = walk(looking_back, setting, engine=LoopEngine(problem_of(setting), workers=1))
    lanes = walk(looking_back, setting, engine=LaneEngine(problem_of(setting), lanes=2, step=step))
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-12
    assert np.abs(np.array(loop.x) - np.array(walk("fedavg", setting).x)).max() > 1e-3


def test_the_needed_memory_may_be_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def captured(lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
        raise DoesNotFit(None, 2**28)

    monkeypatch.setattr(Lane, "_captured", captured)
    with pytest.raises(UserError, match=r"needs more, and 0\.2 GB are free; lower training\.batch_size \(now 10\)"):
        trained()


def test_out_of_memory_in_a_trial_gives_no_needed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {
        "memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "mem_get_info": (5, 100),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)

    def work() -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(DoesNotFit) as shortage:
        memory_needed(work)
    assert (shortage.value.needed, shortage.value.free) == (None, 5)


def test_a_lane_reserves_memory_for_longer_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory grows only for a client with more than twice the steps of all earlier ones."""
    lane = trained().engine.lanes[0]  # type: ignore[attr-defined]
    grown = []
    for count in [4, 7, 8, 12, 15, 30, 31, 60, 61]:
        lane.batches, before = lane.batches if grown else {}, lane.batches
        lane._load_batches(SimpleNamespace(sizes=[10] * count, tensors={"indices": torch.full((count, 10), count)}))
        grown += [count] * (lane.batches is not before)
        assert (lane.batches["indices"][:count] == count).all()
    assert grown == [4, 12, 30, 61]
    indices, vector, scalars = 8 * 10 * 2 * 61, 4 * lane.problem.layout.size, 2 * 4
    assert lane.memory == indices + 3 * vector + scalars, "scaffold keeps three vectors per client"


def test_the_memory_of_a_lane_includes_personal_starts_and_pilot_gradients() -> None:
    setting = bed(rounds=1, size=2)

    def lane(text: str) -> Lane:
        engine = LaneEngine(problem_of(setting), lanes=1)
        walk(text, setting, engine=engine)
        return engine.lanes[0]

    vector, scalar = 8 * setting.problem.A.shape[1], 8
    assert lane("fedinit").memory - lane("fedavg").memory == 2 * vector, "the client's last model and its start"
    # The pilot has a vector and a scalar; the radius, heterogeneity and alignment of the round are scalars.
    assert lane("fedscam").memory - lane("fedsam").memory == vector + 4 * scalar


@pytest.mark.parametrize("text", ["fedavg", "fedinit"])
def test_a_start_has_its_own_memory_if_each_client_has_its_own(text: str) -> None:
    setting = bed(rounds=1, size=2)
    engine = LaneEngine(problem_of(setting), lanes=1)
    walk(text, setting, engine=engine)
    local = engine.lanes[0].local
    assert local is not None
    static = with_static_tensors(local)
    assert (static.drift.z is local.drift.z) == (text == "fedavg")
    assert static.drift.z is static.perturbation.z is static.optimiser.z


@pytest.mark.parametrize(("device", "expected"), [("cuda", BATCHES_AT_ONCE), ("cpu", 1)])
def test_several_batches_at_once_only_on_a_gpu(device: str, expected: int) -> None:
    assert LaneEngine(SimpleNamespace(device=torch.device(device), prepare_batches=dict))._batches_at_once == expected  # type: ignore[arg-type]


def test_evaluations_take_several_batches_at_once_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained()
    engine, problem = run.engine, replace(run.problem, evaluation_batch=7)
    engine.problem, models, sets = problem, run.models(), problem.evaluation_sets  # type: ignore[attr-defined]
    expected = engine.evaluate(models, sets)
    real, sizes, room = Problem.metric_sums, [], 1000

    def tight(problem: Problem, weights: Tensor, buffers: dict[str, Tensor], batch: Examples) -> dict[str, Tensor]:
        sizes.append(len(batch))
        if len(batch) > room:
            raise torch.OutOfMemoryError("full")
        return real(problem, weights, buffers, batch)

    monkeypatch.setattr(Problem, "metric_sums", tight)
    engine._batches_at_once = 5  # type: ignore[attr-defined]
    assert engine.evaluate(models, sets)["server"]["test"] == pytest.approx(expected["server"]["test"], rel=1e-6)
    assert max(sizes) == 35
    sizes, room = [], 10
    assert engine.evaluate(models, sets) == expected
    assert sizes[0] == 35 and max(sizes[1:]) == 7
    room = 5
    with pytest.raises(torch.OutOfMemoryError):
        engine.evaluate(models, sets)


def test_the_first_lane_gets_the_memory_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lane must capture again while the other lanes hold the memory, until nothing refers to them."""
    together = trained(3).server.model.weights
    real, refused, in_memory = Lane.__init__, [], WeakSet[Lane]()

    def created(lane: Lane, *arguments: Any) -> None:
        real(lane, *arguments)
        in_memory.add(lane)

    def captured(lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
        gc.collect()  # on a CPU, lanes refer to themselves through the functions that they would capture
        if run.server.rounds == 1 and lane is run.engine.lanes[0] and len(in_memory) > 1:  # type: ignore[attr-defined]
            refused.append(lane)
            raise DoesNotFit(3 * 2**30, 2**30)
        return work

    monkeypatch.setattr(Lane, "__init__", created)
    monkeypatch.setattr(Lane, "_captured", captured)
    monkeypatch.setattr("fedflat.engines.gpu.lane.SELDOM", 10**9)
    run = a_run(3)
    steps = run.train_rounds()
    next(steps)
    run.engine.lanes[0]._begin = None  # type: ignore[attr-defined]
    list(steps)
    assert len(refused) == 1 and len(run.engine.lanes) == 1  # type: ignore[attr-defined]
    assert torch.equal(run.server.model.weights, together)


def test_a_finish_that_cannot_be_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained().server.model.weights

    def captured(lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
        if getattr(work, "__name__", "") == "_finish_client":
            raise DoesNotFit(2**28, 2**20)
        return work

    monkeypatch.setattr(Lane, "_captured", captured)
    assert torch.equal(trained().server.model.weights, expected)


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (RuntimeError("not permitted when stream is capturing\nmore"), UserError, r"capturing\); .*engine.name=loop"),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
    ],
)
def test_failed_captures_are_explained(raised: Exception, expected: type[Exception], message: str) -> None:
    with pytest.raises(expected, match=message), explain_capture_errors():
        raise raised


def test_out_of_memory_is_not_a_compiler_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "compile", lambda step, **options: full)
    setting = bed(rounds=1, size=2)
    with pytest.raises(torch.OutOfMemoryError):
        walk("fedavg", setting, engine=LaneEngine(problem_of(setting), step=compiled_step))


def test_dropout_is_reproducible_and_one_lane_agrees_with_the_loop() -> None:
    values = {
        "algorithm": "mime",
        "model": "femnist-cnn",
        "data": {"clients": 4, "partition": "iid"},
        "federation": {"clients_per_round": 2},
        "training": {"rounds": 1, "local_steps": 2, "batch_size": 4},
    }
    data = RandomImages(size=40, side=8).dataset()
    found = []
    for engine in (
        {"name": "loop", "workers": 1},
        {"name": "lanes", "lanes": 1},
        {"name": "lanes"},
        {"name": "lanes"},
    ):
        run = Run(parse_config({**values, "engine": {**engine, "device": "cpu"}}), data=data)
        torch.manual_seed(len(found))  # earlier draws in this process must not matter
        found.append(run.execute().models["server"].weights)
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert torch.equal(found[2], found[3])


def test_a_larger_cohort_reuses_the_step() -> None:
    made: list[Training] = []

    def counted(problem: Problem, training: Training) -> LocalStep:
        made.append(training)
        return eager_step(problem, training)

    setting = bed(rounds=3).but(cohorts=[[0], [0, 1, 2], [1, 2]])
    grown = walk("scaffold", setting, engine=LaneEngine(problem_of(setting), step=counted))
    assert len(made) == 1, "the compiled step is reused"
    assert np.abs(np.array(grown.x) - np.array(walk("scaffold", setting).x)).max() < 1e-12


@pytest.mark.parametrize("kind", [LaneEngine, partial(LoopEngine, workers=1)])
def test_an_engine_can_switch_algorithms(kind: Callable[[Problem], Engine]) -> None:
    setting = bed(rounds=2, size=3)
    engine = kind(problem_of(setting))
    walk("fedavg", setting, engine=engine)
    again = walk("scaffold", setting, engine=engine)
    assert np.abs(np.array(again.x) - np.array(walk("scaffold", setting).x)).max() < 1e-12


def test_compiled_steps_use_gpu_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for layer in (gpu_layers.ChannelsLastGroupNorm, gpu_layers.PatchConvolution):
        real = layer.forward
        monkeypatch.setattr(
            layer, "forward", lambda self, input, real=real: used.append(type(self).__name__) or real(self, input)
        )
    monkeypatch.setattr("fedflat.experiment.setup.engine.compiled_step", TRACED)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2), nn.GroupNorm(2, 4), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(64, 10)
    )
    values = {
        "data": {"clients": 2, "partition": "iid"},
        "federation": {"clients_per_round": 2},
        "training": {"rounds": 1, "local_steps": 2, "batch_size": 10},
    }
    weights = []
    for engine in ({"name": "loop", "workers": 1}, {"name": "lanes", "compile": "on"}):
        run = Run(
            parse_config({**values, "engine": {**engine, "device": "cpu"}}),
            data=RandomImages(size=60, side=16).dataset(),
            model=model,
        )
        weights.append(run.execute().models["server"].weights)
        assert set(used) == (set() if engine["name"] == "loop" else {"ChannelsLastGroupNorm", "PatchConvolution"})
    assert torch.allclose(*weights, atol=1e-6)
