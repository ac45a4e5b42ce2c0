"""Gradients compiled for a CPU agree with eager ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fedflat.bench.setting import BenchmarkSetting, RandomImages
from fedflat.engines.problem.compiled import CompiledGradient, Loss
from fedflat.experiment.run import Run


def a_run(model: str = "lenet5", compiled: str = "on", augmentation: str = "none") -> Run:
    setting = BenchmarkSetting(
        model, local_steps=2, batch_size=8, compile=compiled, augmentation=augmentation, workers=1
    )
    return Run(setting.config("fedsam", "float32", "loop", 10), data=RandomImages(size=200).dataset())


def test_full_batches_are_compiled() -> None:
    problem = a_run().problem
    weights = problem.initial_state()[0]
    fast = CompiledGradient(problem.model, problem.plain_loss, 8, backend="eager")
    batch = problem.batch(torch.arange(8), {})
    result = fast(weights, batch)
    assert result is not None
    problem.compiled_size = None
    loss, gradient = problem.loss_and_gradient(weights, {}, batch)
    assert float(result[0]) == pytest.approx(float(loss))
    assert torch.allclose(result[1], gradient, rtol=1e-4, atol=1e-7)


def test_other_batches_are_not_compiled() -> None:
    problem = a_run().problem
    fast = CompiledGradient(problem.model, problem.plain_loss, 8, backend="eager")
    assert fast(problem.initial_state()[0], problem.batch(torch.arange(5), {})) is None
    mixing = a_run(augmentation="mixup").problem
    draws = {
        name: draw[0] for name, draw in mixing.augmentation.draw(np.random.default_rng(0), 1, 8, (3, 32, 32)).items()
    }
    assert (
        CompiledGradient(mixing.model, mixing.plain_loss, 8, backend="eager")(
            mixing.initial_state()[0], mixing.batch(torch.arange(8), draws)
        )
        is None
    )
    normalising = a_run("resnet20(norm=batch)").problem
    assert normalising.compiled_size is None, "BatchNorm changes its buffers in place"


def test_a_compiler_error_falls_back_to_eager() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler here")

    problem = a_run().problem
    weights, batch = problem.initial_state()[0], problem.batch(torch.arange(8), {})
    fast = CompiledGradient(problem.model, problem.plain_loss, 8, backend=broken)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="could not be compiled"):
        assert fast(weights, batch) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fast(weights, batch) is None


def test_out_of_memory_is_not_a_compiler_error() -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    problem = a_run().problem
    fast = CompiledGradient(problem.model, problem.plain_loss, 8, backend="eager")
    fast._compiled = full
    with pytest.raises(torch.OutOfMemoryError):
        fast(problem.initial_state()[0], problem.batch(torch.arange(8), {}))


def test_a_run_compiles_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    real = CompiledGradient.__init__

    def recorded(self: CompiledGradient, model: nn.Module, loss: Loss, size: int) -> None:
        used.append(size)
        real(self, model, loss, size, "eager")

    monkeypatch.setattr(CompiledGradient, "__init__", recorded)
    run = a_run()
    assert run.problem.compiled_size == 8
    run._open()
    run._train_round()
    assert used == [8]
    assert a_run(compiled="auto").problem.compiled_size is None
