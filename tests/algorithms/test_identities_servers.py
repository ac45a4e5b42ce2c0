"""Identities 121 to 157 of the specification's second part: server steps, starts and client weights."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedflat.algorithms import algorithm
from fedflat.algorithms.server import Extrapolation
from fedflat.algorithms.weights import Aligned, ClientRows, Disco
from fedflat.algorithms.weights.awa import logit_gradient
from fedflat.data import Examples
from fedflat.engines.round.client_facts import label_scalars, pilot_gradients
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import ClientRound, Cost
from fedflat.engines.round.plan import Plan
from fedflat.testing import cohort_means

from ..quadratics import problem_of, walk
from ..reference import METHODS, Golden, Quadratics, Setting, bed, golden
from .settings import FULL, PARTIAL, SETTINGS, by_samples, differ, library, reference, same

GOLDEN_LRS = {
    "one": (1, 1, 6.24565517941, 4.45743972404, 18.0857656523),
    "cohort": (1, 1, 5.86351500594, 5.20164188664, 10.7603971707),
}


@pytest.mark.parametrize("scale", GOLDEN_LRS)
def test_golden_learning_rates_of_fedexp(scale: str) -> None:
    walked = walk(f"fedexp(eps_scale={scale})", golden(), quick=True)
    before = [golden().x0, *walked.x[:-1]]
    for x, z, outcome, lr in zip(walked.x, before, walked.outcomes, GOLDEN_LRS[scale], strict=True):
        same(x - z, lr * outcome.cohort_means.displacement.numpy(), atol=1e-10)


def test_121_fedexp_with_one_client_is_fedavg() -> None:
    alone = FULL.but(cohorts=[[0], [3], [0], [2]])
    same(walk("fedexp(eps=0)", alone, quick=True).x, alone.run(METHODS["fedavg"]).x)


def lr_of(displacements: np.ndarray, **parameters: float) -> float:
    """FedExP's learning rate for displacements [clients, P] with equal weights."""
    fedexp, rows = Extrapolation(**parameters), torch.from_numpy(displacements)
    square = torch.stack([fedexp.measure(row)["square"] for row in rows]).mean()
    means = cohort_means(torch.zeros(rows.shape[1]), rows.mean(0), mean={"square": square})
    return float(fedexp.aggregate(means, torch.ones(rows.shape[1], dtype=rows.dtype), {})[0][0])


def test_122_to_125_learning_rates_of_fedexp() -> None:
    random = np.random.default_rng(0).normal(size=(4, 6))
    assert lr_of(np.tile(random[:1], (3, 1)), eps=0.0) == 1
    for size in (2, 3, 6):
        assert lr_of(0.3 * np.eye(6)[:size], eps=0.0) == pytest.approx(max(1, size / 2))
    assert lr_of(random, eps=0.0) == pytest.approx(lr_of(100 * random, eps=0.0))
    assert lr_of(random, eps=0.1) < lr_of(random, eps=0.0)
    assert lr_of(np.zeros((2, 6)), eps=0.0) == 1, "no displacement: the smallest learning rate, not NaN"
    assert lr_of(np.eye(6), eps=0.0, server_lr=4.0) == 4


@pytest.mark.parametrize(("text", "method"), [("fedavg", "fedavg"), ("feddyn(alpha=0.3)", "feddyn")])
def test_137_fedinit_without_beta_and_in_the_first_round_is_its_base(text: str, method: str) -> None:
    expected = reference(method, "partial", **({"alpha": 0.3} if method == "feddyn" else {})).x
    for form in ("displacement", "average"):
        same(library(f"{text}+relaxed(beta=0,server={form})", "partial").x, expected)
        walked = library(f"{text}+relaxed(beta=0.5,server={form})", "partial").x
        same(walked[0], expected[0])
        differ(walked[-1], expected[-1])


def test_139_a_first_participation_starts_beyond_the_initial_model() -> None:
    setting = FULL.but(cohorts=[[0], [3]])
    walked = walk("fedinit(beta=0.5)", setting, quick=True, record=True)
    first_points = [point for point, _ in walked.gradients[:: setting.steps]]
    same(first_points, [setting.x0, walked.x[0] + 0.5 * (walked.x[0] - setting.x0)])


