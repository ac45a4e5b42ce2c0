"""L, beta, sigma, sigma_g and the gap on quadratics, where each has a closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedflat.data import Augmentation, Dataset, Examples, Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Client, ModelState
from fedflat.experiment.analysis.observer import FixedSample
from fedflat.experiment.config import FlatnessSettings
from fedflat.flatness.theory import Constants, GradientSpread, heterogeneity

from ..quadratics import Bowl, Value

rng = np.random.default_rng(7)
CLIENTS, EACH, SIZE = 3, 8, 4
A = np.array([np.diag(rng.uniform(0.5, 3, SIZE)) for _ in range(CLIENTS)])
B = rng.normal(size=(CLIENTS, EACH, SIZE))
X = rng.normal(size=SIZE)


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
    assert found["1"] == pytest.approx(np.mean([0.5 * (X - b) @ A[1] @ (X - b) for b in B[1]]), rel=1e-6)


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
