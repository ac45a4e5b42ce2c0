"""Invariants of the numpy reference: states, perturbations and symmetries (numbers of identities in comments)."""

from typing import Any

import numpy as np
import pytest

from .reference import (
    Quadratics,
    Setting,
    Trace,
    bed,
    identities,
    linear_rates,
)
from .reference.checks import ALL, FULL, FULL_OR_PARTIAL, PARTIAL, recorded, run, same, uneven
from .reference.problem import Linear, Product
from .reference.trace import Vector


@ALL
def test_order_of_clients_and_scale_of_sample_counts_do_not_matter(name: str) -> None:  # 30
    expected = run(PARTIAL, name).x
    same(run(PARTIAL.but(cohorts=[cohort[::-1] for cohort in PARTIAL.cohorts]), name).x, expected, atol=1e-10)
    same(
        run(PARTIAL.but(problem=Quadratics(PARTIAL.problem.A, PARTIAL.problem.b, [3] * 5)), name).x,
        expected,
        atol=1e-10,
    )


def test_sample_counts_weigh_displacements() -> None:
    A, b = FULL.problem.A, FULL.problem.b
    partition = FULL.but(problem=Quadratics(A[[0, 0, 1]], b[[0, 0, 1]]), cohorts=[[0, 1, 2]] * 5)
    weighted = FULL.but(problem=Quadratics(A[:2], b[:2], [2, 1]), cohorts=[[0, 1]] * 5)
    for name in (
        "fedavg",
        "fedavgm",
        "fedprox",
        "fedadam",
        "fedyogi",
        "fedadagrad",
        "mime",
        "mimelite",
        "fedsam",
        "fedasam",
        "fednova",
    ):
        same(run(partition, name).x, run(weighted, name).x)


@FULL_OR_PARTIAL
def test_server_state_is_the_mean_of_the_clients(setting: Setting) -> None:
    def pairs(trace: Trace, server: str, client: str) -> list[tuple[Vector, Vector]]:
        means = [np.mean([state[client] for state in clients.values()], 0) for clients in trace.clients]
        return [(state[server], mean) for state, mean in zip(trace.server, means, strict=True)]

    setting = uneven(setting)
    for name in ("scaffold", "fedgamma", "fedlesam_s", "fedwmsam"):  # 42
        same(*zip(*pairs(run(setting, name), "c", "c"), strict=True))
    same(*zip(*pairs(run(setting, "scaffold", option="I"), "c", "c"), strict=True))
    same(*zip(*pairs(run(setting, "feddyn", alpha=0.2), "h", "ghat"), strict=True))  # 43
    for name in ("fedsmoo", "fedlesam_d"):
        same(*zip(*pairs(run(setting, name), "a", "a"), strict=True))


def test_feddyn_dual_is_the_gradient_after_exact_minimisation() -> None:  # 43
    exact = bed(rounds=6, size=2).but(steps=600)
    trace = run(exact, "feddyn", alpha=0.2)
    for cohort, clients in zip(exact.cohorts, trace.clients, strict=True):
        for i in cohort:
            same(clients[i]["ghat"], exact.problem.gradient(i, clients[i]["y"]))
    same(trace.evaluated["all_mean"][-1], np.mean([state["y"] for state in trace.clients[-1].values()], 0))
    same(trace.evaluated["active_mean"][-1], np.mean([trace.clients[-1][i]["y"] for i in exact.cohorts[-1]], 0))


