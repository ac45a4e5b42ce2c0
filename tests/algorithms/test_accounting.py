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
    "fedexp": (1, 1, 1, 0),
    "fedinit": (1, 1, 1, 0),
    "feddisco": (1, 1, 1, 0),
    "fedscam": (2, 1, 2, 0),
    "fedawa": (1, 1, 1, 0),
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
    "local-adamw": (1, 1, 1, 0),
    "fedadamw": (3, 2, 1, 0),
    "local-muon": (1, 1, 1, 0),
    "fedmuon": (3, 2, 1, 0),
    "fedgmt": (2, 1, 1, 0),
    "fedsol": (1, 1, 2, 0),
    "fedgloss": (1, 1, 2, 0),
    "fedgloss(rho=0)": (1, 1, 1, 0),
    "fednsam": (2, 1, 1, 0),
    "ghbm": (2, 1, 1, 0),
    "localghbm": (1, 1, 1, 0),
    "fedhbm": (1, 1, 1, 0),
    "feddc": (2, 2, 1, 0),
    "fednova": (1, 1, 1, 0),
    # beyond the overview
    "fedmuon(gamma=0)": (2, 2, 1, 0),
    "fedadamw(gamma=0)+sam": (2, 2, 2, 0),
    "scaffold(option=I)+muon": (2, 2, 1, 1),
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
    "fedinit(server=average)": (1, 2, 1, 0),
    "fedsmoo(rho=0)": (2, 2, 1, 0),
}
MANY = 10**9


def test_every_named_algorithm_is_in_the_overview() -> None:
    assert set(NAMED) <= set(OVERVIEW)


@pytest.mark.parametrize("text", OVERVIEW)
def test_floats_sent_per_client(text: str) -> None:
    down, up, _, _ = OVERVIEW[text]
    built = algorithm(text)
    assert 0 <= built.floats_down(MANY) - down * MANY < 10
    assert 0 <= built.floats_up(MANY) - up * MANY < 10


def test_scalars_are_counted() -> None:
    """FedWMSAM's weight goes down, its signal up; counters that stay on the server or a client travel nowhere."""
    built = algorithm("fedwmsam")
    assert (built.floats_down(MANY), built.floats_up(MANY)) == (3 * MANY + 1, 2 * MANY + 1)
    assert algorithm("fednova").floats_up(MANY) == MANY + 1
    assert algorithm("fednova(mu=0.1)").floats_up(MANY) == MANY + 2
    for text in ("fedavg", "fedadam", "adabest", "fedlesam", "scaffold", "fedgloss", "fedhbm"):
        assert algorithm(text).floats_down(MANY) % MANY == algorithm(text).floats_up(MANY) % MANY == 0


@pytest.mark.parametrize("text", OVERVIEW)
def test_measured_cost(text: str) -> None:
    """Clients with n_i samples take n_i steps of one sample: backward passes are counted where they happen."""
    setting = SETTINGS["uneven-partial"]
    built, (_, _, per_step, clients_per_round) = algorithm(text), OVERVIEW[text]
    assert built.backward_passes == per_step
    walked = walk(text, setting, names=("weight",), quick=True, record=True)
    pilots = [min(n, built.perturbation.pilot_batches) for n in STEPS]
    assert len(walked.gradients) == sum(
        sum(per_step * STEPS[i] + clients_per_round + pilots[i] for i in cohort) for cohort in setting.cohorts
    )  # a pass over all data is one call
    for cohort, outcome in zip(setting.cohorts, walked.outcomes, strict=True):
        passes = sum((per_step + clients_per_round) * STEPS[i] + pilots[i] for i in cohort)
        assert outcome.cost.backward_passes == outcome.cost.samples == passes
        assert outcome.cost.floats_down == len(cohort) * built.floats_down(6)
        assert outcome.cost.floats_up == len(cohort) * built.floats_up(6)
