"""Identities 49 and 50 of the specification on the library, and the released scalar shift."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat.algorithms import algorithm
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.perturbation.released import scalar_shift
from fedflat.errors import UserError
from fedflat.models.layout import Layout

from ..quadratics import walk
from .settings import FULL, PARTIAL, K, differ, library, reference, same


def offsets(
    text: str, setting=PARTIAL, names: tuple[str, ...] = ("weight",)
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(y, g(y), e) of every step with two passes."""
    calls = walk(text, setting, names=names, quick=True, record=True).gradients
    return [(y, g, moved - y) for (y, g), (moved, _) in zip(calls[::2], calls[1::2], strict=True)]


def offset(text: str, y: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
    """The offset of a first step at a given point."""
    built, one = algorithm(text), torch.ones((), dtype=torch.float64)
    layout = Layout(("weight",), ((len(y),),))
    local = built.begin(y, built.new_server(y), built.new_client(y), layout, Schedule(0.1), 0 * one, one, Descent())
    found, _ = built.perturbation.offset(local.perturbation, gradient)
    assert found is not None
    return found


NAMES = ("a_weight", "a_bias", "norm_weight")
MASK = np.array([True, True, False, False, True, True])


@pytest.mark.parametrize("eta", [0.0, 0.2])
def test_49_asam_has_length_rho_in_its_own_norm(eta: float) -> None:
    for y, g, e in offsets(f"fedasam(rho=0.3,eta={eta})", names=NAMES):
        T = np.where(MASK, np.abs(y) + eta, 1.0)
        assert np.linalg.norm(e / T) == pytest.approx(0.3)
        same(e / np.linalg.norm(e), T**2 * g / np.linalg.norm(T**2 * g))
    for y, _, e in offsets(f"fedasam(rho=0.3,eta={eta},scope=all)", names=NAMES):
        assert np.linalg.norm(e / (np.abs(y) + eta)) == pytest.approx(0.3)


def test_49_asam_follows_the_scale_of_weights() -> None:
    """f(w) = (w_1 w_2 - 1)^2 / 2 is the same at (c w_1, w_2 / c); with eta = 0 so is the offset."""
    C, w = torch.tensor([4.0, 0.25], dtype=torch.float64), torch.tensor([0.7, -1.2], dtype=torch.float64)

    def gradient(w: Tensor) -> Tensor:
        return (w[0] * w[1] - 1) * w.flip(0)

    same(offset("fedasam(eta=0)", C * w, gradient), C * offset("fedasam(eta=0)", w, gradient))
    differ(offset("fedasam(eta=0.2)", C * w, gradient), C * offset("fedasam(eta=0.2)", w, gradient))
    differ(offset("fedsam", C * w, gradient), C * offset("fedsam", w, gradient))


def test_49_asam_becomes_sam() -> None:
    same(
        library(f"fedasam(rho={0.3 / 1e8},eta=1e8)", "partial").x, reference("fedsam", "partial", rho=0.3).x, atol=1e-6
    )
    with pytest.raises(UserError, match="cannot tell weights from biases among x, y"):
        walk("fedasam(rho=0.3)", PARTIAL, names=("x", "y"), quick=True)  # would silently be SAM
    ones = PARTIAL.but(x0=np.array([1.0, -1, 1, 1, -1, 1]), steps=1, cohorts=[[0, 1]])
    same(
        walk("fedasam(rho=0.3,eta=0)", ones, names=("weight",), quick=True).x,
        walk("fedsam(rho=0.3)", ones, quick=True).x,
    )


@pytest.mark.parametrize("perturbation", ["sam(rho=0.3{})", "asam(rho=0.3{})"])
@pytest.mark.parametrize("drift", ["fedprox(mu=0.5)", "scaffold", "feddyn", "fedavg"])
def test_perturb_from_selects_the_gradient_or_the_corrected_direction(drift: str, perturbation: str) -> None:
    """The drift correction is the difference between a step's direction and its gradient."""
    for source in ("data", "total"):
        calls = walk(
            f"{drift}+{perturbation.format(f',perturb_from={source}')}",
            PARTIAL,
            names=("weight",),
            quick=True,
            record=True,
        ).gradients
        steps = [(y, g, moved - y, g_moved) for (y, g), (moved, g_moved) in zip(calls[::2], calls[1::2], strict=True)]
        for number, (y, g, e, g_moved) in enumerate(steps):
            if (number + 1) % K == 0:
                continue  # the next record belongs to another client
            added = (y - steps[number + 1][0]) / PARTIAL.eta - g_moved
            q = g + added if source == "total" else g
            T = np.abs(y) + 0.2 if perturbation.startswith("asam") else np.ones_like(y)
            same(e, 0.3 * T * (T * q) / np.linalg.norm(T * q))
        corrected = drift != "fedavg" and number > K
        assert not corrected or np.abs(added).max() > 1e-3, "both sources would give the same offset"


def test_50_sam_has_length_rho_along_the_gradient() -> None:
    alone = FULL.but(cohorts=[[3]] * 3)
    for y, g, e in offsets("fedsam(rho=0.3)", alone):
        assert np.linalg.norm(e) == pytest.approx(0.3)
        same(FULL.problem.gradient(3, y + e), g + 0.3 * FULL.problem.A[3] @ g / np.linalg.norm(g))
    for _, g, e in offsets("fedavg+sam(rho=0.3,normalise=false)", alone):
        same(e, 0.3 * g)


@pytest.mark.parametrize(
    "text",
    ["fedsam", "fedasam", "mofedsam", "fedgamma", "fedspeed", "fedspeed(share=0.5)", "fedlesam", "fedwmsam", "fedsmoo"],
)
def test_50_nothing_happens_at_a_minimum(text: str) -> None:
    """No division by a zero norm, and no perturbation."""
    still = FULL.but(cohorts=[[3]] * 3, x0=FULL.problem.b[3])
    same(walk(text, still, names=("weight",), quick=True).x, [FULL.problem.b[3]] * 3)


def slow_shift(direction: dict[str, Tensor]) -> dict[str, Tensor]:
    """Shift tensor j by v[j] / sum_j |v[j]|, with v the concatenation of all tensors flattened in torch's order."""
    v = [float(number) for tensor in direction.values() for number in tensor.contiguous().reshape(-1)]
    norm = sum(abs(v[j]) for j in range(len(direction)))
    return {name: torch.full_like(tensor, v[j] / norm) for j, (name, tensor) in enumerate(direction.items())}


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 4)),
        nn.Sequential(
            nn.Conv2d(2, 1, (1, 2), bias=False), nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 3)
        ),
        nn.Linear(1, 1),
    ],
    ids=["first tensor long enough", "first tensor too short", "few numbers"],
)
def test_released_scalar_shift(model: nn.Module) -> None:
    layout = Layout.of_parameters(model)
    torch.manual_seed(1)
    direction = torch.randn(layout.size, dtype=torch.float64)
    expected = layout.flatten(slow_shift(layout.views(direction)))
    same(scalar_shift(direction, layout), expected)
    same(scalar_shift(torch.zeros_like(direction), layout), torch.zeros_like(direction))


