"""Identities 31, 32, 42 to 45, 51 and 52 of the specification: closed forms and states.

Limits (33 to 41) and symmetries (54, 55) are tested for the reference, which the library equals; symmetries (54 to 56)
also for random compositions.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import LocalState
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.models.layout import Layout

from ..quadratics import walk
from ..reference import Quadratics, Setting, bed, golden, linear_rates
from ..reference.problem import Linear
from .settings import FULL, SETTINGS, K, library, same

FULL_OR_UNEVEN = pytest.mark.parametrize("setting", ["full", "uneven-partial"])
QUICK: dict[str, Any] = {"names": ("weight",), "quick": True}


def _local_round(text: str, steps: int, lr: float, gradient: torch.Tensor) -> LocalState:
    """One client's round over a constant gradient."""
    built, z = algorithm(text), torch.zeros(len(gradient), dtype=torch.float64)
    count, schedule, descent = torch.tensor(float(steps), dtype=torch.float64), Schedule(lr), Descent()
    layout = Layout(("weight",), ((len(gradient),),))
    local = built.begin(
        z, built.new_server(z), built.new_client(z), layout, schedule, torch.zeros_like(count), count, descent
    )
    for _ in range(steps):
        local = built.step(local, lambda _: gradient, schedule, descent)
    return local


@pytest.mark.parametrize(("steps", "final_lr"), [(50, 0.1), (50, 1.0), (7, 0.4), (1, 0.1)])
def test_31_the_sum_of_falling_rates(steps: int, final_lr: float) -> None:
    gradient = torch.tensor([1.0, -2.0], dtype=torch.float64)
    H = 0.3 * (steps - (1 - final_lr) * (steps - 1) / 2)
    text = f"fedmoswa(final_lr={final_lr})"
    local = _local_round(text, steps, 0.3, gradient)
    kept, message = algorithm(text).finish(local)
    assert float(message.lr_sum) == pytest.approx(H, abs=1e-12)
    assert pytest.approx(0.3 * 27.95) == H or (steps, final_lr) != (50, 0.1)
    same(kept["drift"]["c"], gradient)
    released = f"fedmoswa(final_lr={final_lr},normaliser=trapezoid)"
    kept, _ = algorithm(released).finish(_local_round(released, steps, 0.3, gradient))
    same(kept["drift"]["c"], gradient * H / (0.3 * steps * (1 + final_lr) / 2))  # 27.95 / 27.5 at K = 50, rho = 0.1


def test_32_local_closed_forms() -> None:
    x, eye, alone = FULL.x0, np.eye(6), FULL.but(cohorts=[[2]])
    A, b = FULL.problem.A[2], FULL.problem.b[2]
    same(walk("fedavg", alone, quick=True).x[0], b + np.linalg.matrix_power(eye - 0.05 * A, K) @ (x - b))
    product = reduce(np.matmul, [eye - lr * A for lr in linear_rates(0.05, K, 0.1)])
    same(walk("fedswa(server_lr=1)", alone, quick=True).x[0], b + product @ (x - b))
    M = A + 0.4 * eye
    D = -(eye - np.linalg.matrix_power(eye - 0.05 * M, K)) @ np.linalg.solve(M, A @ (x - b))
    same(walk("fedprox(mu=0.4)", alone, quick=True).x[0], x + D)


def _server_and_mean(text: str, field: str) -> tuple[list[Any], list[Any]]:
    """States are uniform means although displacements are weighted by unequal numbers of samples."""
    walked = library(text, "uneven-partial", "samples")
    means = [
        torch.stack([state["drift"][field] for state in clients.values()]).mean(0).numpy() for clients in walked.clients
    ]
    return [state["drift"][field].numpy() for state in walked.server], means


@pytest.mark.parametrize(
    "text", ["scaffold", "scaffold(option=I)", "fedgamma", "fedlesam-s(rho=0.3)", "fedwmsam(rho=0.2,lam=0.3)"]
)
def test_42_the_servers_variate_is_the_mean_of_the_clients(text: str) -> None:
    same(*_server_and_mean(text, "c"))


@pytest.mark.parametrize(
    "text", ["feddyn(alpha=0.2)", "fedspeed(alpha=0.2)", "fedsmoo(alpha=0.2)", "fedlesam-d(rho=0.3)"]
)
def test_43_the_servers_dual_is_the_mean_of_the_clients(text: str) -> None:
    same(*_server_and_mean(text, "a"))


def test_43_feddyns_dual_is_the_gradient_after_exact_minimisation() -> None:
    exact = bed(rounds=4, size=2).but(eta=0.3, steps=120)
    walked = walk("feddyn(alpha=0.2,all_mean=true)", exact, quick=True)
    for cohort, clients in zip(exact.cohorts, walked.clients, strict=True):
        for i in cohort:
            state = clients[i]["drift"]
            same(-0.2 * state["a"], exact.problem.gradient(i, state["last"].numpy()))


RECORDED = [  # text, final rate, backward passes per step, of which the last is the gradient handed on
    ("scaffold", 1.0, 1),
    ("scaffold(server_lr=0.5)", 1.0, 1),
    ("fedmo", 1.0, 1),
    ("fedmoswa", 0.1, 1),
    ("fedgamma(rho=0.3)", 1.0, 2),
    ("fedcm(alpha=0.3)", 1.0, 1),
    ("fedcm(alpha=0.3)+linear(final_lr=0.2)+adam", 0.2, 1),
    ("fedwmsam(rho=0.2,lam=0.3)", 1.0, 1),
]


