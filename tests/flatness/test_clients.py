"""Drift and disagreement on quadratics, where both have a closed form; forgetting by hand and as properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedflat.algorithms import algorithm
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Client, ModelState, Training
from fedflat.engines.round.plan import Plan
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import measure_cohort
from fedflat.experiment.analysis.replay import each_local_model
from fedflat.flatness.clients import disagreement, forgetting, update_drift

from ..quadratics import problem_of, walk
from ..reference.problem import Quadratics, Setting

RATE, STEPS = 0.1, 4
A = np.array([np.diag([1.0, 2.0, 3.0]), np.diag([2.0, 1.0, 0.5]), np.diag([0.5, 0.5, 4.0])])
B = np.array([[1.0, 0.0, 2.0], [-1.0, 2.0, 0.0], [3.0, -1.0, 1.0]])
X0 = np.array([0.5, -0.5, 1.0])

accuracies = arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(1, 4)), elements=st.floats(0, 1))


def moves(x: np.ndarray) -> np.ndarray:
    """D_i = ((I - eta A_i)^K - I) (x - b_i), the displacement by K steps of gradient descent."""
    eye = np.eye(3)
    return np.array(
        [(np.linalg.matrix_power(eye - RATE * a, STEPS) - eye) @ (x - b) for a, b in zip(A, B, strict=True)]
    )


def trained(text: str = "fedavg", engine=LoopEngine, **kept):
    """Train one round of all clients on an engine."""
    built = algorithm(text)
    problem = problem_of(Setting(Quadratics(A, B), X0, RATE, STEPS, [[0, 1, 2]]))
    model = ModelState(*problem.initial_state())
    training = Training(built, Descent(), Schedule(RATE), Plan(1, steps=STEPS), 0, 3, Aggregation("uniform"))
    server = built.new_server(model.weights)
    server["drift"] |= kept.get("server", {})
    state = built.new_client(model.weights)
    state["drift"] |= kept.get("client", {})
    state["start"] |= kept.get("start", {})
    members = [Client(i, np.arange(i, i + 1), state) for i in range(3)]
    made = engine(problem, workers=1) if engine is LoopEngine else engine(problem, lanes=2)
    return built, members, made.train(training, 0, model, server, members), server


def local_weights(*args, **kept) -> list[torch.Tensor]:
    """The clients' models after one round; arguments as ``trained``."""
    built, members, outcome, _ = trained(*args, **kept)
    problem = problem_of(Setting(Quadratics(A, B), X0, RATE, STEPS, [[0, 1, 2]]))
    return [model.weights for model in each_local_model(built, problem, members, outcome)]


