"""Theorem 5.1: golden numbers, the tightened bound, and the recursion from which the theorem follows.

Its constants L, beta, sigma and sigma_g are tested on quadratics, where each has a closed form.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import Augmentation, Dataset, Examples, Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Client, ModelState
from fedflat.errors import UserError
from fedflat.experiment.analysis.observer import FixedSample
from fedflat.experiment.analysis.theory import conditions, round_learning_rates, theory
from fedflat.experiment.config import FlatnessSettings, parse_config
from fedflat.flatness.theory import (
    ALGORITHMS,
    Constants,
    FederationSize,
    GeneralisationBound,
    GradientSpread,
    RoundLearningRates,
    heterogeneity,
    largest_constants,
    largest_lr,
    run_bound,
    theorem_bound,
)

from ..quadratics import Bowl, Value

CONSTANTS = Constants(lipschitz=2.0, smoothness=4.0, noise=0.5, heterogeneity=1.5)
SETTING = FederationSize(clients=10, examples=50, steps=3, rounds=20)

constants = st.builds(Constants, *[st.floats(1e-2, 1e3)] * 4)
sizes = st.builds(FederationSize, st.integers(1, 1000), st.floats(1, 1e4), st.integers(1, 200), st.integers(1, 100))

rng = np.random.default_rng(7)
CLIENTS, EACH, SIZE = 3, 8, 4
A = np.array([np.diag(rng.uniform(0.5, 3, SIZE)) for _ in range(CLIENTS)])
B = rng.normal(size=(CLIENTS, EACH, SIZE))
X = rng.normal(size=SIZE)


def test_the_printed_bounds_by_hand() -> None:
    c = 1 + (2 + 1 / 60) ** 2 / 20
    front = 2 * 2 / (10 * 50 * 4) * math.exp(1 + 1 / 20)
    assert theorem_bound("fedswa", CONSTANTS, SETTING).value == pytest.approx(front * c * (2 + 1.5 + 0.5))
    assert theorem_bound("fedmoswa", CONSTANTS, SETTING).value == pytest.approx(front * (c * (2 + 0.5) + 1.5))
    assert theorem_bound("fedsam", CONSTANTS, SETTING).value == theorem_bound("fedswa", CONSTANTS, SETTING).value
    assert 10 ** theorem_bound("fedswa", CONSTANTS, SETTING).factor == pytest.approx(c)


def test_strongly_convex_by_hand() -> None:
    mu = 0.5
    b = 1 + (mu / ((4 + mu) * 3)) ** 2 / 20
    front = 2 * 2 / (10 * 50 * 4) * math.exp(1 - mu / ((4 + mu) * 20))
    convex = replace(CONSTANTS, convexity=mu)
    assert theorem_bound("fedswa", convex, SETTING).value == pytest.approx(front * b * 4)
    assert theorem_bound("fedmoswa", convex, SETTING).value == pytest.approx(front * (b * 2.5 + 1.5))


@settings(max_examples=50)
@given(constants, sizes)
def test_bounds_are_ordered_and_the_tight_one_is_smaller(some, setting) -> None:
    printed = {name: theorem_bound(name, some, setting).log10 for name in ALGORITHMS}
    tight = {name: theorem_bound(name, some, setting, tight=True) for name in ALGORITHMS}
    assert printed["fedmoswa"] <= printed["fedswa"] + 1e-9
    for name in ALGORITHMS:
        assert tight[name].log10 <= printed[name] + 1e-9
        # (1 + 1/(K T))^(K-1) <= e^(1/T): the sharpened factor can never explode.
        assert 10 ** tight[name].factor <= 1 + math.exp(1 / setting.rounds) / setting.rounds + 1e-9


@settings(max_examples=50)
@given(constants, sizes)
def test_at_the_theorems_own_rates_the_recursion_stays_below_the_theorem(some, setting) -> None:
    """Putting 1/(beta K T) into eq. 31 gives at most what is printed: sum_t e^(..) h_t <= e / beta, up to the printed
    e^(1/T).
    """
    lr = largest_lr(some, setting)
    rounds = [RoundLearningRates(lr * setting.steps, lr)] * setting.rounds
    for name in ALGORITHMS:
        for tight in (False, True):
            assert (
                run_bound(name, some, setting, rounds, tight).log10
                <= theorem_bound(name, some, setting, tight).log10 + 1e-6
            )


def test_the_recursion_step_by_step() -> None:
    """d <- e^(beta h) (d + (2 / m n) c h G), which is eq. 30, by hand over rounds whose rates fall."""
    rounds = [RoundLearningRates(0.3, 0.15), RoundLearningRates(0.2, 0.1), RoundLearningRates(0.1, 0.05)]
    m_n, beta = 500, 4.0
    distance = 0.0
    for h, highest in rounds:
        c = 1 + (2 + beta * highest) ** 2 * beta * h
        distance = math.exp(beta * h) * (distance + 2 / m_n * c * h * 4)
    assert run_bound("fedswa", CONSTANTS, SETTING, rounds).value == pytest.approx(2.0 * distance)


def test_a_rate_that_falls_within_a_round_lowers_the_bound() -> None:
    fedsam, fedswa = (
        round_learning_rates(parse_config({"algorithm": name, "training": {"rounds": 20}}), 10)
        for name in ("fedsam", "fedswa")
    )
    assert fedsam[0] == pytest.approx((1.0, 0.1))
    assert fedswa[0] == pytest.approx((0.1 * (10 - 0.9 * 4.5), 0.1))
    assert run_bound("fedswa", CONSTANTS, SETTING, fedswa).log10 < run_bound("fedsam", CONSTANTS, SETTING, fedsam).log10


def test_rates_follow_the_decay_over_rounds_and_the_cycle() -> None:
    decayed = round_learning_rates(
        parse_config({"algorithm": "fedavg", "training": {"rounds": 3, "lr": 0.4, "lr_decay": 0.5}}), 4
    )
    assert [rates.highest for rates in decayed] == pytest.approx([0.4, 0.2, 0.1])
    assert [rates.total for rates in decayed] == pytest.approx([1.6, 0.8, 0.4])
    cyclic = round_learning_rates(
        parse_config({"algorithm": "fedavg+cyclic(low=0,length=2,start=0)", "training": {"rounds": 2, "lr": 0.4}}), 1
    )
    assert [rates.total for rates in cyclic] == pytest.approx([0.2, 0.0])


def test_rounds_without_a_rate_change_nothing() -> None:
    rates = [RoundLearningRates(0.2, 0.1), RoundLearningRates(0.1, 0.05)]
    with_still_ones = [RoundLearningRates(0.0, 0.0), rates[0], RoundLearningRates(0.0, 0.0), rates[1]]
    assert run_bound("fedswa", CONSTANTS, SETTING, with_still_ones) == run_bound("fedswa", CONSTANTS, SETTING, rates)
    assert run_bound("fedswa", CONSTANTS, SETTING, [RoundLearningRates(0.0, 0.0)]).value == 0


def test_another_algorithm_has_its_own_rates_in_the_same_run() -> None:
    made = parse_config({"algorithm": "fedswa(final_lr=0.5)+wima", "training": {"rounds": 1}})
    assert round_learning_rates(made, 10, "fedswa") == round_learning_rates(made, 10)
    assert (
        round_learning_rates(made, 10, "fedmoswa")[0].total
        < round_learning_rates(made, 10, "fedswa")[0].total
        < round_learning_rates(made, 10, "fedsam")[0].total
    )


def test_bounds_too_large_for_a_float_are_reported_as_logarithms() -> None:
    many = theorem_bound("fedsam", CONSTANTS, FederationSize(10, 50, 5000, 10))
    assert many.value == math.inf
    assert many.log10 == pytest.approx(4999 * math.log10(2), rel=0.01)
    assert many.is_vacuous(math.log(10))
    assert not GeneralisationBound(-2.0, 0.0).is_vacuous(math.log(10))
    assert GeneralisationBound(0.0, 0.0).is_vacuous(1.0), "as much as guessing is no more than guessing"


def test_conditions_of_the_theorem_are_checked_against_a_run() -> None:
    made = parse_config({"algorithm": "fedmoswa", "federation": {"clients_per_round": 5}, "data": {"clients": 10}})
    found = {text: met for text, met, _ in conditions(made, CONSTANTS, SETTING, [RoundLearningRates(0.3, 0.1)])}
    assert found == {
        "one of FedSAM, FedSWA, FedMoSWA": True,
        "every client in every round": False,
        "local learning rate at most 1/(beta K T)": False,
        "server_lr = 1": False,
        "option I of the control variates": False,
    }


def test_the_largest_constants_are_used() -> None:
    other = Constants(1.0, 9.0, 0.7, 0.1)
    assert largest_constants([CONSTANTS, other]) == Constants(2.0, 9.0, 0.7, 1.5)
    with pytest.raises(ValueError, match="no constants"):
        largest_constants([])


def test_the_theory_of_a_run_reports_its_inputs(digits_split) -> None:
    made = parse_config({"algorithm": "fedswa", "training": {"local_epochs": 2, "rounds": 7}})
    found = theory(made, digits_split, math.log(10), [CONSTANTS]).document()
    sizes = [len(indices) for indices in digits_split.clients]
    assert found["setting"] == {
        "clients": 50,
        "examples": pytest.approx(sum(sizes) / 50),
        "steps": pytest.approx(sum(2 * -(-size // 10) for size in sizes) / 50),
        "rounds": 7,
    }
    assert found["trivial"] == pytest.approx(math.log(10))
    assert found["at_own_rates"]["fedsam"]["vacuous"] and found["tightened"]["fedswa"]["void"]


def test_bounds_are_void_if_the_run_violates_a_condition(digits_split) -> None:
    """The bound at the run's own learning rates does not depend on the condition on learning rates."""
    federation, training = {"clients_per_round": 50}, {"local_steps": 1, "rounds": 1, "lr": 1.0}
    for lr, voids in ((1.0, (True, False)), (1e-3, (False, False))):
        made = parse_config({"algorithm": "fedsam", "federation": federation, "training": training | {"lr": lr}})
        found = theory(made, digits_split, math.log(10), [CONSTANTS]).document()
        assert tuple(found[kind]["fedsam"]["void"] for kind in ("tightened", "at_own_rates")) == voids
    made = parse_config({"algorithm": "fedsam", "training": training})  # 10 of 50 clients per round
    assert theory(made, digits_split, math.log(10), [CONSTANTS]).document()["at_own_rates"]["fedsam"]["void"]