@FULL_OR_PARTIAL
def test_variates_are_mean_local_gradients(setting: Setting) -> None:  # 44, 45
    setting = uneven(setting)
    runs = [
        ("scaffold", {}, 1.0, 1),
        ("fedmo", {}, 1.0, 1),
        ("fedmoswa", {}, 0.1, 1),
        ("fedgamma", {"rho": 0.3}, 1.0, 2),
        ("fedcm", {"alpha": 0.3}, 1.0, 1),
        ("fedwmsam", {"rho": 0.2, "lam": 0.3}, 1.0, 1),
    ]
    for name, parameters, final_lr, passes in runs:
        trace, calls = recorded(setting, name, **parameters)
        gradients = iter([g for _, _, g in calls[passes - 1 :: passes]])
        zero = np.zeros(6)
        server, clients = {"Dlt": zero, "c": zero, "m": zero, "alpha": 0.1}, {i: {"c": zero} for i in range(5)}
        for t, cohort in enumerate(setting.cohorts):
            gbar = {}
            for i in cohort:
                rates = np.array(linear_rates(setting.eta[t], setting.steps[i], final_lr))
                gbar[i] = sum(lr * next(gradients) for lr in rates) / rates.sum()
            for i in cohort if name != "fedcm" else []:
                expected = gbar[i]
                if name == "fedwmsam":
                    a = server["alpha"]
                    expected = (1 - a) * (clients[i]["c"] - server["c"]) + a * gbar[i] + (1 - a) * server["Dlt"]
                same(trace.clients[t][i]["c"], expected)
            mean = np.mean(list(gbar.values()), 0)
            if name == "fedcm":
                same(trace.server[t]["Dlt"], 0.3 * mean + 0.7 * server["Dlt"])
            if name in ("fedmo", "fedmoswa"):
                same(trace.server[t]["m"], 0.8 * server["m"] + 0.2 * mean)
            server, clients = trace.server[t], trace.clients[t]


def test_released_fedmoswa() -> None:
    trace = run(PARTIAL, "fedmoswa", gamma=0.1, gamma_first_round=1.0)
    same(trace.server[0]["m"], np.mean([trace.clients[0][i]["c"] for i in PARTIAL.cohorts[0]], 0))
    ratio = sum(linear_rates(0.05, 7, 0.1)) / (7 * 0.05 * 1.1 / 2)
    once = PARTIAL.but(cohorts=PARTIAL.cohorts[:1])
    i = PARTIAL.cohorts[0][0]
    same(run(once, "fedmoswa", normaliser="trapezoid").clients[0][i]["c"], ratio * trace.clients[0][i]["c"])


def perturbations(setting: Setting, name: str, **parameters: Any) -> list[tuple[Vector, Vector, Vector]]:
    """(y, g, e) of every two-pass step."""
    _, calls = recorded(setting, name, **parameters)
    return [(y, g, moved - y) for (_, y, g), (_, moved, _) in zip(calls[::2], calls[1::2], strict=True)]


def test_asam() -> None:  # 49
    mask = np.array([True, True, False, True, False, False])
    for y, _, e in perturbations(PARTIAL, "fedasam", rho=0.3, weight_mask=mask):
        assert np.linalg.norm(e / np.where(mask, abs(y) + 0.2, 1.0)) == pytest.approx(0.3)
    same(run(PARTIAL, "fedasam", weight_mask=~mask & False, rho=0.3).x, run(PARTIAL, "fedsam", rho=0.3).x)
    same(run(PARTIAL, "fedasam", rho=0.3 / 1e8, asam_eta=1e8).x, run(PARTIAL, "fedsam", rho=0.3).x, atol=1e-6)
    same(run(PARTIAL, "fedasam", scope="all").x, run(PARTIAL, "fedasam", asam_eta=0.0).x)
    C, w = np.array([4.0, 0.25]), np.array([0.7, -1.2])
    product = Setting(Product(np.zeros((1, 2, 2)), np.zeros((1, 2))), w, 0.05, 1, [[0]])
    (_, _, e), (_, _, scaled) = (perturbations(product.but(x0=x), "fedasam", asam_eta=0.0)[0] for x in (w, C * w))
    same(scaled, C * e)
    ones = PARTIAL.but(x0=np.array([1.0, -1, 1, 1, -1, 1]), steps=1, cohorts=[[0, 1]])
    same(run(ones, "fedasam", asam_eta=0.0, rho=0.3).x, run(ones, "fedsam", rho=0.3).x)


