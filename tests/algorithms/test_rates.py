"""The polynomial learning-rate schedule against its formula, and in the steps of clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedflat.algorithms import algorithm, canonical
from fedflat.algorithms.lr_schedule import LrSchedule, Poly, Schedule
from fedflat.errors import UserError

from ..quadratics import walk
from ..reference import bed


def rate_at(lr: LrSchedule, schedule: Schedule, round: float, step: float, steps: float = 4.0) -> float:
    return float(lr(schedule, *(torch.tensor(value, dtype=torch.float64) for value in (round, step, steps))))


def test_the_polynomial_rate_falls_over_the_run() -> None:
    schedule = Schedule(0.5, rounds=10)
    assert rate_at(Poly(), schedule, 0, 0) == 0.5
    assert rate_at(Poly(), schedule, 3, 2) == pytest.approx(0.5 * (1 - 3.5 / 10) ** 0.9)
    assert rate_at(Poly(power=1.0), schedule, 9, 3) == pytest.approx(0.5 * 0.25 / 10)
    assert rate_at(Poly(power=2.0), schedule, 10, 0) == 0, "the rate is 0 at the end of the run"
    values = [rate_at(Poly(), schedule, round, step) for round in range(10) for step in range(4)]
    assert values == sorted(values, reverse=True) and len(set(values)) == 40


def test_the_polynomial_rate_can_restart_in_every_round() -> None:
    schedule = Schedule(0.5, decay=0.9, rounds=10)
    per_round = Poly(span="round")
    assert rate_at(per_round, schedule, 2, 0) == pytest.approx(0.5 * 0.9**2)
    assert rate_at(per_round, schedule, 2, 3) == pytest.approx(0.5 * 0.9**2 * 0.25**0.9)
    assert rate_at(Poly(), schedule, 2, 0) == pytest.approx(0.5 * 0.9**2 * 0.8**0.9)


def test_clients_train_with_the_polynomial_rate() -> None:
    """A straight line to zero within each round is FedSWA's with final_lr=0."""
    setting = bed(rounds=2, size=3)
    falling, plain = walk("fedavg+poly(power=1.0,span=round)", setting), walk("fedavg+linear(final_lr=0.0)", setting)
    assert np.abs(np.array(falling.x) - np.array(plain.x)).max() < 1e-12


def test_poly_is_parsed_and_has_a_canonical_form() -> None:
    assert canonical(algorithm("fedasam+poly( power = 0.9 )")) == "fedasam+poly"
    assert canonical(algorithm("fedavg+poly(span=round)")) == "fedavg+poly(span=round)"
    with pytest.raises(UserError, match=r"schedule.*cyclic.*poly"):
        algorithm("fedavg+cyclic+poly")
    with pytest.raises(UserError, match=r"power=0\.0.*range"):
        algorithm("fedavg+poly(power=0.0)")
