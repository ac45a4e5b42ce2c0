"""Identities 101 to 136 of the specification that are not reductions of one text to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import Descent
from fedflat.algorithms.drift import Dc, Nova
from fedflat.algorithms.slot import LocalContext
from fedflat.algorithms.state import State
from fedflat.engines.gpu.engine import LaneEngine

from ..quadratics import Walk, problem_of, walk
from ..reference import Quadratics, Setting, bed, golden, unit
from ..reference.momenta import fednsam_of_2026
from ..reference.normalised import effective_steps, fednova, fednova_with_momentum
from .settings import DECAY, FULL, PARTIAL, SETTINGS, STEPS, differ, library, reference, same

ONE_BY_ONE = PARTIAL.but(cohorts=[[t % 5] for t in range(11)])


def test_103_106_fedgloss_in_its_first_round_and_with_one_client() -> None:
    without = library("fedgloss(server_rho=0)", "partial").x
    same(library("fedgloss(server_rho=0.7)", "partial").x[0], without[0])
    differ(library("fedgloss(server_rho=0.7)", "partial").x[1], without[1])
    alone, released = (walk(f"fedgloss(dual_divisor={by})", ONE_BY_ONE, quick=True).x for by in ("clients", "cohort"))
    same(alone, released)
    differ(library("fedgloss", "partial").x, library("fedgloss(variant=released)", "partial").x)


def test_104_fedgloss_is_feddyn_with_gradients_at_two_offsets() -> None:
    """Started at x instead of z: the first offset is that of the server, the second SAM's, taken there."""
    alpha, rho, server_rho, N = 0.3, 0.2, 0.4, PARTIAL.problem.N
    x, q, a = PARTIAL.x0, np.zeros(6), np.zeros((N, 6))
    for cohort, walked in zip(
        PARTIAL.cohorts, library("fedgloss(alpha=0.3,rho=0.2,server_rho=0.4)", "partial").x, strict=True
    ):
        e, ends = -server_rho * unit(q), []
        for i in cohort:
            y = x
            for _ in range(4):
                g = PARTIAL.problem.gradient(i, y + e + rho * unit(PARTIAL.problem.gradient(i, y + e)))
                y = y - 0.05 * (g + alpha * (y - x + a[i]))
            a[i] += y - x
            ends.append(y)
        q = np.mean(ends, 0) - x
        x = x + q + a.mean(0)
        same(walked, x)


def test_fedgloss_evaluates_the_mean_of_the_clients_models() -> None:
    walked = library("fedgloss(server_rho=0.4)", "partial")
    for outcome, models in zip(walked.outcomes, walked.evaluated, strict=True):
        same(models["active mean"], outcome.cohort_means.z + outcome.cohort_means.displacement)


def test_111_112_the_momentum_of_fednsam_is_the_last_step() -> None:
    walked = library("fednsam(rho=0.5)", "partial")
    same([state["drift"]["m"] for state in walked.server], np.diff([PARTIAL.x0, *walked.x], axis=0))
    differ(library("fednsam(rho=0)", "partial").x, library("fedavgm(beta=0.85)", "partial").x)


def test_fednsam_of_2026() -> None:
    """Golden iterates x^1, x^2, x^3, x^5, and agreement with the reference."""
    text = "fednsam(variant=released)"
    expected = [(0.596988125455, -0.217597110191), (-1.03249288914, 0.25675021037)]
    expected += [(0.266517801742, -0.185510539759), (0.0665869604692, -0.251027231284)]
    same(np.array(walk(text, golden()).x)[[0, 1, 2, 4]], expected, atol=1e-11)
    walked, trace = (
        library(text, "uneven-partial"),
        SETTINGS["uneven-partial"].run(fednsam_of_2026, gamma=0.85, rho=0.05),
    )
    same(walked.x, trace.x)
    same([state["drift"]["m"] for state in walked.server], [state["m"] for state in trace.server])


