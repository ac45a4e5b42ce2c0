"""What a round costs: the overview of the specification (section 1), declared and measured."""

from __future__ import annotations

import pytest

from fedflat.algorithms import algorithm
from fedflat.algorithms.named import NAMED

from ..quadratics import walk
from .settings import SETTINGS, STEPS

OVERVIEW: dict[str, tuple[int, int, int, int]] = {
    # down and up in units of P, backward passes per local step, passes over the client's data per round
    "fedavg": (1, 1, 1, 0),
    "fedavgm": (1, 1, 1, 0),
    "fedprox": (1, 1, 1, 0),
    "fedadam": (1, 1, 1, 0),
    "fedyogi": (1, 1, 1, 0),
    "fedadagrad": (1, 1, 1, 0),
    "scaffold": (2, 2, 1, 0),
    "scaffold(option=I)": (2, 2, 1, 1),
    "feddyn": (1, 1, 1, 0),
    "adabest": (1, 1, 1, 0),
    "mime": (2, 2, 2, 1),
    "mime-sgdm": (3, 2, 2, 1),
    "mimelite": (1, 1, 1, 0),
    "mimelite-sgdm": (2, 2, 1, 1),
    "fedcm": (2, 1, 1, 0),
    "fedacg": (1, 1, 1, 0),
    "fedsam": (1, 1, 2, 0),
    "fedasam": (1, 1, 2, 0),
    "mofedsam": (2, 1, 2, 0),
    "fedgamma": (2, 2, 2, 0),
    "fedspeed": (1, 1, 2, 0),
    "fedsmoo": (2, 2, 2, 0),
    "fedlesam": (1, 1, 1, 0),
    "fedlesam-s": (2, 2, 1, 0),
    "fedlesam-d": (1, 1, 1, 0),
    "fedswa": (1, 1, 1, 0),
    "fedmo": (2, 2, 1, 0),
    "fedmoswa": (2, 2, 1, 0),
    "fedmoswa(option=I)": (2, 2, 1, 1),
    "fedwmsam": (3, 2, 1, 0),
    # beyond the overview
    "fedlesam(direction=global)": (2, 1, 1, 0),
    "fedlesam(variant=released)": (2, 1, 1, 0),
    "fedwmsam(personal=false)": (2, 1, 1, 0),
    "feddyn(all_mean=true)": (1, 2, 1, 0),
    "fedspeed(dual_scope=active)": (1, 1, 2, 0),
    "fedavg+swa+wima+ema": (1, 1, 1, 0),
    "mime+sam": (2, 2, 3, 1),
    "mime+sam(perturb_from=total)": (2, 2, 4, 1),
    "scaffold+sam(perturb_from=total)": (2, 2, 2, 0),
    "fedsam(rho=0)": (1, 1, 1, 0),
    "fedasam(rho=0)": (1, 1, 1, 0),
    "fedsmoo(rho=0)": (2, 2, 1, 0),
}
MANY = 10**9


def test_every_named_algorithm_is_in_the_overview() -> None:
    assert set(NAMED) <= set(OVERVIEW)


@pytest.mark.parametrize("text", OVERVIEW)
def test_communication(text: str) -> None:
    down, up, _, _ = OVERVIEW[text]
    built = algorithm(text)
    assert 0 <= built.floats_down(MANY) - down * MANY < 10
    assert 0 <= built.floats_up(MANY) - up * MANY < 10


def test_the_scalars_of_fedwmsam_are_counted() -> None:
    """Its weight goes down, its signal up; counters that stay on the server or on a client travel nowhere."""
    built = algorithm("fedwmsam")
    assert (built.floats_down(MANY), built.floats_up(MANY)) == (3 * MANY + 1, 2 * MANY + 1)
    for text in ("fedavg", "fedadam", "adabest", "fedlesam", "scaffold"):
        assert algorithm(text).floats_down(MANY) % MANY == algorithm(text).floats_up(MANY) % MANY == 0


@pytest.mark.parametrize("text", OVERVIEW)
def test_measured_cost(text: str) -> None:
    """Clients with n_i samples take n_i steps of one sample: backward passes are counted where they happen."""
    setting = SETTINGS["uneven-partial"]
    built, (_, _, per_step, clients_per_round) = algorithm(text), OVERVIEW[text]
    assert built.backward_passes == per_step
    walked = walk(text, setting, names=("weight",), quick=True, record=True)
    assert len(walked.gradients) == sum(
        sum(per_step * STEPS[i] + clients_per_round for i in cohort) for cohort in setting.cohorts
    )  # a pass over all data is one call
    for cohort, outcome in zip(setting.cohorts, walked.outcomes, strict=True):
        steps = sum(STEPS[i] for i in cohort)
        assert outcome.cost.backward_passes == (per_step + clients_per_round) * steps
        assert outcome.cost.samples == (per_step + clients_per_round) * steps
        assert outcome.cost.floats_down == len(cohort) * built.floats_down(6)
        assert outcome.cost.floats_up == len(cohort) * built.floats_up(6)
