"""Trajectories of the numpy reference: golden iterates, reductions, closed forms, limits (numbers: the identities)."""

from functools import reduce

import numpy as np
import pytest

from .reference import (
    GOLDEN,
    GOLDEN_SOFTMAX,
    Quadratics,
    Setting,
    bed,
    draw_cohorts,
    golden,
    golden_softmax,
    identities,
    linear_rates,
)
from .reference.checks import FULL, FULL_OR_PARTIAL, PARTIAL, end, run, same, uneven
from .reference.identities import Identity, Limit
from .reference.trace import Vector


@pytest.mark.parametrize("row", GOLDEN)
def test_golden_iterates(row: str) -> None:
    expected = GOLDEN[row]
    assert expected.error(run(golden(), expected.method, **expected.parameters).x) < 6e-11


@FULL_OR_PARTIAL
@pytest.mark.parametrize("identity", identities.REDUCTIONS, ids=str)
def test_one_method_reduces_to_another(setting: Setting, identity: Identity) -> None:
    for each in (setting, uneven(setting)):
        left, right = (run(each, name, **parameters) for name, parameters in identity.sides)
        same(left.x, right.x)


@pytest.mark.parametrize("identity", identities.REDUCTIONS_IF_FULL, ids=str)
def test_some_methods_agree_under_full_participation_only(identity: Identity) -> None:
    for setting, agree in ((FULL, True), (PARTIAL, False)):
        left, right = (run(setting, name, **parameters) for name, parameters in identity.sides)
        assert np.allclose(left.x, right.x, rtol=0, atol=1e-9 if agree else 1e-3) == agree


@FULL_OR_PARTIAL
def test_first_round_and_first_participation_are_uncorrected(setting: Setting) -> None:
    first = run(setting, "fedavg").x[0]
    same(run(setting, "scaffold").x[0], first)  # 17
    same(run(setting, "fedgamma", rho=0.1).x[0], run(setting, "fedsam", rho=0.1).x[0])
    same(run(setting, "fedmoswa").x[0], run(setting, "fedswa").x[0])
    same(run(setting, "fedlesam", rho=0.5).x[0], first)
    same(run(setting, "fedcm", alpha=0.3).x[0], run(setting.but(eta=0.3 * setting.eta), "fedavg").x[0])  # 8
    once = setting.but(cohorts=[[0], [3, 1], [2, 4]])
    same(run(once, "fedlesam", rho=0.5).x, run(once, "fedavg").x)  # 13
    same(run(once, "fedmoswa", gamma=0.0).x, run(once, "fedswa").x)  # 19: nobody comes back, and m stays 0


@FULL_OR_PARTIAL
def test_feddyn_paper_form_is_the_displacement_form(setting: Setting) -> None:  # 16
    alpha, problem = 0.3, setting.problem
    x, a = setting.x0, np.zeros_like(problem.b)
    for cohort, expected in zip(setting.cohorts, run(setting, "feddyn", alpha=alpha).x, strict=True):
        ends = []
        for i in cohort:
            y = x
            for _ in range(setting.steps):
                y = y - setting.eta * (problem.gradient(i, y) + alpha * (y - x + a[i]))
            a[i] += y - x
            ends.append(y)
        x = np.mean(ends, 0) + a.mean(0)
        same(x, expected)


def test_server_optimisers() -> None:
    same(run(PARTIAL, "fedadagrad", server_lr=2e7, tau=1e7).x, run(PARTIAL, "fedavg").x, atol=1e-6)  # 20
    q = run(FULL, "fedavg").x[0] - FULL.x0
    trace = run(FULL, "fedyogi", v_init=2 * q**2, beta1=0.0)  # 21
    same(trace.x[0], run(FULL, "fedadam", v_init=2 * q**2, beta1=0.0).x[0])
    one = FULL.but(cohorts=FULL.cohorts[:1])
    same(abs(run(one, "fedyogi", v_init=0.3).server[0]["v"] - 0.3), 0.01 * q**2)
    same(
        run(one, "fedadam", v_init=0.0, bias_correction=True, server_lr=0.2, tau=0.1).x[0],
        FULL.x0 + 0.2 * q / (abs(q) + 0.1),
    )
    same(run(one, "fedadam", second_moment_of="momentum", v_init=0.0).server[0]["v"], 0.01 * (0.1 * q) ** 2)