def test_golden_iterates_of_fedinit_on_feddyn() -> None:
    x = walk("feddyn(alpha=0.1)+relaxed(beta=0.1,server=average)", golden(), quick=True).x
    same(x[1:3], [(-0.5561559625, -0.3500664375), (-0.882720619465, -0.460842310069)])
    same(x[4], (-0.750542806946, -0.533880053907))


def test_fedinit_starts_from_its_own_model() -> None:
    """The full-batch gradient and the proximal centre are those of z_i, but LESAM keeps the model it received, z."""
    setting, beta = FULL.but(cohorts=[[2], [0], [2]]), 0.4
    for text in ("scaffold(option=I)", "fedprox(mu=0.5)", "fedlesam(rho=0)"):
        walked = walk(f"{text}+relaxed(beta={beta})", setting, quick=True)
        x, last = walked.x[1], walked.clients[1][2]["start"]["last"].numpy()
        start = y = x + beta * (x - last)
        differ(start, x)
        if text.startswith("scaffold"):
            same(walked.clients[2][2]["drift"]["c"], setting.problem.gradient(2, start))
        elif text.startswith("fedprox"):
            for _ in range(setting.steps):
                y = y - setting.eta * (setting.problem.gradient(2, y) + 0.5 * (y - start))
            same(walked.x[2], x + y - start)
        else:
            same(walked.clients[2][2]["perturbation"]["last"], x)


def weighted_golden() -> Setting:
    """The golden problem with 10 and 30 samples, of which (6, 4) and (9, 21) belong to two classes."""
    setting = golden()
    return setting.but(problem=Quadratics(setting.problem.A, setting.problem.b, [10, 30], [[6, 4], [9, 21]]))


# fmt: off
GOLDEN_WEIGHTS: dict[str, tuple[list[tuple[float, float]], tuple[float, float]]] = {
    # x^1, x^2, x^3, x^5, and the weights of the third round
    "feddisco(a=0.5,b=0.1)": (
        [(0.595, -0.2), (-0.21845, 0.0145), (-0.39047623458, 0.00715571315557), (-0.557541857658, -0.00357545464639)],
        (0.359571026352, 0.640428973648)),
    "feddisco(metric=l2)": (
        [(0.595, -0.2), (-0.21845, 0.0145), (-0.438900211338, 0.0501009482661), (-0.641144715847, 0.104013037736)],
        (0.282719281923, 0.717280718077)),
    "fedscam(rho=0.05,beta=0.8)": (
        [(0.595558481101, -0.204958354912), (-0.221254387083, 0.0101855913264),
         (-0.630079438472, 0.197437816929), (-0.925490303893, 0.52958301751)],
        (0.0158169853756, 0.984183014624)),
    "fedscam(pilot=gradient)": (
        [(0.595558481101, -0.204958354912), (-0.224553008302, 0.0103579356128),
         (-0.0515776930343, -0.306354464705), (-0.292133579693, -0.374627033421)],
        (0.901120634291, 0.0988793657092)),
    "fedawa(weights_lr=0.05)": (
        [(0.595, -0.2), (-0.21845, 0.0145), (-0.379153634753, -0.00288583535358), (-0.570298933227, 0.00758523282159)],
        (0.377540668798, 0.622459331202)),
    "fedawa(server_steps=5,weights_lr=0.05,weights_from=after)": (
        [(0.595, -0.2), (-0.21845, 0.0145), (-0.448022779269, 0.0581913788926), (-0.757712456738, 0.253241368789)],
        (0.268241221546, 0.731758778454)),
}
# fmt: on


@pytest.mark.parametrize("text", GOLDEN_WEIGHTS)
def test_golden_iterates_and_weights(text: str) -> None:
    expected, weights = GOLDEN_WEIGHTS[text]
    walked = walk(text, weighted_golden(), weighting="samples", quick=True)
    assert Golden(text, {}, expected).error(walked.x) < 1e-10
    setting = weighted_golden()
    walked = walk(text, setting.but(cohorts=setting.cohorts[:3]), weighting="samples", quick=True)
    rows = walked.outcomes[2].rows  # valid until the engine's next round
    assert rows is not None
    same(np.array(weights) @ rows.displacements.numpy(), walked.x[2] - walked.x[1], atol=1e-10)


def disco_weights(labels: list[list[float]], n: list[float], **parameters: Any) -> Tensor:
    disco, p = Disco(**parameters), torch.tensor(n, dtype=torch.float64)
    divergence = [disco.measure(torch.tensor(counts, dtype=torch.float64))["divergence"] for counts in labels]
    rows = ClientRows(
        torch.arange(len(n)), p / p.sum(), 1.0, p, p[:, None], {"weights.divergence": torch.stack(divergence)}
    )
    return disco.choose(rows, {})[0]


