"""The numpy reference: golden iterates, limits and symmetries (numbers in comments: the specification's identities).

The other identities are tested on the library in ``tests/algorithms``, which also holds it against the reference.
"""

from typing import Any

import numpy as np
import pytest

from .reference import (
    GOLDEN,
    GOLDEN_SOFTMAX,
    METHODS,
    Quadratics,
    Setting,
    Trace,
    bed,
    draw_cohorts,
    golden,
    golden_softmax,
    identities,
    linear_rates,
)
from .reference.identities import Limit
from .reference.trace import Vector

FULL, PARTIAL = bed(rounds=8), bed(rounds=12, size=2)


def run(setting: Setting, name: str, **parameters: Any) -> Trace:
    return setting.run(METHODS[name], **parameters)


def same(left: Any, right: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=atol)


def end(setting: Setting, name: str, rounds: int, size: int | None = None, **parameters: Any) -> Vector:
    cohorts = draw_cohorts(rounds, setting.problem.N, size)
    return run(setting.but(cohorts=cohorts), name, **parameters).x[-1]


@pytest.mark.parametrize("row", GOLDEN)
def test_golden_iterates(row: str) -> None:
    expected = GOLDEN[row]
    assert expected.error(run(golden(), expected.method, **expected.parameters).x) < 6e-11


@pytest.mark.parametrize("row", GOLDEN_SOFTMAX)
def test_golden_iterates_of_softmax_regression(row: str) -> None:
    method, parameters, eta, first, third = GOLDEN_SOFTMAX[row]
    x = run(golden_softmax().but(eta=eta), method, **parameters).x
    same([x[0], x[2]], [first, third], atol=1e-11)


def test_moments_of_server_optimisers() -> None:
    q = run(FULL, "fedavg").x[0] - FULL.x0
    one = FULL.but(cohorts=FULL.cohorts[:1])
    corrected = run(one, "fedadam", v_init=0.0, bias_correction=True, server_lr=0.2, tau=0.1)
    same(corrected.x[0], FULL.x0 + 0.2 * q / (abs(q) + 0.1))
    same(run(one, "fedadam", second_moment_of="momentum", v_init=0.0).server[0]["v"], 0.01 * (0.1 * q) ** 2)


def test_adabest_fades_the_client_term_by_the_rounds_missed() -> None:
    alone = FULL.but(cohorts=[[0], [1], [1], [0], [0]])
    trace = run(alone, "adabest", mu=0.3, beta=0.6)
    z, y = [FULL.x0, *trace.x], trace.evaluated["avg"]
    first = 0.3 * (z[0] - y[0])
    same(trace.clients[3][0]["h"], first / 3 + 0.3 * (z[3] - y[3]))
    same(trace.clients[4][0]["h"], first / 3 + 0.3 * (z[3] - y[3]) + 0.3 * (z[4] - y[4]))
    same(trace.evaluated["cloud"], trace.x)


def test_released_fedmoswa() -> None:
    trace = run(PARTIAL, "fedmoswa", gamma=0.1, gamma_first_round=1.0)
    same(trace.server[0]["m"], np.mean([trace.clients[0][i]["c"] for i in PARTIAL.cohorts[0]], 0))
    ratio = sum(linear_rates(0.05, 7, 0.1)) / (7 * 0.05 * 1.1 / 2)
    once = PARTIAL.but(cohorts=PARTIAL.cohorts[:1])
    i = PARTIAL.cohorts[0][0]
    same(run(once, "fedmoswa", normaliser="trapezoid").clients[0][i]["c"], ratio * trace.clients[0][i]["c"])


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


@pytest.mark.parametrize("name", METHODS)
def test_equivariance(name: str) -> None:  # 54
    problem, expected = PARTIAL.problem, np.array(run(PARTIAL, name).x)
    shift = np.arange(6.0) - 2.0
    moved = PARTIAL.but(problem=Quadratics(problem.A, problem.b + shift), x0=PARTIAL.x0 + shift)
    Q, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))
    turned = PARTIAL.but(problem=Quadratics(Q @ problem.A @ Q.T, problem.b @ Q.T), x0=Q @ PARTIAL.x0)
    shifts = np.allclose(run(moved, name).x, expected + shift, rtol=0, atol=1e-8)
    turns = np.allclose(run(turned, name).x, expected @ Q.T, rtol=0, atol=1e-8)
    assert shifts == (name not in identities.NOT_TRANSLATED)
    assert turns == (name not in identities.NOT_ROTATED)


@pytest.mark.parametrize("name", METHODS)
def test_scaling_the_loss_against_the_rate(name: str) -> None:  # 55
    s, scaled = 3.0, identities.scaled
    flat = PARTIAL.but(eta=np.linspace(0.06, 0.03, len(PARTIAL.cohorts)), steps=[7, 3, 5, 1, 4])
    steep = flat.but(problem=Quadratics(s * flat.problem.A, flat.problem.b), eta=flat.eta / s)
    left, right = run(flat, name, **scaled(name, 1.0)), run(steep, name, **scaled(name, s))
    assert np.allclose(left.x, right.x, rtol=0, atol=1e-8) == (name not in identities.UNITS_MIXED)
    if name == "fedwmsam":
        same(run(flat, name, rho=0.0).x, run(steep, name, rho=0.0).x)
