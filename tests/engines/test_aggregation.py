"""Robust centres: closed forms, robustness, and where they are rejected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fedflat
from fedflat.algorithms import algorithm
from fedflat.algorithms.named import NAMED
from fedflat.data import from_clients
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import CPU_CHUNK, Aggregation, sum_in_chunks, uniform_weights, weighted_sum
from fedflat.errors import UserError
from fedflat.experiment.config import parse_config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.engine import training_of
from fedflat.experiment.setup.problem import build_problem

ROWS = torch.tensor([[1.0, 5.0], [2.0, -4.0], [3.0, 0.0], [1e6, 1.0]])
REFUSED = {
    "scaffold",
    "feddyn",
    "mime",
    "mime-sgdm",
    "fedgamma",
    "fedspeed",
    "fedsmoo",
    "fedlesam-s",
    "fedlesam-d",
    "fedwmsam",
    "fedgmt",
    "fedgloss",
    "feddc",
    "feddisco",
    "fedscam",
    "fedawa",
}
"""Algorithms whose server vector is a mean of client vectors, whose clients train with a mean, or that weight it."""


def test_median_and_trimmed_mean_act_on_coordinates() -> None:
    even, four = uniform_weights(4), [7, 1, 1, 1]
    assert Aggregation(centre="median").combine(ROWS, even).tolist() == [2.5, 0.5]
    assert Aggregation(centre="median").combine(ROWS[:3], uniform_weights(3)).tolist() == [2.0, 0.0]
    assert Aggregation(centre="trimmed", trim=0.25).combine(ROWS, even).tolist() == [2.5, 0.5]
    assert Aggregation(centre="trimmed", trim=0.2).combine(ROWS, even).tolist() == ROWS.mean(0).tolist()
    hundred = torch.arange(100.0)[:, None] ** 3
    twenty_nine = Aggregation(centre="trimmed", trim=0.29).combine(hundred, uniform_weights(100))
    assert twenty_nine.item() == hundred[29:71].mean().item(), "0.29 * 100 is rounded to less than 29"
    for centre in ("median", "trimmed"):
        robust = Aggregation(centre=centre)  # type: ignore[arg-type]
        assert torch.equal(robust.combine(ROWS, even), robust.combine(ROWS, torch.tensor(four) / 10)), (
            "all clients have equal weight"
        )


@pytest.mark.parametrize("shape", [(3, 5), (3, 0), (3,)])
@pytest.mark.parametrize("part", [1, 6, 100])
def test_a_gpu_sums_large_rows_in_parts(shape: tuple[int, ...], part: int) -> None:
    rows, weights = torch.randn(shape), [0.5, 0.3, 0.2]
    torch.testing.assert_close(sum_in_chunks(rows, weights, part), weighted_sum(rows, weights))
    torch.testing.assert_close(sum_in_chunks(rows, torch.tensor(weights), part), weighted_sum(rows, weights))


def test_clipping_shortens_only_rows_above_the_median_norm() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 1.0], [300.0, 400.0]])  # of norms 5, 1 and 500
    clipped = Aggregation(centre="clipped").combine(rows, uniform_weights(3))
    assert torch.allclose(clipped, torch.tensor([[3.0, 4.0], [0.0, 1.0], [3.0, 4.0]]).mean(0))
    doubled = Aggregation(centre="clipped", longest=2.0).combine(rows, [0.5, 0.25, 0.25])
    assert torch.allclose(doubled, 0.5 * rows[0] + 0.25 * rows[1] + 0.25 * rows[2] / 50)
    assert Aggregation(centre="clipped").combine(torch.zeros(3, 2), uniform_weights(3)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_clipping_drops_rows_that_are_not_finite(value: float) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 1.0], [300.0, 400.0], [0.0, value]])
    kept = torch.tensor([[3.0, 4.0], [0.0, 1.0], [3.0, 4.0]])
    torch.testing.assert_close(Aggregation(centre="clipped").combine(rows, uniform_weights(4)), kept.sum(0) / 4)
    assert not Aggregation(centre="clipped").combine(rows[3:], [1.0]).isfinite().all(), "nothing to recover from"


def test_a_median_of_more_numbers_than_torch_quantile_supports() -> None:
    rows = torch.arange(3.0)[:, None].expand(3, 6_000_000)
    assert Aggregation(centre="median").combine(rows, uniform_weights(3)).unique().tolist() == [1.0]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem(parse_config({}))[0]


@pytest.mark.parametrize("text", NAMED)
def test_a_robust_centre_is_rejected_where_it_is_meaningless(text: str, problem: Problem) -> None:
    wanted = parse_config({"algorithm": text, "federation": {"aggregation": "median"}})
    if text in REFUSED:
        with pytest.raises(UserError, match=r"federation\.aggregation=median"):
            training_of(wanted, algorithm(text), 10, problem)
    else:
        assert training_of(wanted, algorithm(text), 10, problem).aggregation.centre == "median"


@pytest.mark.parametrize("centre", ["median", "trimmed", "clipped"])
@pytest.mark.parametrize("text", ["fedcm", "fedmoswa", "fedavgm+sam", "adabest"])
def test_a_cohort_of_one_is_its_own_centre(text: str, centre: str) -> None:
    """In every slot that uses a centre, over whole rounds."""

    def weights(**more: Any) -> torch.Tensor:
        run = Run(
            parse_config(
                {
                    "algorithm": text,
                    "model": "mlp(hidden=4)",
                    "data": {"clients": 1, "partition": "iid"},
                    "federation": {"clients_per_round": 1, **more},
                    "training": {"rounds": 2, "local_steps": 2, "lr": 0.05},
                    "engine": {"workers": 1, "device": "cpu"},
                }
            )
        )
        return run.execute().models["server"].weights

    assert torch.allclose(weights(aggregation=centre, trim=0.0), weights(), atol=1e-7)


@pytest.mark.parametrize("shape", [(19,), (19, 0), (3, 7), (19, CPU_CHUNK + 3), (9, 2, CPU_CHUNK)])
def test_a_weighted_sum_has_the_bits_of_its_blocks(shape: tuple[int, ...]) -> None:
    rows, weights = torch.randn(shape), torch.rand(shape[0])
    expected = torch.zeros(shape[1:])
    for start in range(0, len(rows), 8):
        partial = rows[start] * weights[start]
        for row in range(start + 1, min(start + 8, len(rows))):
            partial = partial + rows[row] * weights[row]
        expected = expected + partial
    assert torch.equal(weighted_sum(rows, weights), expected)
    assert torch.equal(weighted_sum(rows, weights.tolist()), expected)


@pytest.mark.parametrize("centre", ["clipped", "median"])
def test_a_client_whose_numbers_are_not_finite_does_not_end_a_robust_run(centre: str) -> None:
    clients = [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(5)]
    clients[0] = (torch.full((20, 3), 1e30), clients[0][1])
    settings = {"rounds": 2, "clients_per_round": 5, "local_steps": 3, "workers": 1, "device": "cpu"}
    settings |= {"dataset": from_clients(clients), "model": torch.nn.Linear(3, 2), "partition": "natural"}
    robust = fedflat.run("fedavg", federation__aggregation=centre, federation__weighting="uniform", **settings)
    assert robust.record.status == "finished" and math.isfinite(robust.history[-1]["train_loss"])
    assert fedflat.run("fedavg", **settings).record.status == "diverged"
