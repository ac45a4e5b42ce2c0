"""Full precision on a GPU is set and restored, with either of torch's two sets of switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Engine, ModelState
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import device_of
from fedflat.flatness import Ends, Operator, lanczos
from fedflat.flatness.precision import allow_tf32, tf32_allowed

from ..quadratics import Bowl, problem_of, walk
from ..reference import bed

MATMUL: Any = torch.backends.cuda.matmul
CUDNN: Any = torch.backends.cudnn
newer = pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="torch before 2.9")


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The switches exist without a GPU; restore their defaults afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    MATMUL.allow_tf32, CUDNN.allow_tf32 = False, True
    if hasattr(MATMUL, "fp32_precision"):
        MATMUL.fp32_precision = "none"


def older() -> list[bool]:
    return [MATMUL.allow_tf32, CUDNN.allow_tf32]


def named() -> list[str]:
    return [MATMUL.fp32_precision, CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision]


@pytest.mark.parametrize("before", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_restored_with_the_switches_of_older_torch(before: tuple[bool, bool], allowed: bool) -> None:
    MATMUL.allow_tf32, CUDNN.allow_tf32 = before
    with pytest.raises(KeyError), tf32_allowed(allowed):
        assert older() == [allowed, allowed]
        raise KeyError
    assert older() == list(before)


@newer
@pytest.mark.parametrize("before", ["tf32", "ieee"])
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_restored_with_the_switches_of_newer_torch(before: str, allowed: bool) -> None:
    MATMUL.fp32_precision = CUDNN.conv.fp32_precision = before
    seen = named()
    with tf32_allowed(allowed):
        assert named() == 3 * ["tf32" if allowed else "ieee"] and older() == [allowed, allowed]
    assert named() == seen


@newer
def test_the_global_switch_is_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: Any = torch.backends
    monkeypatch.setattr(backends, "fp32_precision", "tf32")
    with tf32_allowed(False):
        assert named() == 3 * ["ieee"]
    assert named() == 3 * ["tf32"]


@newer
def test_without_a_gpu_nothing_is_read_or_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    MATMUL.fp32_precision = "tf32"
    assert lanczos(Operator.of_matrix(torch.eye(4)), Ends(1)).converged
    with tf32_allowed(False):
        assert MATMUL.fp32_precision == "tf32"


def test_torch_without_the_new_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, cudnn = SimpleNamespace(allow_tf32=True), SimpleNamespace(allow_tf32=True, rnn=SimpleNamespace())
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    with tf32_allowed(False):
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
    assert (matmul, cudnn) == (
        SimpleNamespace(allow_tf32=True),
        SimpleNamespace(allow_tf32=True, rnn=SimpleNamespace()),
    )


def test_finding_the_device_leaves_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    before = older()
    for precision in ("tf32", "float32"):
        assert device_of(Config.model_validate({"engine": {"precision": precision}})).type == "cuda"
        assert older() == before


@pytest.mark.parametrize("used", ["older", pytest.param("newer", marks=newer)])
def test_setting_the_switches(used: str) -> None:
    for allowed in (True, False):
        if used == "newer":
            MATMUL.fp32_precision = "ieee" if allowed else "tf32"
        allow_tf32(allowed)
        assert older() == [allowed, allowed]


@pytest.mark.parametrize("engine", [partial(LoopEngine, workers=1), LaneEngine])
@pytest.mark.parametrize("text", ["fedavg", "mime"])
def test_each_problem_computes_in_its_own_precision(
    text: str, engine: Callable[[Problem], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In local steps, full-batch gradients, evaluations and estimates of buffers; the caller's setting stays."""
    seen: list[list[bool]] = []
    forward = Bowl.forward
    monkeypatch.setattr(Bowl, "forward", lambda self, inputs: seen.append(older()) or forward(self, inputs))
    setting = bed(rounds=1, size=2)
    for tf32, outer in [(True, False), (False, True)]:
        MATMUL.allow_tf32 = CUDNN.allow_tf32 = outer
        problem = problem_of(setting)
        problem.tf32 = tf32
        walk(text, setting, engine=engine(problem))
        passes = len(seen)
        state = ModelState(*problem.initial_state())
        engine(problem).evaluate({"server": state}, {"test": problem.data.train})
        assert len(seen) > passes
        problem.estimate_buffers(state.weights, {})
        assert older() == [outer, outer] and {tuple(switches) for switches in seen} == {(tf32, tf32)}
        seen.clear()
