"""The numpy reference against the golden iterates and the specification's identities (numbers in comments)."""

from functools import reduce
from typing import Any

import numpy as np
import pytest

from .reference import (
    GOLDEN,
    METHODS,
    Quadratics,
    Recording,
    Setting,
    Trace,
    bed,
    draw_cohorts,
    golden,
    identities,
    linear_rates,
)
from .reference.identities import Identity, Limit
from .reference.problem import Linear, Product
from .reference.trace import Vector

FULL, PARTIAL = bed(rounds=8), bed(rounds=12, size=2)
FULL_OR_PARTIAL = pytest.mark.parametrize("setting", [FULL, PARTIAL], ids=["full", "partial"])
ALL = pytest.mark.parametrize("name", METHODS)


def run(setting: Setting, name: str, **parameters: Any) -> Trace:
    return setting.run(METHODS[name], **parameters)


def uneven(setting: Setting) -> Setting:
    """The same with a rate that decays over the rounds and unequal numbers of local steps."""
    return setting.but(eta=np.linspace(0.06, 0.03, len(setting.cohorts)), steps=[7, 3, 5, 1, 4])


def same(left: Any, right: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=atol)


def end(setting: Setting, name: str, rounds: int, size: int | None = None, **parameters: Any) -> Vector:
    cohorts = draw_cohorts(rounds, setting.problem.N, size)
    return run(setting.but(cohorts=cohorts), name, **parameters).x[-1]


def recorded(setting: Setting, name: str, **parameters: Any) -> tuple[Trace, list[tuple[int, Vector, Vector]]]:
    problem = Recording(setting.problem)
    return run(setting.but(problem=problem), name, **parameters), problem.calls


@pytest.mark.parametrize("row", GOLDEN)
def test_golden_iterates(row: str) -> None:
    method, parameters, x = GOLDEN[row]
    same(run(golden(), method, **parameters).x, x, atol=6e-11)


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
    ):
        same(run(partition, name).x, run(weighted, name).x)


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


def test_equal_hessians_end_at_the_mean_of_the_minima() -> None:  # 53
    equal = FULL.but(problem=Quadratics(np.tile(FULL.problem.A[0], (5, 1, 1)), FULL.problem.b))
    for name, parameters in (("fedavg", {}), ("scaffold", {}), ("feddyn", {"alpha": 0.5})):
        same(end(equal, name, 400, **parameters), equal.problem.b.mean(0))


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
    s, scale = 3.0, identities.SCALES_WITH_LOSS.get(name, {})
    flat = uneven(PARTIAL)
    steep = flat.but(problem=Quadratics(s * flat.problem.A, flat.problem.b), eta=flat.eta / s)
    left, right = run(flat, name, **scale), run(steep, name, **{key: s * value for key, value in scale.items()})
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