def test_sam() -> None:  # 50
    problem = FULL.problem
    alone = FULL.but(cohorts=[[3]] * 4)
    for y, g, e in perturbations(alone, "fedsam", rho=0.3):
        assert np.linalg.norm(e) == pytest.approx(0.3)
        same(problem.gradient(3, y + e), g + 0.3 * problem.A[3] @ g / np.linalg.norm(g))
    still = alone.but(x0=problem.b[3])
    for name in ("fedsam", "fedasam", "mofedsam", "fedgamma", "fedspeed", "fedlesam", "fedwmsam"):
        same(run(still, name).x, [problem.b[3]] * 4)


def test_fedwmsam_weight() -> None:
    for signal in ("disagreement", "agreement"):
        alpha = [
            0.3,
            *(state["alpha"] for state in run(PARTIAL, "fedwmsam", alpha0=0.3, lam=0.5, signal=signal).server),
        ]
        assert min(alpha) >= 0.1 and max(alpha) <= 0.9 and np.ptp(alpha) > 0.01  # 51
        assert max(abs(np.diff(alpha))) <= 0.8 * 0.5 + 1e-12
    decay = 0.98 ** np.arange(1, 9)
    still = FULL.but(problem=Quadratics(FULL.problem.A, np.tile(FULL.x0, (5, 1))))
    same([state["alpha"] for state in run(still, "fedwmsam", alpha0=0.5, lam=0.02).server], 0.1 + 0.4 * decay)
    slope = FULL.but(problem=Linear(np.zeros((1, 6, 6)), np.ones((1, 6))), cohorts=[[0]] * 8)
    trace = run(slope, "fedwmsam", alpha0=0.5, lam=0.02)
    same([state["signal"] for state in trace.server], [0.0] * 8)  # 52
    same([state["alpha"] for state in trace.server], 0.1 + 0.4 * decay)
    same([state["signal"] for state in run(slope, "fedwmsam", signal="agreement").server[1:]], [1.0] * 7)


@FULL_OR_PARTIAL
def test_fedwmsam_starts_every_round_unperturbed(setting: Setting) -> None:  # 52
    trace, calls = recorded(setting, "fedwmsam", rho=0.4)
    points = [call[1] for call in calls]
    for z, cohort in zip([setting.x0, *trace.x], setting.cohorts, strict=False):
        for _ in cohort:
            same(points[0], z)
            points = points[setting.steps :]
    opposite = run(setting, "fedwmsam", rho=0.4, sign=-1.0).x[-1]
    assert np.linalg.norm(opposite - trace.x[-1]) > 1e-3


@ALL
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


@ALL
def test_scaling_the_loss_against_the_rate(name: str) -> None:  # 55
    s, scaled = 3.0, identities.scaled
    flat = uneven(PARTIAL)
    steep = flat.but(problem=Quadratics(s * flat.problem.A, flat.problem.b), eta=flat.eta / s)
    left, right = run(flat, name, **scaled(name, 1.0)), run(steep, name, **scaled(name, s))
    assert np.allclose(left.x, right.x, rtol=0, atol=1e-8) == (name not in identities.UNITS_MIXED)
    if name == "fedwmsam":
        same(run(flat, name, rho=0.0).x, run(steep, name, rho=0.0).x)


@ALL
def test_client_states_are_isolated(name: str) -> None:  # 56
    some = PARTIAL.but(cohorts=[[0, 1], [1, 2], [0, 2], [1, 3]])
    swapped = [1, 0, 2, 3, 4]
    other = some.but(
        problem=Quadratics(some.problem.A[swapped], some.problem.b[swapped]),
        cohorts=[[swapped[i] for i in c] for c in some.cohorts],
    )
    left, right = run(some, name), run(other, name)
    same(left.x, right.x)
    for i, state in left.clients[-1].items():
        for key, value in state.items():
            same(value, right.clients[-1][swapped[i]][key])
            if i == 4 and key != "y":
                same(value, 0.0)