def test_single_local_steps_are_classical_methods() -> None:
    one = bed(rounds=15).but(steps=1)
    problem, eta = one.problem, one.eta

    def G(x: Vector) -> Vector:
        return np.mean([problem.gradient(i, x) for i in range(problem.N)], 0)

    descent, heavy, nesterov, optax = [one.x0], [one.x0, one.x0], [one.x0], [one.x0]
    velocity, momentum = np.zeros_like(one.x0), np.zeros_like(one.x0)
    for _ in one.cohorts:
        descent.append(descent[-1] - eta * G(descent[-1]))
        heavy.append(heavy[-1] - eta * G(heavy[-1]) + 0.9 * (heavy[-1] - heavy[-2]))
        velocity = 0.9 * velocity - eta * G(nesterov[-1] + 0.9 * velocity)
        nesterov.append(nesterov[-1] + velocity)
        momentum = G(optax[-1]) + 0.9 * momentum
        optax.append(optax[-1] - eta * momentum)
    for name, parameters in (("fedavg", {}), ("mime", {}), ("scaffold", {"option": "I"}), ("scaffold", {})):  # 23, 27
        same(run(one, name, **parameters).x, descent[1:])
    same(run(one, "fedavgm", beta=0.9).x, heavy[2:])  # 26
    same(run(one, "fedacg", lam=0.9, beta=0.0).x, nesterov[1:])
    same(run(one, "mimelite", beta=0.9).x, optax[1:])  # 24
    same(run(one, "mime", beta=0.9).x, optax[1:])
    same(run(one, "mime", beta=0.9, form="ema").x, run(one.but(eta=0.1 * eta), "mime", beta=0.9).x)


@FULL_OR_PARTIAL
def test_adabest_without_client_terms_extrapolates_the_mean(setting: Setting) -> None:  # 25
    x = previous = setting.x0
    for cohort, expected in zip(setting.cohorts, run(setting, "adabest", mu=0.0, beta=0.6).x, strict=True):
        a = run(setting.but(x0=x, cohorts=[cohort]), "fedavg").x[0]
        x, previous = a + 0.6 * (a - previous), a
        same(x, expected)


def test_adabest_fades_the_client_term_by_the_rounds_missed() -> None:
    alone = FULL.but(cohorts=[[0], [1], [1], [0], [0]])
    trace = run(alone, "adabest", mu=0.3, beta=0.6)
    z, y = [FULL.x0, *trace.x], trace.evaluated["avg"]
    first = 0.3 * (z[0] - y[0])
    same(trace.clients[3][0]["h"], first / 3 + 0.3 * (z[3] - y[3]))
    same(trace.clients[4][0]["h"], first / 3 + 0.3 * (z[3] - y[3]) + 0.3 * (z[4] - y[4]))
    same(trace.evaluated["cloud"], trace.x)


def test_one_client_is_centralised_training() -> None:  # 29
    problem = Quadratics(FULL.problem.A[:1], FULL.problem.b[:1])
    x = FULL.x0
    for _ in range(4 * 7):
        x = x - 0.05 * problem.gradient(0, x)
    same(run(FULL.but(problem=problem, cohorts=[[0]] * 4), "fedavg").x[-1], x)


