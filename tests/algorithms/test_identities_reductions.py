"""Identities 1 to 30 of the specification on the library: one method reduces to another, or to a classical one.

Where both sides are one object in the slot design, the right side is the numpy reference's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedflat.algorithms.server import Adam, Yogi

from ..quadratics import text_of, walk
from ..reference import METHODS, bed, identities
from ..reference.identities import Identity
from .settings import FULL, SETTINGS, by_samples, differ, library, named, reference, same

FULL_OR_UNEVEN = pytest.mark.parametrize("setting", ["full", "uneven-partial"])
WHOLE_OR_PART = pytest.mark.parametrize("setting", ["full", "partial"])
REDUCTIONS = [
    *identities.REDUCTIONS,
    Identity(2, "fedswa", {"final_lr": 1.0, "server_lr": 1.3}, "fedavgm", {"beta": 0.0, "server_lr": 1.3}),
    Identity(5, "fedavgm", {"beta": 0.0, "server_lr": 1.0}, "fedavg", {}),
]


@pytest.mark.parametrize("identity", REDUCTIONS, ids=str)
def test_an_algorithm_reduces_to_another(identity: Identity) -> None:
    """In the most general setting; full participation and equal steps are special cases of it."""
    (left, ours), (right, theirs) = identity.sides
    same(named(left, "uneven-partial", **ours).x, reference(right, "uneven-partial", **theirs).x)


@pytest.mark.parametrize("identity", identities.REDUCTIONS_IF_FULL, ids=str)
def test_reduction_under_full_participation_only(identity: Identity) -> None:
    (left, ours), (right, theirs) = identity.sides
    same(named(left, "full", **ours).x, reference(right, "full", **theirs).x)
    differ(named(left, "partial", **ours).x, named(right, "partial", **theirs).x)


BASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedavgm", {}),
    ("fedprox", {"mu": 0.3}),
    ("fedadam", {"tau": 0.1}),
    ("fedyogi", {"tau": 0.1}),
    ("fedadagrad", {"tau": 0.1}),
    ("scaffold", {}),
    ("scaffold", {"option": "I"}),
    ("feddyn", {"alpha": 0.3}),
    ("adabest", {"mu": 0.3, "beta": 0.5}),
    ("mime", {}),
    ("mime", {"beta": 0.9}),
    ("mimelite", {"beta": 0.9}),
    ("fedcm", {}),
    ("fedacg", {}),
    ("fedswa", {}),
    ("fedmo", {}),
    ("fedmoswa", {"option": "I"}),
]


PERTURBATIONS = ["asam(rho={})", "lesam(rho={})", "lesam(rho={},direction=global)", "sol(rho={})"]
PAIRS = [
    (base, perturbation)
    for number, base in enumerate(BASES)
    for perturbation in ("sam(rho={})", PERTURBATIONS[number % len(PERTURBATIONS)])
]
"""Every base with SAM and with one of the other perturbations."""


@pytest.mark.parametrize(("base", "perturbation"), PAIRS, ids=[f"{text_of(m, **p)}+{other}" for (m, p), other in PAIRS])
def test_03_without_a_radius_there_is_no_perturbation(base: tuple[str, dict[str, Any]], perturbation: str) -> None:
    """In the limit, where every line of the perturbation still runs."""
    method, parameters = base
    text, expected = text_of(method, **parameters), reference(method, "short", **parameters).x
    same(library(f"{text}+{perturbation.format(1e-10)}", "short").x, expected, atol=1e-7)


@pytest.mark.parametrize("perturbation", ["sam(rho={})", *PERTURBATIONS])
@pytest.mark.parametrize("method", ["fedavg", "mime"])  # MIME takes gradients at the offset itself
def test_03_a_radius_of_zero(method: str, perturbation: str) -> None:
    same(library(f"{method}+{perturbation.format(0)}", "short").x, reference(method, "short").x)


@pytest.mark.parametrize("rho", [0.0, 1e-10])
def test_03_smoo_and_guided(rho: float) -> None:
    same(
        library(f"feddyn(alpha=0.3)+smoo(rho={rho})", "partial").x,
        reference("feddyn", "partial", alpha=0.3).x,
        atol=1e-7,
    )
    expected = reference("fedwmsam", "partial", rho=0.0, lam=0.5).x
    same(library(f"fedwmsam(rho={rho},lam=0.5)", "partial").x, expected, atol=1e-7)
    same(library("fedavg+wmsam(lam=0.5)", "partial").x, expected)


@WHOLE_OR_PART
def test_08_fedcm_starts_as_fedavg_at_a_smaller_rate(setting: str) -> None:
    slow = SETTINGS[setting].but(eta=0.3 * 0.05)
    same(library("fedcm(alpha=0.3)", setting).x[0], slow.run(METHODS["fedavg"]).x[0])


def test_13_the_first_participation_is_unperturbed() -> None:
    once = FULL.but(cohorts=[[0], [3, 1], [2, 4]])
    for text, method, parameters in (
        ("fedlesam(rho=0.5)", "fedavg", {}),
        ("fedlesam-s(rho=0.5)", "scaffold", {}),
        ("fedlesam-d(rho=0.5,alpha=0.3)", "feddyn", {"alpha": 0.3}),
    ):
        same(walk(text, once, quick=True).x, once.run(METHODS[method], **parameters).x)
    again = once.but(cohorts=[[0], [3, 1], [0, 4]])
    differ(walk("fedlesam(rho=0.5)", again, quick=True).x[2], again.run(METHODS["fedavg"]).x[2])


@WHOLE_OR_PART
def test_17_the_first_round_is_uncorrected(setting: str) -> None:
    for text, method, parameters in (
        ("scaffold", "fedavg", {}), ("fedmoswa", "fedswa", {}), ("fedgamma(rho=0.1)", "fedsam", {"rho": 0.1}),
    ):  # fmt: skip
        walked, expected = library(text, setting).x, reference(method, setting, **parameters).x
        same(walked[0], expected[0])
        differ(walked[-1], expected[-1])


@FULL_OR_UNEVEN
def test_19_fedmoswa_with_frozen_zero_variates_is_fedswa(setting: str) -> None:
    frozen = walk("fedmoswa(gamma=0)", SETTINGS[setting], quick=True, forget=True)
    same(frozen.x, reference("fedswa", setting).x)
    same([state["drift"]["m"] for state in frozen.server], 0.0)
    differ(library("fedmoswa(gamma=0)", setting).x, frozen.x)


@WHOLE_OR_PART
def test_20_fedadagrad_with_a_large_tau_is_fedavg(setting: str) -> None:
    same(library("fedadagrad(server_lr=2e7,tau=1e7)", setting).x, reference("fedavg", setting).x, atol=1e-6)


def test_21_fedyogi() -> None:
    """v moves by (1 - beta2) q^2 in every round, up or down; at v = 2 q^2 the step is FedAdam's."""
    walked = library("fedyogi(v_init=0.3,beta2=0.9)", "partial")
    v = np.full(6, 0.3)
    for outcome, state in zip(walked.outcomes, walked.server, strict=True):
        squared, after = outcome.cohort_means.displacement.numpy() ** 2, state["server"]["v"].numpy()
        same(np.abs(after - v), 0.1 * squared)
        same(np.sign(after - v), np.sign(squared - v))
        v = after
    x, q = torch.zeros(3), torch.tensor([0.5, -2.0, 0.1])
    state = {"m": torch.ones(3), "v": 2 * q**2, "t": torch.zeros(())}
    (left, ours), (right, theirs) = (optimiser.step(x, q, state) for optimiser in (Yogi(), Adam()))
    same(left, right, atol=1e-7)
    same(ours["v"], theirs["v"], atol=1e-7)