@pytest.mark.parametrize("engine", [LoopEngine, LaneEngine])
def test_the_drift_of_gradient_descent_on_quadratics(engine) -> None:
    built, members, outcome, server = trained(engine=engine)
    found = measure_cohort(built, members, outcome, server)
    D = moves(X0)
    mean = D.mean(0)
    assert np.allclose(found["length"], np.linalg.norm(D, axis=1), rtol=1e-12)
    assert np.allclose(found["distance"], np.linalg.norm(D - mean, axis=1), rtol=1e-12)
    assert np.allclose(found["cosine"], D @ mean / np.linalg.norm(D, axis=1) / np.linalg.norm(mean), rtol=1e-12)
    assert found["update"] == pytest.approx(np.linalg.norm(mean))
    apart = found["disagreement"]
    assert apart["diversity"] == pytest.approx((D**2).sum(1).mean() / (mean**2).sum())
    pairs = [D[i] @ D[j] / np.linalg.norm(D[i]) / np.linalg.norm(D[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert apart["pairwise_cosine"] == pytest.approx(np.mean(pairs))
    assert apart["conflicting"] == pytest.approx(np.mean(np.array(pairs) < 0))
    assert "client_vectors" not in found
    assert "momentum" not in found


def test_local_models_are_where_gradient_descent_ends() -> None:
    assert np.allclose(local_weights(), X0 + moves(X0), rtol=1e-12)


def test_local_models_are_those_of_clients_that_start_elsewhere() -> None:
    last = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    start = X0 + 0.5 * (X0 - last.numpy())
    found = local_weights("fedinit(beta=0.5)", start={"last": last})
    assert np.allclose(found, start + moves(start), rtol=1e-12)


def test_local_models_survive_a_zero_displacement() -> None:
    """FedSpeed as published uploads a_i + 2 (y - z); its clients still end at y."""
    dual = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    texts = ("feddyn(alpha=0.1)", "feddyn(alpha=0.1,dual_scope=active)")
    all_of_them, published = (trained(text, client={"a": dual})[2].rows.displacements for text in texts)
    assert not torch.allclose(all_of_them, published)
    all_of_them, published = (torch.stack(local_weights(text, client={"a": dual})) for text in texts)
    assert torch.allclose(all_of_them, published, rtol=1e-12)


def test_norms_of_control_variates_are_those_of_mean_gradients() -> None:
    """SCAFFOLD's option II from zero: c_i+ = -D_i / (eta K)."""
    built, members, outcome, server = trained("scaffold")
    found = measure_cohort(built, members, outcome, server)
    assert np.allclose(found["client_vectors"]["drift.c"], np.linalg.norm(moves(X0), axis=1) / (RATE * STEPS))
    assert found["server_vectors"] == {"drift.c": 0.0}


def test_agreement_with_the_momentum_is_one_minus_fedwmsams_signal() -> None:
    momentum = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    built, members, outcome, server = trained("fedwmsam", server={"momentum": momentum})
    found = measure_cohort(built, members, outcome, server)
    signal = float(outcome.message_means["drift"]["signal"])
    assert np.mean(found["momentum"]["agreement"]) == pytest.approx(1 - signal, rel=1e-12)


def test_which_momentum_an_algorithm_has() -> None:
    x = torch.ones(3)
    sign = {
        text: algorithm(text).momentum(algorithm(text).new_server(x))
        for text in ("fedcm", "fedmoswa", "fedacg", "fedavgm", "fedadam")
    }
    assert {text: found and found[1] for text, found in sign.items()} == {
        "fedcm": -1, "fedmoswa": -1, "fedacg": 1, "fedavgm": 1, "fedadam": 1,
    }  # fmt: skip
    assert algorithm("fedavg").momentum(algorithm("fedavg").new_server(x)) is None


def test_client_rows_average_to_the_update_on_every_engine() -> None:
    setting = Setting(Quadratics(A, B), X0, RATE, STEPS, [[0, 2], [1, 2]])
    for engine in (None, LaneEngine(problem_of(setting), lanes=2)):
        outcome = walk("fedavg", setting, engine=engine).outcomes[-1]
        assert torch.allclose(outcome.rows.displacements.mean(0), outcome.cohort_means.displacement, rtol=1e-12)


vectors = arrays(np.float64, (4, 6), elements=st.floats(-10, 10).filter(lambda v: v == 0 or abs(v) > 1e-6))


@settings(max_examples=60)
@given(vectors, st.lists(st.floats(0.1, 5), min_size=4, max_size=4))
def test_diversity_is_at_least_one_and_follows_from_distances_to_the_mean(rows, sizes) -> None:
    """sum p ||v - mean||^2 = sum p ||v||^2 - ||mean||^2, so that diversity - 1 is the spread in units of ||mean||^2."""
    share = np.array(sizes) / sum(sizes)
    mean = share @ rows
    if np.linalg.norm(mean) < 1e-3:
        return
    found = disagreement(torch.tensor(rows), share.tolist())
    spread = share @ ((rows - mean) ** 2).sum(1)
    assert float(found.diversity) - 1 == pytest.approx(spread / (mean @ mean), rel=1e-6, abs=1e-6)
    assert float(found.norm_of_mean) == pytest.approx(np.linalg.norm(mean), rel=1e-6)


def test_zero_vectors_give_no_signal() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    found = update_drift(rows, torch.tensor([0.0, 1.0]))
    assert found.cosines.isnan().tolist() == [True, False]
    assert bool(disagreement(rows[:1]).pairwise_cosine.isnan())
    assert float(disagreement(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])).conflicting) == 1, (
        "of the pairs that have a cosine"
    )


def test_forgetting_computed_by_hand() -> None:
    found = forgetting([[0.1, 0.9, 0.5], [0.9, 0.2, 0.5], [0.4, 0.7, 0.5]])
    assert found.lost == pytest.approx([0.5, 0.2, 0.0])
    assert found.swing == pytest.approx([(0.8 + 0.5) / 2, (0.7 + 0.5) / 2, 0.0])
    assert found.lowest == pytest.approx([0.4, 0.2, 0.5])


@settings(max_examples=60)
@given(accuracies)
def test_rising_accuracies_are_never_forgotten(values) -> None:
    rising = np.sort(values, axis=0)
    assert max(forgetting(rising.tolist()).lost) <= 0


@settings(max_examples=60)
@given(accuracies)
def test_the_total_change_is_at_least_the_final_loss(values) -> None:
    found = forgetting(values.tolist())
    for lost, swing in zip(found.lost, found.swing, strict=True):
        assert swing * (len(values) - 1) >= lost - 1e-12
        assert -1 <= lost <= 1


@pytest.mark.parametrize("values", [[], [[0.5, 0.5]], [0.1, 0.2]])
def test_one_measurement_is_not_enough(values) -> None:
    with pytest.raises(UserError, match=r"flatness.every"):
        forgetting(values)
