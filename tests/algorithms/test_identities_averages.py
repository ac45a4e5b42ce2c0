"""Identities 28 and 46 to 48 of the specification: averages against the reference, closed forms and a real run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.algorithms.lr_schedule import Cyclic, Schedule
from fedflat.averaging import Average, AverageState, Ema, RunInfo, Swa, Wima
from fedflat.experiment.callback import Callback
from fedflat.experiment.store.client_states import RowStore

from ..reference import averages, bed
from .settings import differ, same

T = 40
X0 = bed().x0
MODELS = [X0, *np.cumsum(np.random.default_rng(3).normal(size=(T, 6)), 0)]
"""x^0..x^T."""
CLASSIFIER = torch.tensor([False, False, False, False, True, True])


def begin(
    average: Average, rounds: int = T, cycle: int = 1, x: Any = X0, dtype: torch.dtype = torch.float64
) -> AverageState:
    info = RunInfo(rounds, cycle, CLASSIFIER[: len(x)], lambda name, count: RowStore())
    return average.begin(info, torch.as_tensor(x, dtype=dtype))


def course(average: Average, models: Any = MODELS, **info: Any) -> list[np.ndarray | None]:
    """The average after every round; None where there is none yet."""
    running = begin(average, len(models) - 1, x=models[0], **info)
    found = []
    for t in range(len(models) - 1):
        running.before_round(t, torch.as_tensor(models[t]))
        running.update(t, torch.as_tensor(models[t + 1]))
        mean = running.model(torch.as_tensor(models[t + 1]))
        found.append(None if mean is None else mean.numpy())
    return found


def test_28_averages_that_are_the_model_itself() -> None:
    same(course(Wima(window=1)), MODELS[1:])
    same(course(Ema(decay=0.0)), MODELS[1:])
    assert course(Swa(start=1.0)) == [None] * T  # never begun: there is nothing beside the model to evaluate


@pytest.mark.parametrize("window", [1, 2, 7, 40, 100])
def test_46_47_wima(window: int) -> None:
    found = course(Wima(window=window))
    same(found, averages.wima(MODELS[1:], window=window))
    for j in range(min(window, T)):  # 47: the mean of what there is, without x^0
        same(found[j], np.mean(MODELS[1 : j + 2], 0))
    same(found[window - 1 :], averages.wima_closed_form(MODELS, window=window) if window <= T else [])  # 46: eq. 6
    for t in range(window, T):
        same(found[t] - found[t - 1], (MODELS[t + 1] - MODELS[t + 1 - window]) / window)
    assert sum((window - j) / window for j in range(window)) == pytest.approx((window + 1) / 2)


@pytest.mark.parametrize("part", ["classifier", "features"])
def test_46_wima_of_a_part(part: str) -> None:
    whole, some = course(Wima(window=5)), course(Wima(window=5, part=part))
    averaged = CLASSIFIER.numpy() if part == "classifier" else ~CLASSIFIER.numpy()
    same(some, np.where(averaged, whole, MODELS[1:]))


def test_46_wimas_sum_leaves_no_trace_of_large_models() -> None:
    """In float32, models of size 1e4 pass through the window; what remains is exact to float32's own precision."""
    rows = [np.full(2, 1e4 if t < 50 else 1 / 3, np.float32) for t in range(101)]
    found = course(Wima(window=10), rows, dtype=torch.float32)
    assert found[-1].dtype == np.float32
    same(found[-1], np.float32(1 / 3), atol=1e-8)


@pytest.mark.parametrize("weighting", ["mean", "literal"])
@pytest.mark.parametrize("phase", ["released", "cycle_end"])
@pytest.mark.parametrize(("start", "cycle"), [(0.5, 5), (0.75, 1), (0.3, 4), (0.0, 3), (0.6, 7)])
def test_48_swa_is_the_references(start: float, cycle: int, weighting: str, phase: str) -> None:
    spec = {"start": start, "weighting": weighting, "capture_phase": phase}
    expected = averages.swa(MODELS, cycle=cycle, **spec)
    begun = int(start * T)
    for every in (course(Swa(**spec), cycle=cycle), course(Swa(every=cycle, **spec), cycle=3)):
        assert every[:begun] == [None] * begun
        same(every[begun:], expected[begun:])


def test_48_swa_is_the_plain_mean_of_the_captured_models() -> None:
    models = [np.array([float(i)]) for i in range(T + 1)]
    found = course(Swa(start=0.5), models, cycle=5)
    same(found[20:25], [models[20]] * 5)  # the snapshot, until the first capture
    same(found[25], models[26])
    same(found[-1], np.mean([26.0, 31.0, 36.0]))
    same(course(Swa(start=0.5, capture_phase="cycle_end"), models, cycle=5)[-1], np.mean([25.0, 30.0, 35.0, 40.0]))
    snapshot = [np.array([float(i == 1500)]) for i in range(2001)]
    same(course(Swa(weighting="literal"), snapshot, cycle=2)[-1], 0.75)
    same(course(Swa(), snapshot, cycle=2)[-1], 0.0)


def test_ema() -> None:
    same(course(Ema(decay=0.9)), averages.ema(MODELS[1:], decay=0.9))
    same(course(Ema(decay=0.9))[2], 0.81 * MODELS[1] + 0.09 * MODELS[2] + 0.1 * MODELS[3])
    same(course(Ema(decay=1.0)), [MODELS[1]] * T)


