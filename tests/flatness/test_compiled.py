"""Compiled Hessian-vector products equal eager ones."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import UserError
from fedflat.flatness import Objective, spectrum
from fedflat.flatness.curvature import compiled as module
from fedflat.flatness.curvature.compiled import CompiledProduct
from fedflat.flatness.curvature.spectrum import compile_if_worthwhile


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    ]
    return nn.Sequential(*layers).double()


def objective(batch: int = 4) -> Objective:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(10, 1, 8, 8, generator=generator, dtype=torch.float64)
    return Objective(network(), F.cross_entropy, (inputs, torch.arange(10) % 3), batch_size=batch)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the traced graph with eager kernels, to save minutes of compilation."""
    monkeypatch.setattr(module, "BACKEND", "aot_eager")


def compiled() -> tuple[Objective, CompiledProduct]:
    one = objective()
    one.compile()
    assert one._compiled is not None
    return one, one._compiled


def products(of: Objective) -> Tensor:
    return of.hessian_products(
        None, torch.randn(2, of.size, generator=torch.Generator().manual_seed(2), dtype=of.dtype)
    )


def test_a_smaller_last_batch_is_eager_and_subsets_share_the_compiled_product() -> None:
    fast, product = compiled()
    part = fast.subset(3, seed=0)
    assert part._compiled is product
    torch.testing.assert_close(products(part), products(objective().subset(3, seed=0)))
    assert product._compiled is None, "three examples are not four"


def test_batches_of_another_shape_are_eager() -> None:
    torch.manual_seed(0)
    average = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)
    ).double()
    data = [(torch.randn(4, 1, side, side, dtype=torch.float64), torch.arange(4) % 3) for side in (6, 8, 6)]
    plain, fast = (Objective(average, F.cross_entropy, data) for _ in range(2))
    fast.compile()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(products(fast), products(plain))
    assert fast._compiled is not None and fast._compiled._usable


def test_running_out_of_memory_is_not_a_compiler_failure() -> None:
    fast, product = compiled()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    product._compiled = full
    with pytest.raises(torch.OutOfMemoryError):
        products(fast)
    assert product._usable


def test_a_compiler_failure_warns_once_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(module, "BACKEND", broken)
    data = (torch.ones(4, 2), torch.arange(4) % 3)
    plain, fast = (Objective(nn.Linear(2, 3), F.cross_entropy, data, weights=torch.ones(9)) for _ in range(2))
    fast.compile()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = products(fast)
    torch.testing.assert_close(found, products(plain))
    assert sum("compil" in str(one.message) for one in told) == 1


def test_compiled_products_equal_eager_ones() -> None:
    of = {compile: objective(5) for compile in ("off", "on")}
    told: list[str] = []
    plain, fast = (
        spectrum(of[compile], None, None, 3, trace_draws=2, compile=compile, progress=told.append) for compile in of
    )
    assert sum("compiling" in line for line in told) == 1
    product = of["on"]._compiled
    assert of["off"]._compiled is None and product is not None and product._compiled is not None and product._usable
    torch.testing.assert_close(products(of["on"]), products(of["off"]), rtol=1e-10, atol=1e-12)
    assert fast.eigenvalues == pytest.approx(plain.eigenvalues, rel=1e-8) and fast.products == plain.products


def test_auto_never_compiles_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objective, "compile", lambda self: pytest.fail("compiled"))
    assert not compile_if_worthwhile(objective(), "auto", 10**9)
    assert not compile_if_worthwhile(objective(), "off", 10**9)


@pytest.mark.parametrize(("seconds", "pays"), [(1.3, True), (1.1, False)])
def test_auto_compiles_on_a_gpu_if_products_take_more_than_two_minutes(
    monkeypatch: pytest.MonkeyPatch, seconds: float, pays: bool
) -> None:
    monkeypatch.setattr("fedflat.flatness.curvature.spectrum._seconds_per_product", lambda objective: seconds)
    compiled_now: list[bool] = []
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), compile=lambda: compiled_now.append(True))
    assert compile_if_worthwhile(on_gpu, "auto", 100) == bool(compiled_now) == pays


def test_an_unknown_compile_option_is_refused() -> None:
    with pytest.raises(UserError, match="auto, off, on"):
        spectrum(objective(), None, None, 3, compile="yes")