def test_rates_and_local_closed_forms() -> None:
    assert sum(linear_rates(1.0, 50, 0.1)) == pytest.approx(27.95, abs=1e-12)  # 31
    assert sum(linear_rates(0.3, 7, 0.4)) == pytest.approx(0.3 * (7 - 0.6 * 6 / 2), abs=1e-12)
    problem, x, eye = FULL.problem, FULL.x0, np.eye(6)
    alone = FULL.but(cohorts=[[2]])
    A, b = problem.A[2], problem.b[2]
    same(run(alone, "fedavg").x[0], b + np.linalg.matrix_power(eye - 0.05 * A, 7) @ (x - b))  # 32
    product = reduce(np.matmul, [eye - lr * A for lr in linear_rates(0.05, 7, 0.1)])
    same(run(alone, "fedswa", server_lr=1.0).x[0], b + product @ (x - b))
    M = A + 0.4 * eye
    D = -(eye - np.linalg.matrix_power(eye - 0.05 * M, 7)) @ np.linalg.solve(M, A @ (x - b))
    same(run(alone, "fedprox", mu=0.4).x[0], x + D)


def test_server_optimisers_keep_fedavgs_fixed_point() -> None:
    target = FULL.problem.fedavg_limit(0.05, 7)
    assert np.linalg.norm(target - FULL.problem.optimum()) > 0.05  # 33
    same(FULL.problem.fedavg_limit(0.05, 1), FULL.problem.optimum())
    same(end(FULL, "fedavg", 150), target)
    same(end(FULL, "fedavgm", 600, beta=0.9), target)  # 34
    same(end(FULL, "fedacg", 600, lam=0.85, beta=0.0), target)
    same(end(FULL, "fedswa", 150, final_lr=1.0, server_lr=1.5), target)
    same(end(FULL, "fedadam", 900, server_lr=0.01, tau=0.01), target, atol=1e-4)
    same(end(FULL, "fedcm", 400, alpha=0.1), FULL.problem.fedavg_limit(0.005, 7), atol=1e-7)  # 35


@pytest.mark.parametrize("limit", identities.REACHES_OPTIMUM, ids=str)
def test_corrected_methods_reach_the_optimum(limit: Limit) -> None:
    x = end(FULL, limit.method, limit.rounds, limit.size, **limit.parameters)
    same(x, FULL.problem.optimum(), atol=1e-6)


@pytest.mark.parametrize("name", ["fedmoswa", "mime", "fedavg"])
def test_others_hover_around_it_under_partial_participation(name: str) -> None:  # 38, 40
    late = np.array(run(FULL.but(cohorts=draw_cohorts(300, 5, 2)), name).x[100:])
    distance = np.linalg.norm(late - FULL.problem.optimum(), axis=1)
    assert np.median(distance) > 0.1 and distance.max() < 20


def test_fedspeed_with_active_duals_leaves_the_optimum_that_feddyn_finds() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        x = end(FULL, "fedspeed", 500, 2, rho=0.0, dual_scope="active", alpha=0.5)
    assert not np.linalg.norm(x - FULL.problem.optimum()) < 0.1


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_adabest_is_tied_to_its_start(beta: float) -> None:  # 41
    tie, problem = 0.3 * (1 - beta), FULL.problem
    target = np.linalg.solve(
        problem.A.mean(0) + tie * np.eye(6), np.einsum("npq,nq->p", problem.A, problem.b) / 5 + tie * FULL.x0
    )
    same(end(FULL, "adabest", 350, mu=0.3, beta=beta), target, atol=1e-7)


def test_equal_hessians_end_at_the_mean_of_the_minima() -> None:  # 53
    equal = FULL.but(problem=Quadratics(np.tile(FULL.problem.A[0], (5, 1, 1)), FULL.problem.b))
    for name, parameters in (("fedavg", {}), ("scaffold", {}), ("feddyn", {"alpha": 0.5})):
        same(end(equal, name, 400, **parameters), equal.problem.b.mean(0))


@pytest.mark.parametrize("row", GOLDEN_SOFTMAX)
def test_golden_iterates_of_softmax_regression(row: str) -> None:
    method, parameters, eta, first, third = GOLDEN_SOFTMAX[row]
    x = run(golden_softmax().but(eta=eta), method, **parameters).x
    same([x[0], x[2]], [first, third], atol=1e-11)