@pytest.mark.parametrize("setting", ["full", "partial"])
def test_114_115_ghbm_over_one_round(setting: str) -> None:
    """It is FedCM at another learning rate, and with single steps FedAvgM."""
    chosen, beta = SETTINGS[setting], 0.6
    cm = walk(f"fedcm(alpha={1 - beta})", chosen.but(eta=0.05 / (1 - beta)), quick=True).x
    same(library(f"ghbm(tau=1,beta={beta})", setting).x, cm)
    single = chosen.but(steps=1)
    same(walk("ghbm(tau=1)", single, quick=True).x, walk("fedavgm(beta=0.9)", single, quick=True).x)


def test_117_in_turns_localghbm_is_ghbm() -> None:
    local, central = (walk(text, ONE_BY_ONE, quick=True).x for text in ("localghbm(participation=0.2)", "ghbm(tau=5)"))
    same(local, central)
    differ(local, walk("fedavg", ONE_BY_ONE, quick=True).x)


def test_118_119_the_first_rounds_and_participations_are_those_of_fedavg() -> None:
    walked, fedavg = library("ghbm(tau=3)", "partial").x, reference("fedavg", "partial").x
    same(walked[:3], fedavg[:3])
    differ(walked[3], fedavg[3])
    once = FULL.but(cohorts=[[0], [3, 1], [2, 4], [0, 3]])
    fedavg = walk("fedavg", once, quick=True).x
    for text in ("localghbm", "fedhbm"):
        walked = walk(text, once, quick=True).x
        same(walked[:3], fedavg[:3])
        differ(walked[3], fedavg[3])
        differ(walk(f"{text}(first_anchor=initial)", once, quick=True).x[1], fedavg[1])


def test_ghbm_scales_its_momentum_by_the_first_learning_rate_of_a_round() -> None:
    """If the learning rate falls within a round, the steps together apply less than the whole momentum."""
    beta, eta, K, x, old = 0.9, 0.05, 4, PARTIAL.x0, PARTIAL.x0
    for cohort, walked in zip(PARTIAL.cohorts, library("ghbm(tau=1)+linear(final_lr=0.5)", "partial").x, strict=True):
        ends = []
        for i in cohort:
            y = x
            for k in range(K):
                d = PARTIAL.problem.gradient(i, y) + beta * (old - x) / (eta * K)
                y = y - eta * (1 - 0.5 * k / K) * d
            ends.append(y)
        old, x = x, np.mean(ends, 0)
        same(walked, x)


def test_momenta_of_server_models_ignore_personal_starts() -> None:
    """With full participation, a client's last received model is the server's last one, wherever the client starts."""
    texts = [
        ("localghbm(participation=1)", "ghbm(tau=1)"),
        ("fedlesam(rho=0.3)", "fedlesam(rho=0.3,direction=global)"),
    ]
    for by_client, by_server in texts:
        relaxed = library(f"{by_client}+relaxed(beta=0.5)", "full").x
        same(relaxed, library(f"{by_server}+relaxed(beta=0.5)", "full").x)
        differ(relaxed, library(by_client, "full").x)


def test_ghbm_counts_rounds_of_the_server_model() -> None:
    """Whatever the server's learning rate: the models that the server keeps are its own."""
    walked = library("ghbm(tau=3,server_lr=0.5)", "partial")
    models = [PARTIAL.x0, *walked.x]
    for t, state in enumerate(walked.server, start=1):
        kept = [state["drift"][name] for name in ("x1", "x2", "old")]
        same(kept, [models[max(0, t - age)] for age in (1, 2, 3)], atol=0)


@dataclass(frozen=True)
class WithoutVariates(Dc):
    """FedDC whose control variates stay zero."""

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        state, sent = super().finish(ctx)
        return {"a": state["a"]}, {"ds": 0 * sent["ds"]}


@dataclass(frozen=True)
class WithoutDuals(Dc):
    """FedDC without drift variables."""

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        state, sent = super().finish(ctx)
        return {"s": state["s"]}, sent

    def aggregate(self, means, server):  # type: ignore[no-untyped-def]
        _, state = super().aggregate(means, server)
        return means.z + means.displacement, {"s": state["s"]}