@pytest.mark.parametrize("setting", ["uneven", "uneven-partial"])
def test_22_mimelite_with_sgd_is_fedavg_by_samples(setting: str) -> None:
    expected = by_samples(SETTINGS[setting]).run(METHODS["fedavg"]).x
    for text in ("mimelite", "mimelite(beta=0,form=ema)"):
        same(library(text, setting, "samples").x, expected)


ONE = bed(rounds=12).but(steps=1)


def _full_gradient(x: np.ndarray) -> np.ndarray:
    return np.mean([ONE.problem.gradient(i, x) for i in range(5)], 0)


@pytest.mark.parametrize("text", ["fedavg", "mime", "scaffold", "scaffold(option=I)"])
def test_23_27_single_steps_are_gradient_descent(text: str) -> None:
    x = ONE.x0
    for walked in walk(text, ONE, quick=True).x:
        x = x - ONE.eta * _full_gradient(x)
        same(walked, x)


@pytest.mark.parametrize("text", ["mimelite(beta=0.9)", "mime(beta=0.9)"])
def test_24_mime_with_momentum_and_single_steps_is_centralised_momentum(text: str) -> None:
    x, m = ONE.x0, np.zeros(6)
    for walked in walk(text, ONE, quick=True).x:
        G = _full_gradient(x)
        x, m = x - ONE.eta * (G + 0.9 * m), G + 0.9 * m
        same(walked, x)


@FULL_OR_UNEVEN
def test_25_adabest_without_client_terms_extrapolates_fedavg(setting: str) -> None:
    chosen = SETTINGS[setting]
    x = previous = chosen.x0
    for t, (cohort, walked) in enumerate(
        zip(chosen.cohorts, library("adabest(mu=0,beta=0.6)", setting).x, strict=True)
    ):
        lr = chosen.eta if np.isscalar(chosen.eta) else chosen.eta[t]
        a = chosen.but(x0=x, cohorts=[cohort], eta=lr).run(METHODS["fedavg"]).x[0]
        x, previous = a + 0.6 * (a - previous), a
        same(walked, x)


def test_26_single_steps_with_momentum_are_heavy_ball_and_nesterov() -> None:
    heavy, ahead, velocity = [ONE.x0, ONE.x0], ONE.x0, np.zeros(6)
    for ball, nesterov in zip(
        walk("fedavgm", ONE, quick=True).x, walk("fedacg(lam=0.9,beta=0)", ONE, quick=True).x, strict=True
    ):
        heavy.append(heavy[-1] - ONE.eta * _full_gradient(heavy[-1]) + 0.9 * (heavy[-1] - heavy[-2]))
        velocity = 0.9 * velocity - ONE.eta * _full_gradient(ahead + 0.9 * velocity)
        ahead = ahead + velocity
        same(ball, heavy[-1])
        same(nesterov, ahead)