@pytest.mark.parametrize(("average", "rounds", "captures"), [
    (Swa(), 60, False),
    (Swa(), 80, False),
    (Swa(), 84, True),
    (Swa(every=1), 60, True),
    (Swa(weighting="literal"), 60, False),
    (Swa(weighting="literal"), 64, True),
    (Swa(capture_phase="cycle_end"), 60, True),
    (Swa(start=1), 1000, False),
])  # fmt: skip
def test_swa_warns_if_it_captures_no_model(average: Swa, rounds: int, captures: bool) -> None:
    running = begin(average, rounds, cycle=20)
    for t in range(rounds):
        running.before_round(t, torch.zeros(6))
        running.update(t, torch.zeros(6))
    assert bool(running.tensors().get("captured", torch.tensor(0))) is captures
    warning = average.warning(RunInfo(rounds, 20, CLASSIFIER, lambda name, count: RowStore()))
    assert (warning is None) is captures
    assert captures or f"{rounds} rounds" in warning


def test_a_run_warns_if_swa_captures_no_model() -> None:
    small = {
        "rounds": 2,
        "clients": 6,
        "clients_per_round": 2,
        "local_steps": 1,
        "model": "mlp(hidden=4)",
        "workers": 1,
    }
    with pytest.warns(UserWarning, match=r"2 rounds.*after round 1 .*every 20"):
        fedflat.run("fedavg+cyclic+swa", **small)


def test_floating_point_does_not_shift_the_start() -> None:
    models = [np.full(2, float(t)) for t in range(101)]
    found = course(Swa(start=0.58), models)
    assert found[57] is None and found[58] is not None
    high, one = Schedule(1.0, rounds=100), torch.tensor(1)
    rates = [float(Cyclic(low=0.0, length=2, start=0.58)(high, torch.tensor(t), one, one)) for t in (57, 58, 59)]
    assert rates == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("average", [Swa(start=0.3), Swa(start=0.3, weighting="literal"), Wima(window=6), Ema()])
@pytest.mark.parametrize("stop", [1, 5, 13, 20, 33])
def test_an_average_resumes_from_its_saved_state(average: Average, stop: int) -> None:
    rows = RowStore()
    info = RunInfo(T, 4, CLASSIFIER, lambda name, count: rows)
    found = []
    running = average.begin(info, torch.as_tensor(X0))
    for t in range(T):
        if t == stop:
            saved = {name: tensor.clone() for name, tensor in running.tensors().items()}
            running = average.begin(info, torch.as_tensor(X0))
            running.restore(saved)
        running.before_round(t, torch.as_tensor(MODELS[t]))
        running.update(t, torch.as_tensor(MODELS[t + 1]))
        found.append(running.model(torch.as_tensor(MODELS[t + 1])))
    for left, right in zip(found, course(average, cycle=4), strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            same(left, right, atol=0)


class Watching(Callback):
    """Keeps the server's model after every round, and every model to evaluate."""

    def __init__(self) -> None:
        self.models: list[dict[str, np.ndarray]] = []

    def began(self, run: Any) -> None:
        self.models.append({"server": run.server.model.weights.numpy().copy()})

    def round_done(self, run: Any) -> None:
        self.models.append({name: state.weights.numpy().copy() for name, state in run.models().items()})


def test_28_46_47_48_in_a_run() -> None:
    """All averages in one run: each equals the reference's average of the run's models, and none is fed back."""
    small = {
        "rounds": 8,
        "clients": 6,
        "clients_per_round": 2,
        "local_steps": 2,
        "model": "mlp(hidden=4)",
        "workers": 1,
        "eval_every": 8,
    }
    small["engine__precision"] = "float64"
    cyclic = "fedavg+cyclic(low=0.01,length=2,start=0.25)"
    watching, alone = Watching(), Watching()
    parts = (
        "swa(start=0.25)+swa(start=0.5,every=1)+wima(window=3)+wima(window=3,part=classifier)+wima(window=1)"
        "+ema(decay=0.5)+swa(start=1)"
    )
    result = fedflat.run(f"{cyclic}+{parts}", callbacks=[watching], **small)
    fedflat.run(cyclic, callbacks=[alone], **small)
    x = [models["server"] for models in watching.models]
    same(x, [models["server"] for models in alone.models], atol=0)
    differ(x[0], x[-1])
    expected = {
        "swa(start=0.25)": averages.swa(x, start=0.25, cycle=2),
        "swa(start=0.5,every=1)": averages.swa(x, start=0.5, cycle=1),
        "wima(window=3)": averages.wima(x[1:], window=3),
        "wima(window=1)": x[1:],
        "ema(decay=0.5)": averages.ema(x[1:], decay=0.5),
    }
    for name, models in expected.items():
        for t, model in enumerate(models, start=1):
            if name in watching.models[t]:
                same(watching.models[t][name], model, atol=1e-12)
        assert name in watching.models[-1]
    head = 4 * 10 + 10
    last = watching.models[-1]["wima(window=3,part=classifier)"]
    same(last[-head:], expected["wima(window=3)"][-1][-head:])
    same(last[:-head], x[-1][:-head], atol=0)
    assert "swa(start=1.0)" not in watching.models[-1]
    assert ("swa(start=0.25)" in watching.models[3], "swa(start=0.25)" in watching.models[2]) == (True, False)
    assert result.history[-1]["test"]["wima(window=1)"] == pytest.approx(result.history[-1]["test"]["server"])