@pytest.mark.parametrize("setting", ["partial", "uneven-partial"])
def test_126_to_128_feddc_is_feddyn_and_scaffold(setting: str) -> None:
    chosen = SETTINGS[setting]
    dyn, scaffold = reference("feddyn", setting, alpha=0.3).x, reference("scaffold", setting).x
    same(walk(Algorithm(WithoutVariates(alpha=0.3)), chosen, quick=True).x, dyn)
    same(walk(Algorithm(WithoutDuals(alpha=1e-12)), chosen, quick=True).x, scaffold)
    feddc = library("feddc(alpha=0.3)", setting).x
    same(feddc[0], dyn[0])
    differ(feddc[1], dyn[1])


@pytest.mark.parametrize("setting", SETTINGS)
def test_129_the_servers_state_of_feddc_is_the_mean_of_the_clients(setting: str) -> None:
    walked = library("feddc(alpha=0.3)", setting)
    for server, clients in zip(walked.server, walked.clients, strict=True):
        for name in ("a", "s"):
            mean = np.mean([state["drift"][name].numpy() for state in clients.values()], 0)
            same(server["drift"][name], mean)


@pytest.mark.parametrize("setting", ["full", "partial"])
def test_131_132_with_equal_steps_fednova_is_fedavg(setting: str) -> None:
    chosen = SETTINGS[setting]
    same(library("fednova", setting).x, reference("fedavg", setting).x)
    for descent in (Descent(momentum=0.9), Descent(momentum=0.5, weight_decay=0.1, clip=2.0)):
        left, right = (walk(text, chosen, descent=descent, quick=True).x for text in ("fednova", "fedavg"))
        same(left, right)


MOMENTUM_GOLDEN = [(0.64, -0.425), (-2.054192, 0.59036265625), (-0.601579827655, -0.0994267351286)]
UNEQUAL: dict[str, tuple[dict[str, float], float, list[tuple[float, float]]]] = {
    # parameters, local momentum, and the golden x^1, x^2, x^3, x^5 for 2 and 4 local steps
    "sgd": ({}, 0.0, [(0.595, -0.2), (-0.6170405, 0.20808625), (-0.495741325269, 0.00654876293652),
                      (-0.386531227924, -0.21446140329)]),
    "momentum": ({}, 0.9, [*MOMENTUM_GOLDEN, (-0.314103060137, -0.374569407756)]),
    "prox": ({"mu": 0.5}, 0.0, [(0.594871794872, -0.198717948718), (-0.615960417493, 0.208917943361),
                                (-0.495333389528, 0.00796305570483), (-0.386611079852, -0.212784020466)]),
}  # fmt: skip
FEDNOVA = golden().but(steps=[2, 4])