def test_151_and_152_feddisco() -> None:
    expected = bed_by_samples().run(METHODS["fedavg"]).x
    same(library("feddisco(a=0,b=0)", "uneven-partial", "samples").x, expected)
    same(
        library("feddisco(a=0,b=1e12)", "uneven-partial", "samples").x,
        reference("fedavg", "uneven-partial").x,
        atol=1e-8,
    )
    labels = [[3.0, 1.0], [6.0, 2.0], [9.0, 3.0]]
    same(disco_weights(labels, [4, 8, 12], a=0.6, b=0.2), [1 / 6, 1 / 3, 1 / 2])
    same(disco_weights([[8.0, 2.0], [9.0, 21.0]], [10, 30]), [0, 1], atol=1e-12)  # the first client is cut off
    same(disco_weights([[8.0, 0.0], [0.0, 24.0]], [8, 24], a=9.0, b=0.0), [1 / 4, 3 / 4])  # all cut off: p_i
    for metric in ("kl", "l2"):
        same(disco_weights([[4.0, 4.0], [8.0, 8.0]], [8, 16], b=0.0, metric=metric), [1 / 3, 2 / 3])
        weights = disco_weights([[9.0, 1.0, 0.0], [3.0, 4.0, 3.0], [0.0, 0.0, 5.0]], [10, 10, 5], metric=metric)
        assert weights.min() >= 0 and float(weights.sum()) == pytest.approx(1)
        assert weights[1] == weights.max(), "the client with the most uniform labels has the largest weight"


def bed_by_samples() -> Setting:
    return by_samples(SETTINGS["uneven-partial"])


def test_153_to_155_fedscam() -> None:
    setting = bed_by_samples()
    for parameters, method, theirs in (
        ("rho=0,gamma=0,beta=0", "fedavg", {}),
        ("rho=0.3,alpha=0,gamma=0,beta=0", "fedsam", {"rho": 0.3}),
    ):
        walked = library(f"fedscam({parameters})", "uneven-partial", "samples")
        same(walked.x, setting.run(METHODS[method], **theirs).x)
    step, gradient = (library(f"fedscam(pilot={pilot})", "partial") for pilot in ("step", "gradient"))
    same(step.x[0], gradient.x[0])
    differ(step.x[1], gradient.x[1])


def test_fedscam_takes_its_pilot_where_the_client_starts() -> None:
    """With as many batches as a client has samples, the pilot gradient is that of all its data at z_i."""
    setting = SETTINGS["uneven-partial"]
    walked = walk("fedscam(batches=9,kappa=0)+relaxed(beta=0.5)", setting, weighting="samples", quick=True)
    x, norms = setting.x0, []
    last = np.tile(setting.x0, (5, 1))
    for t, cohort in enumerate(setting.cohorts):
        norms = [np.linalg.norm(setting.problem.gradient(i, x + 0.5 * (x - last[i]))) for i in cohort]
        same(walked.outcomes[t].message_means["perturbation"]["h"], np.mean(norms))
        x = walked.x[t]
        for i in cohort:
            last[i] = walked.clients[t][i]["start"]["last"]


def test_pilot_gradients_of_several_batches() -> None:
    """h is the mean of norms, and the direction that of the mean gradient; a small client has fewer batches."""
    quadratics = Setting(
        Quadratics(np.stack([np.eye(2), np.eye(2)]), np.array([[3.0, 0.0], [0.0, 4.0]])), np.zeros(2), 0.1, 1
    )
    problem = problem_of(quadratics)  # two samples, one of each client
    for batch_size, norm, batches in ((1, 3.5, 2), (2, 2.5, 1), (5, 2.5, 1)):
        training: Any = SimpleNamespace(
            plan=Plan(batch_size=batch_size), algorithm=algorithm("fedscam(batches=2)"), seed=0
        )
        buffers = CohortBuffers.new(training.algorithm, 2, 0, 1, torch.zeros(2, dtype=torch.float64))
        pilot, cost = pilot_gradients(problem, training, buffers, 0, ClientRound(0, 0, np.arange(2)))
        assert pilot is not None and cost == Cost(backward_passes=batches, samples=2)
        same(pilot.gradient, [-1.5, -2.0])
        same(pilot.norm, norm)