@pytest.fixture
def digits_split():
    from fedflat.experiment.setup.problem import build_problem

    return build_problem(parse_config({}))[1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theorem_bound("fedavg", CONSTANTS, SETTING), "fedavg"),
        (lambda: theorem_bound("fedswa", replace(CONSTANTS, lipschitz=0.0), SETTING), "L=0"),
        (lambda: FederationSize(0, 1, 1, 1), "at least one client"),
    ],
)
def test_invalid_input_raises_a_clear_error(call, words) -> None:
    with pytest.raises(UserError, match=words):
        call()


@pytest.fixture
def look() -> FixedSample:
    """Client i's examples are (A_i, b_ij): grad l(x; z_ij) = A_i (x - b_ij)."""
    rows = np.array([np.concatenate([A[i].ravel(), B[i, j]]) for i in range(CLIENTS) for j in range(EACH)])
    test = np.concatenate([rows[:1, : SIZE**2], np.zeros((1, SIZE))], 1)
    train, held = (Examples(torch.tensor(some), torch.zeros(len(some), dtype=torch.int64)) for some in (rows, test))
    data = Dataset("quadratics", train, held, ("value",), kind="vector")
    problem = Problem(Bowl(X), Value(), data, Augmentation(), torch.float64, evaluation_sets={"test": held})
    partition = Partition(
        tuple(np.arange(i * EACH, (i + 1) * EACH) for i in range(CLIENTS)), np.zeros(0, np.int64), "by hand", 0
    )
    return FixedSample(problem, partition, FlatnessSettings())