@FULL_OR_UNEVEN
@pytest.mark.parametrize(("text", "final_lr", "passes"), RECORDED, ids=[row[0] for row in RECORDED])
def test_44_45_variates_are_mean_local_gradients(text: str, final_lr: float, passes: int, setting: str) -> None:
    """c_i+ = sum_k eta_k g_k / H, and FedMoSWA's m+ = (1 - gamma) m + gamma mean c_i+."""
    weighting = (
        "samples" if setting.startswith("uneven") else "uniform"
    )  # variates and momenta are uniform means all the same
    chosen, walked = SETTINGS[setting], library(text, setting, weighting, record=True)
    gradients = iter([g for _, g in walked.gradients[passes - 1 :: passes]])
    zero = np.zeros(6)
    server: dict[str, Any] = {"momentum": zero, "c": zero, "m": zero, "alpha": 0.1}
    clients: dict[int, Any] = {i: {"c": zero} for i in range(5)}
    for t, cohort in enumerate(chosen.cohorts):
        gbar = {}
        for i in cohort:
            rates = linear_rates(_at(chosen.eta, t), _at(chosen.steps, i), final_lr)
            gbar[i] = sum(lr * next(gradients) for lr in rates) / sum(rates)
        now = {name: value.numpy() for name, value in walked.server[t]["drift"].items()}
        kept = {
            i: {name: value.numpy() for name, value in state["drift"].items()} for i, state in walked.clients[t].items()
        }
        mean = np.mean(list(gbar.values()), 0)
        if text.startswith("fedcm"):
            same(now["momentum"], 0.3 * mean + 0.7 * server["momentum"])
        for i in cohort if not text.startswith("fedcm") else []:
            expected = gbar[i]
            if text.startswith("fedwmsam"):
                a = server["alpha"]
                expected = (1 - a) * (clients[i]["c"] - server["c"]) + a * gbar[i] + (1 - a) * server["momentum"]
            same(kept[i]["c"], expected)
        if text.startswith("fedmo"):
            same(now["m"], 0.8 * server["m"] + 0.2 * mean)
        server, clients = now, kept
    assert next(gradients, None) is None


def _at(value: Any, index: int) -> Any:
    return value if np.isscalar(value) else value[index]


@pytest.mark.parametrize("signal", ["disagreement", "agreement"])
def test_51_fedwmsams_weight_stays_in_bounds(signal: str) -> None:
    lam = 0.5
    states = library(f"fedwmsam(alpha0=0.3,lam={lam},alpha_signal={signal})", "partial").server
    alpha = [0.3, *(float(state["drift"]["alpha"]) for state in states)]
    assert min(alpha) >= 0.1
    assert max(alpha) <= 0.9
    assert np.ptp(alpha) > 0.01
    assert max(abs(np.diff(alpha))) <= 0.8 * lam + 1e-12


def _alphas(text: str, setting: Setting) -> list[float]:
    return [float(state["drift"]["alpha"]) for state in walk(text, setting).server]


SLOPE = FULL.but(problem=Linear(np.zeros((1, 6, 6)), np.ones((1, 6))), cohorts=[[0]] * 6)
STILL = FULL.but(problem=Quadratics(FULL.problem.A[:1], FULL.x0[None]), cohorts=[[0]] * 6)


def test_51_fedwmsams_weight_at_a_constant_signal() -> None:
    decay = 0.98 ** np.arange(1, 7)
    for setting in (STILL, SLOPE):  # nobody moves; or all move along the momentum: a signal of 0, clipped to 0.1
        same(_alphas("fedwmsam(alpha0=0.5,lam=0.02)", setting), 0.1 + 0.4 * decay)
    rising = [0.98 * 0.5 + 0.02 * 0.1, *(0.9 - (0.9 - (0.98 * 0.5 + 0.02 * 0.1)) * decay[:5])]
    same(_alphas("fedwmsam(alpha0=0.5,lam=0.02,alpha_signal=agreement)", SLOPE), rising)  # 1, clipped to 0.9


def test_52_identical_directions_have_no_disagreement() -> None:
    walked = walk("fedwmsam", SLOPE)
    same([outcome.message_means["drift"]["signal"] for outcome in walked.outcomes], 0.0, atol=1e-12)
    agreement = walk("fedwmsam(alpha_signal=agreement)", SLOPE)
    same([outcome.message_means["drift"]["signal"] for outcome in agreement.outcomes], [0.0, *[1.0] * 5], atol=1e-12)
    opposed = golden().but(cohorts=[[0]] * 3, eta=1.5, steps=1)  # one overshooting step back and forth
    signals = [
        float(outcome.message_means["drift"]["signal"])
        for outcome in walk("fedwmsam(alpha0=1,rho=0)", opposed).outcomes
    ]
    assert signals[0] == 0.0
    assert max(signals) > 1.0


@FULL_OR_UNEVEN
@pytest.mark.parametrize("options", ["rho=0.4", "rho=0.4,perturb_sign=-1", "rho=3,alpha0=0.5,lam=0.3"])
def test_52_fedwmsam_starts_every_round_unperturbed(options: str, setting: str) -> None:
    chosen, walked = SETTINGS[setting], library(f"fedwmsam({options})", setting, record=True)
    points = [point for point, _ in walked.gradients]
    for z, cohort in zip([chosen.x0, *walked.x], chosen.cohorts, strict=False):
        for i in cohort:
            same(points[0], z, atol=0)
            if _at(chosen.steps, i) > 1:
                rho = float(options.split(",")[0].removeprefix("rho="))
                assert np.linalg.norm(points[1] - z) > 0.5 * rho
            points = points[_at(chosen.steps, i) :]
    assert not points
