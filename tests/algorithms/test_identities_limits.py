"""Identities 33 to 41 and 53 of the specification on the library: where methods end, and where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from ..quadratics import text_of, walk
from ..reference import Quadratics, bed, draw_cohorts, identities
from ..reference.identities import Limit
from .settings import end, same

_bed = bed()
LONG = _bed.but(problem=Quadratics(_bed.problem.A[2:], _bed.problem.b[2:]), eta=0.15, steps=3)
"""Three clients of the test bed with fewer and larger steps, to be there sooner."""
OPTIMUM = LONG.problem.optimum()
LIMIT = LONG.problem.fedavg_limit(0.15, 3)
REACHES_OPTIMUM = {limit.method: limit for limit in identities.REACHES_OPTIMUM if limit.method != "fedlesam_d"}
"""One limit per method, the last; the reference is held against all of them. FedLESAM-D is FedDyn (identity 12)."""


def test_33_fedavg_ends_beside_the_optimum() -> None:
    same(end("fedavg", LONG, 30), LIMIT)
    assert np.linalg.norm(LIMIT - OPTIMUM) > 0.05
    same(end("fedavg", LONG.but(steps=1), 90), OPTIMUM)
    equal = LONG.but(problem=Quadratics(np.tile(LONG.problem.A[:1], (3, 1, 1)), LONG.problem.b))
    same(end("fedavg", equal, 80), equal.problem.optimum())


@pytest.mark.parametrize(
    ("text", "rounds", "tolerance"),
    [
        ("fedavgm(beta=0.6)", 90, 1e-9),
        ("fedacg(beta=0)", 50, 1e-9),
        ("fedswa(final_lr=1,server_lr=1.5)", 20, 1e-9),
        ("fedadam(server_lr=0.05,tau=0.05,beta1=0.5)", 180, 1e-4),
    ],
)
def test_34_server_optimisers_keep_the_fixed_point(text: str, rounds: int, tolerance: float) -> None:
    same(end(text, LONG, rounds), LIMIT, atol=tolerance)


def test_35_fedcm_ends_where_fedavg_does_at_a_smaller_rate() -> None:
    same(end("fedcm(alpha=0.6)", LONG, 60), LONG.problem.fedavg_limit(0.6 * 0.15, 3), atol=1e-7)


@pytest.mark.parametrize("limit", REACHES_OPTIMUM.values(), ids=str)
def test_36_to_40_corrected_methods_reach_the_optimum(limit: Limit) -> None:
    """To 1e-4; FedAvg ends more than 0.05 away."""
    rounds = min(round(0.4 * limit.rounds), 150)
    same(end(text_of(limit.method, **limit.parameters), LONG, rounds, limit.size), OPTIMUM, atol=1e-4)


@pytest.mark.parametrize(("number", "text"), [(38, "fedmoswa"), (38, "fedmoswa(option=I,server_lr=1)"), (40, "mime")])
def test_38_40_others_hover_around_it_under_partial_participation(number: int, text: str) -> None:
    late = np.array(walk(text, LONG.but(cohorts=draw_cohorts(150, 3, 2)), quick=True).x[80:])
    distance = np.linalg.norm(late - OPTIMUM, axis=1)
    assert np.median(distance) > 0.1
    assert distance.max() < 20


def test_41_adabest_is_tied_to_its_start() -> None:
    """The limit is argmin f(x) + mu (1 - beta) / 2 ||x - x^0||^2."""
    tie, problem = 0.3 * (1 - 0.5), LONG.problem
    target = np.linalg.solve(
        problem.A.mean(0) + tie * np.eye(6), np.einsum("npq,nq->p", problem.A, problem.b) / 3 + tie * LONG.x0
    )
    same(end("adabest(mu=0.3,beta=0.5)", LONG, 180), target, atol=1e-7)


def test_53_equal_hessians_end_at_the_mean_of_the_minima() -> None:
    equal = LONG.but(problem=Quadratics(np.tile(LONG.problem.A[:1], (3, 1, 1)), LONG.problem.b))
    same(end("scaffold", equal, 90), equal.problem.b.mean(0))