def gradients() -> np.ndarray:
    """[client, example, P]."""
    return np.einsum("ipq,ijq->ijp", A, X - B)


def test_constants_in_closed_form(look: FixedSample) -> None:
    found, apart = look.constants(ModelState(*look.problem.initial_state()))
    single, whole = gradients(), gradients().mean(1)
    centre = whole.mean(0)
    sigma = np.sqrt(((single - whole[:, None]) ** 2).sum(2).mean(1)).max()
    assert found.lipschitz == pytest.approx(np.linalg.norm(single, axis=2).max())
    assert found.smoothness == pytest.approx(np.linalg.eigvalsh(A.mean(0)).max(), rel=1e-6)
    assert found.noise == pytest.approx(sigma)
    assert found.heterogeneity == pytest.approx(np.linalg.norm(whole - centre, axis=1).mean())
    assert apart["diversity"] == pytest.approx((whole**2).sum(1).mean() / (centre**2).sum())
    assert apart["norm_of_mean"] == pytest.approx(np.linalg.norm(centre))
    assert found.known().keys() == {"lipschitz", "smoothness", "noise", "heterogeneity"}


def test_noise_shrinks_with_the_batch_as_one_over_its_size(look: FixedSample) -> None:
    """The mean over all batches of two of ||g_B - grad F_i||^2, drawn with replacement, is sigma_i^2 / 2."""
    single = torch.tensor(gradients()[0])
    one, two = GradientSpread(single.mean(0)), GradientSpread(single.mean(0))
    for gradient in single:
        one.add(gradient)
    for first in single:
        for second in single:
            two.add((first + second) / 2)
    assert two.noise**2 == pytest.approx(one.noise**2 / 2)
    assert one.largest_norm == pytest.approx(float(single.norm(dim=1).max()))