def test_pilot_batches_are_drawn_anew_for_each_client_and_round() -> None:
    """As a function of seed, round and client; a last batch that is not full is dropped."""
    quadratics = Setting(Quadratics(np.stack([np.eye(1)] * 40), 2.0 ** np.arange(40)[:, None]), np.zeros(1), 0.1, 1)
    problem = problem_of(quadratics)

    def drawn(seed: int = 0, round: int = 0, client: int = 0, examples: int = 40, batches: int = 3) -> tuple[Any, ...]:
        """The sum of the batches' gradients, whose binary digits are the examples, and the sizes of the batches."""
        training: Any = SimpleNamespace(
            plan=Plan(batch_size=2), algorithm=algorithm(f"fedscam(batches={batches})"), seed=seed
        )
        buffers = CohortBuffers.new(training.algorithm, 1, 0, 1, torch.zeros(1, dtype=torch.float64))
        client_round = ClientRound(round, client, np.arange(examples))
        pilot, cost = pilot_gradients(problem, training, buffers, 0, client_round)
        assert pilot is not None
        return float(pilot.gradient) * cost.samples, cost

    assert drawn() == drawn()
    assert len({drawn()[0], drawn(seed=1)[0], drawn(round=1)[0], drawn(client=1)[0]}) == 4
    assert drawn(examples=5)[1] == Cost(backward_passes=2, samples=4)
    assert drawn(examples=1)[1] == Cost(backward_passes=1, samples=1)
    total, cost = drawn(examples=7, batches=9)
    assert cost == Cost(backward_passes=3, samples=6) and f"{-round(total):b}".count("1") == 6


def test_labels_are_read_from_the_device_once() -> None:
    problem = problem_of(bed(rounds=1, size=2))
    training: Any = SimpleNamespace(algorithm=algorithm("feddisco"))
    first = label_scalars(problem, training, np.arange(2))
    other = Examples(problem.data.train.inputs, torch.arange(len(problem.data.train)) % 2)
    problem.data = dataclasses.replace(problem.data, train=other)
    assert label_scalars(dataclasses.replace(problem), training, np.arange(2)) != first
    assert label_scalars(problem, training, np.arange(2)) == first
    assert first["divergence"].dtype == problem.dtype


def test_156_gradient_of_fedawa() -> None:
    random = torch.Generator().manual_seed(0)
    logits, turn = (torch.randn(4, dtype=torch.float64, generator=random) for _ in range(2))
    displacements = torch.randn(4, 6, dtype=torch.float64, generator=random)

    def loss(logits: Tensor) -> Tensor:
        q = logits.softmax(0)
        return q @ ((displacements - q @ displacements).norm(dim=1) + turn)

    expected = torch.autograd.functional.jacobian(loss, logits)
    same(logit_gradient(logits, displacements, turn), expected, atol=1e-12)
    same(logit_gradient(logits, displacements[:1].expand(4, 6), torch.zeros(4)), 0.0)  # no spread: no NaN


def test_157_fedawa_begins_as_fedavg_and_keeps_logits_by_client() -> None:
    walked = library("fedawa(weights_lr=0.3)", "partial")
    same(walked.x[0], reference("fedavg", "partial").x[0])
    differ(walked.x[-1], reference("fedavg", "partial").x[-1])
    seen: set[int] = set()
    for cohort, state in zip(PARTIAL.cohorts, walked.server, strict=True):
        seen |= set(cohort)
        moved = state["weights"]["moved"]
        assert moved.shape == (5,) and all(moved[i] == 0 for i in range(5) if i not in seen)
    assert (moved != 0).any()


def test_no_client_can_claim_the_weights_of_others() -> None:
    """Values that no client computes are clipped to their range."""
    nothing = torch.zeros(2, 1, dtype=torch.float64)
    claimed = {"perturbation.h": [-1.0, 0.0], "perturbation.c": [1e9, 1.0], "weights.divergence": [-1e9, 0.0]}
    sent = {name: torch.tensor(values, dtype=torch.float64) for name, values in claimed.items()}
    rows = ClientRows(torch.tensor([0, 1]), torch.full((2,), 0.5, dtype=torch.float64), 1.0, nothing[0], nothing, sent)
    for weights in (Aligned(), Disco(metric="kl"), Disco(metric="l2")):
        same(weights.choose(rows, {})[0], [0.5, 0.5])