SIZES, SPLIT = (2, 2, 2), ("a", "b", "c")


def numpy_shift(v: np.ndarray) -> np.ndarray:
    """The same for tensors of two numbers each."""
    return np.repeat(v[:3] / (np.abs(v[:3]).sum() + 1e-12), SIZES)


def test_released_fedlesam_through_the_engine() -> None:
    x = before = PARTIAL.x0
    problem, eta = PARTIAL.problem, PARTIAL.eta
    walked = walk("fedlesam(variant=released,rho=0.3)", PARTIAL, names=SPLIT, quick=True)
    for cohort, expected in zip(PARTIAL.cohorts, walked.x, strict=True):
        ends = []
        for i in cohort:
            y, e = x, 0.3 * numpy_shift(before - x)
            for _ in range(K):
                y = y - eta * problem.gradient(i, y + e)
            ends.append(y)
        x, before = np.mean(ends, 0), x
        same(expected, x)


def test_released_fedwmsam_looks_ahead_by_scalar_shifts() -> None:
    """e = -rho shift(z + b Delta_i - y), Delta_i = Delta + alpha / (1 - alpha) (c - c_i)."""
    walked = walk(
        "fedwmsam(variant=released,rho=0.3,alpha0=0.4,lam=0.2)", PARTIAL, names=SPLIT, quick=True, record=True
    )
    points, zero = iter(point for point, _ in walked.gradients), np.zeros(6)
    server, z = {"momentum": zero, "c": zero, "alpha": 0.4}, PARTIAL.x0
    clients = dict.fromkeys(range(5), zero)
    for t, cohort in enumerate(PARTIAL.cohorts):
        for i in cohort:
            alpha, r = server["alpha"], server["c"] - clients[i]
            y = z
            for b in range(K):
                e = -0.3 * numpy_shift(z + b * (server["momentum"] + alpha / (1 - alpha) * r) - y)
                same(next(points), y + e)
                y = y - PARTIAL.eta * (
                    alpha * (PARTIAL.problem.gradient(i, y + e) + r) + (1 - alpha) * server["momentum"]
                )
        server = {name: value.numpy() for name, value in walked.server[t]["drift"].items()}
        clients = {i: state["drift"]["c"].numpy() for i, state in walked.clients[t].items()}
        z = walked.x[t]