def test_the_gap_in_closed_form(look: FixedSample) -> None:
    found = look.gap(ModelState(*look.problem.initial_state()))
    train = np.mean([0.5 * (X - B[i, j]) @ A[i] @ (X - B[i, j]) for i in range(CLIENTS) for j in range(EACH)])
    test = 0.5 * X @ A[0] @ X
    assert found == {
        "train_loss": pytest.approx(train),
        "test_loss": pytest.approx(test),
        "gap": pytest.approx(test - train),
    }


def test_sharpness_along_the_gradient_in_closed_form(look: FixedSample) -> None:
    """f(x + r) - f(x) = g r + r A r / 2 with r = 0.05 g / ||g||."""
    g = gradients().mean((0, 1))
    r = 0.05 * g / np.linalg.norm(g)
    assert look.sharpness(ModelState(*look.problem.initial_state())) == pytest.approx(g @ r + 0.5 * r @ A.mean(0) @ r)


def test_local_curvature_is_that_of_each_clients_own_loss(look: FixedSample) -> None:
    model = ModelState(*look.problem.initial_state())
    members = [Client(i, look.partition.clients[i], {}) for i in (0, 2)]
    elsewhere = model._replace(weights=model.weights + 1)
    found = look.local_curvature([model, elsewhere], members)
    assert found["lambda_max"] == {"0": pytest.approx(A[0].max(), rel=1e-6), "2": pytest.approx(A[2].max(), rel=1e-6)}
    assert found["loss"]["2"] == pytest.approx(np.mean([0.5 * (X + 1 - b) @ A[2] @ (X + 1 - b) for b in B[2]]))


def test_the_norm_of_features(look: FixedSample) -> None:
    found = look.features(ModelState(*look.problem.initial_state()))
    outputs = [np.concatenate([X - b, A[1] @ (X - b)]) for b in B[1]]
    assert found["1"] == pytest.approx(np.mean([np.linalg.norm(output) for output in outputs]), rel=1e-6)


def test_the_sample_depends_only_on_the_seed(look: FixedSample) -> None:
    some = [
        FixedSample(look.problem, look.partition, FlatnessSettings(examples=5, clients=2, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert some[0].positions.tolist() == some[1].positions.tolist() != some[2].positions.tolist()
    assert some[0].clients == some[1].clients
    assert len(some[0].positions) == 5
    assert len(some[0].clients) == 2


def test_clients_that_agree_are_not_heterogeneous() -> None:
    assert heterogeneity(torch.ones(4, 3)) == 0
    assert Constants(1, 2, 3, 4, 0.5).known()["convexity"] == 0.5