def nova(parameters: dict[str, float], momentum: float, setting: Setting, **options: object) -> Walk:
    text = (
        "fednova(" + ",".join(f"{key}={value}" for key, value in parameters.items()) + ")" if parameters else "fednova"
    )
    return walk(text, setting, descent=Descent(momentum=momentum), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", UNEQUAL)
def test_golden_fednova(row: str) -> None:
    """On the loop and on lanes, and the reference."""
    parameters, momentum, expected = UNEQUAL[row]
    loop = nova(parameters, momentum, FEDNOVA)
    lanes = nova(parameters, momentum, FEDNOVA, engine=LaneEngine(problem_of(FEDNOVA), lanes=2))
    theirs = FEDNOVA.run(fednova_with_momentum, momentum=momentum, **parameters)
    for x in (loop.x, lanes.x, theirs.x):
        same(np.array(x)[[0, 1, 2, 4]], expected, atol=1e-11)


def test_golden_fednova_by_samples() -> None:
    expected = [(0.595, -0.2), (-0.6170405, 0.20808625), (-0.673599927345, 0.235942816389)]
    weighted = FEDNOVA.but(problem=Quadratics(FEDNOVA.problem.A, FEDNOVA.problem.b, [10, 30]))
    x = np.array(weighted.run(fednova).x)
    same(x[[0, 1, 2, 4]], [*expected, (-0.707143854507, 0.270492723041)], atol=1e-11)


def test_133_effective_steps() -> None:
    """In closed form; with momentum and a proximal term, which the local momentum includes, by the definition."""
    expected = {
        (0.0, 0.0): (2, 4),
        (0.9, 0.0): (2.9, 9.049),
        (0.0, 0.5): (1.95, 3.709875),
        (0.9, 0.5): (2.85, 8.374125),
    }
    for (momentum, mu), steps in expected.items():
        same([effective_steps(K, 0.1, momentum, mu) for K in (2, 4)], steps, atol=1e-12)
        setting = FEDNOVA.but(cohorts=[[0], [1]])
        sent = [
            outcome.message_means["drift"]["a"] for outcome in nova({"mu": mu}, momentum, setting, quick=True).outcomes
        ]
        same(sent, steps, atol=1e-12)


def test_effective_steps_follow_the_learning_rates_of_a_round() -> None:
    """A decay within the round counts, one between rounds does not, nor do weight decay and clipping."""
    descent = Descent(weight_decay=0.5, clip=0.1)
    linear = walk("fednova+linear(final_lr=0.5)", FEDNOVA, decay=DECAY, descent=descent, quick=True).outcomes
    expected = {0: 1 + 0.75, 1: 1 + 0.875 + 0.75 + 0.625}
    for cohort, outcome in zip(FEDNOVA.cohorts, linear, strict=True):
        same(outcome.message_means["drift"]["a"], np.mean([expected[i] for i in cohort]), atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_agrees_with_the_reference_with_local_momentum(momentum: float) -> None:
    setting = SETTINGS["uneven-partial"]
    trace = setting.run(fednova_with_momentum, momentum=momentum, mu=0.3)
    same(nova({"mu": 0.3}, momentum, setting, quick=True).x, trace.x)


def test_134_135_the_limit_of_fednova() -> None:
    three = bed().but(eta=0.2, steps=STEPS[:3], cohorts=[[0, 1, 2]] * 30)
    A, b = three.problem.A[:3], three.problem.b[:3]
    three = three.but(problem=Quadratics(A, b))

    def limit(lr: float) -> np.ndarray:
        eye = np.eye(6)
        Q = [(eye - np.linalg.matrix_power(eye - lr * A[i], K)) / K for i, K in enumerate(STEPS[:3])]
        return np.linalg.solve(np.sum(Q, 0), np.einsum("npq,nq->p", Q, b))

    same(walk("fednova", three, quick=True).x[-1], limit(0.2), atol=1e-5)
    same(limit(1e-7), three.problem.optimum(), atol=1e-5)
    differ(walk("fedavg", three, quick=True).x[-1], limit(0.2), by=0.1)


def test_136_two_clients_of_nine_and_seven_steps() -> None:
    setting = golden().but(steps=[9, 7], cohorts=[[0], [1], [0, 1]])
    first, second = (walk("fedavg", setting.but(cohorts=[[i]]), quick=True).x[0] - setting.x0 for i in (0, 1))
    together = walk("fednova", setting.but(cohorts=[[0, 1]]), quick=True).x[0]
    same(together, setting.x0 + 8 * (first / 9 + second / 7) / 2)


def test_a_client_that_claims_no_effective_steps_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nova, "finish", lambda _, ctx: ({}, {"a": torch.zeros_like(ctx.lr_sum)}))
    assert np.isfinite(walk("fednova", PARTIAL).x).all()


ZERO_LR = ["ghbm(tau=1)", "fednova", "fedadamw", "fedmuon", "scaffold", "fedcm", "fedmo(normaliser=trapezoid)", "feddc"]


@pytest.mark.parametrize("text", ZERO_LR)
def test_a_learning_rate_of_zero_leaves_the_model_finite(text: str) -> None:
    """The last round of a cycle down to 0 has this learning rate."""
    assert np.isfinite(walk(f"{text}+cyclic(low=0,length=2,start=0)", PARTIAL).x).all()
