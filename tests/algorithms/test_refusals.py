"""Invalid texts are rejected with a one-line reason, and ``variant=released`` sets what the published code does."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fedflat.algorithms import Algorithm, algorithm, canonical
from fedflat.algorithms.cards import CARDS
from fedflat.algorithms.composition import parts, released_text
from fedflat.algorithms.drift import Drift, Gloss, MemorylessAcg, Mo, Scaffold
from fedflat.algorithms.local_optimiser import FedAdamW, FedMuon
from fedflat.algorithms.lr_schedule import Linear
from fedflat.algorithms.named import NAMED, RELEASED
from fedflat.algorithms.perturbation import Guided, Lesam, RampedSam, Sam
from fedflat.algorithms.server import Extrapolation, Sgd
from fedflat.algorithms.slot import Slot
from fedflat.errors import UserError
from fedflat.text import show


def rejection(text: str) -> str:
    """The one-line message with which a text is rejected."""
    with pytest.raises(UserError) as caught:
        algorithm(text)
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 400
    return message


INVALID = {
    # FedACG is its own server optimiser
    **{f"fedacg+{part}": "FedACG" for part in ("momentum", "adam", "yogi", "adagrad", "sgd(server_lr=0.5)")},
    "fedacg(server_lr=0.5)": "FedACG",
    "fedavgm+acg": "FedACG",
    "fedexp+acg": "FedACG",
    "mime+relaxed": "MIME corrects",
    "fedinit+mime(beta=0.9)": "MIME corrects",
    "fedavg+aligned": "requires the perturbation scam",
    "fedsam+aligned": "requires the perturbation scam",
    "fedawa+relaxed": "FedAWA compares models",
    "fedawa+disco": "client weights twice",
    "fedswa+acg": "FedACG",
    "fedavg+acg+momentum": "FedACG",
    "fedavg+memoryless-acg+momentum": "FedACG",
    # heavy-ball momentum on clients and momentum on the server
    **{f"{base}+momentum": "GHBM" for base in ("ghbm", "localghbm", "fedhbm")},
    "fedadam+ghbm": "GHBM",
    # two perturbations along the last global update, and a mean that clients do not upload
    "fedavg+gloss+lesam": "FedGloSS",
    "fedavg+gloss(dual_scope=active)": "dual_scope=active",
    "feddyn(dual_scope=active)+fedadamw": "dual_scope=active",
    "feddyn(dual_scope=active)+awa": "dual_scope=active",
    "feddyn(dual_scope=active)+exp": "dual_scope=active",
    "fedadam(bias_correction=true,beta1=1)": "beta1=1 has no bias correction",
    "fedyogi(bias_correction=true,beta2=1)": "beta2=1 has no bias correction",
    "fedadam(bias_correction=true,v_init=0.01)": "assumes that v starts at 0",
    "fedgloss+relaxed(server=average)": "server model",
    "fedexp+relaxed(server=average)": "displacements",
    "fedavg+memoryless-acg+relaxed(server=average)": "server model",
    # variates of others assume plain displacements
    "fednova+scaffold": "drift correction .*nova",
    "ghbm+dyn": "drift correction .*ghbm",
    # the perturbations of FedWMSAM and FedSMOO belong to their drifts
    **{f"{base}+guided": "drift wmsam" for base in ("fedavg", "scaffold", "fedcm", "feddyn", "fedmoswa")},
    **{f"{base}+smoo": "drift dyn" for base in ("fedavg", "scaffold", "fedcm", "adabest", "fedavg+wmsam")},
    "fedwmsam(alpha0=1)": "alpha0=1",
    "fedavg+wmsam(alpha0=1)+guided": "alpha0=1",
    "fedspeed(share=0.5,perturb_from=total)": "perturb_from=data",
    # displacements of other optimisers than SGD, divided by learning rates, are no gradients
    **{f"{base}+muon": r"scaffold\(option=I\)\+muon" for base in ("scaffold", "fedgamma", "fedwmsam")},
    **{f"{base}+adamw": r"fedmo\(option=I\)\+adamw" for base in ("fedmo", "fedmoswa")},
    "fedcm+local-adam": r"fedprox\+local-adam",
    "fedmuon+cm": r"fedprox\+fedmuon",
    "fedavg+adamw+muon": "local optimiser .*adamw",
    "local-muon+adamw": "local optimiser .*muon",
    # one value per slot
    **{f"fedwmsam+{part}": "perturbation .*guided" for part in ("sam", "asam", "lesam", "smoo", "guided")},
    **{f"fedsmoo+{part}": "perturbation .*smoo" for part in ("sam", "asam", "lesam", "guided")},
    **{f"fedlesam+{part}": "perturbation .*lesam" for part in ("sam", "asam")},
    **{f"fedsam+{part}": "perturbation .*sam" for part in ("sam(rho=0.2)", "asam", "lesam")},
    "fedasam+sam": "perturbation .*asam",
    "fedavg+sam+lesam": "perturbation .*sam",
    "scaffold+prox": "drift correction .*scaffold",
    "feddyn(alpha=0.3)+mime": r"drift correction .*dyn\(alpha=0.3\)",
    "fedswa+cyclic": "learning-rate schedule .*linear",
    "fedavg+cyclic+linear": "learning-rate schedule .*cyclic",
    "fedavgm+adam": "server optimiser .*momentum",
    "fedswa+momentum": r"server optimiser .*sgd\(server_lr=1.5\); .* write fedavg\+linear\+momentum$",
    "fedmoswa+wima+momentum(beta=0.5)+sam": r"write fedmo\+linear\+wima\+momentum\(beta=0.5\)\+sam$",
    "fedavg+sam+asam": "remove asam$",  # the text itself sets the slot twice
    "fedavg+sgd+momentum": "server optimiser .*sgd",
    "fedavg+sgd+sgd(server_lr=2)": "server optimiser .*sgd",
    "fedavg+swa+swa": "swa twice",
    "fedavg+wima(window=5)+ema+wima(window=5)": "wima twice",
    # a part as an algorithm, and the reverse
    "sam": r"fedavg\+sam",
    "wima(window=3)": r"fedavg\+wima",
    "fedavg+fedsam": "'fedsam' is an algorithm",
    "fedavg+scaffold+fedswa": "'fedswa' is an algorithm",
}


@pytest.mark.parametrize("text", INVALID)
def test_invalid_combinations(text: str) -> None:
    assert re.search(INVALID[text], rejection(text))
    if "+" in text:
        assert f"'{text}'" in rejection(text) or "is an algorithm" in rejection(text)


def test_a_conflict_is_declared_by_the_slot_itself() -> None:
    """A part that did not exist when the others were written can still be incompatible with them."""

    @dataclasses.dataclass(frozen=True)
    class Unsociable(Sgd):
        def conflict(self, slots: Mapping[str, Slot]) -> str | None:
            return "no drift allowed" if slots["drift"] != Drift() else None

    assert Algorithm(server=Unsociable()).conflict() is None
    assert Algorithm(Scaffold(), server=Unsociable()).conflict() == "no drift allowed"


@pytest.mark.parametrize(
    "text",
    [
        "fedacg+sgd",
        "fedacg+sam",
        "fedacg+wima+ema+swa",
        "fedavg+wmsam+sam",
        "fedavg+wmsam+lesam",
        "fedwmsam(alpha0=1,rho=0)",
        "feddyn+smoo",
        "fedspeed(rho=0)+wima",
        "fedavg+swa(start=0.5)+swa+wima+wima(window=7)+ema",
        "fedswa(server_lr=1)+momentum",
        "mime+sam",
        "feddyn+adam",
        "adabest+momentum",
        "scaffold+linear+adagrad",
        "fedmoswa+asam",
        "fedavg+cyclic(length=20)+swa",
        "feddyn+sgd(server_lr=0.5)",
        "fedprox+muon",
        "scaffold(option=I)+muon",
        "fedmoswa(option=I)+adamw",
        "feddyn+fedadamw",
        "mime+local-adam",
        "fedsam+fedmuon+adam",
        "ghbm(server_lr=0.5)",
        "fedavg+gloss+asam",
        "fedgloss+momentum",
        "fednova+momentum",
        "fednova(mu=0.1)+sam",
        "feddc+sam",
        "fedexp+wima(window=2)",
        "feddyn+exp",
        "fedexp+relaxed",
        "fedacg+relaxed",
    ],
)
def test_valid_combinations_that_no_paper_reports(text: str) -> None:
    assert isinstance(algorithm(text), Algorithm)


def test_case_and_underscores_are_accepted() -> None:
    assert algorithm("FedLESAM_S+WiMA") == algorithm("fedlesam-s+wima")
    assert canonical(algorithm("FedAvg+SAM(rho=0.05)")) == "fedsam"


def test_a_name_is_used_only_if_its_parameters_give_the_same_algorithm() -> None:
    """``fedgloss(ramp=2)`` sets the ramps of the server and of clients."""
    text = "fedavg+gloss(alpha=0.1,ramp=2)+ramped-sam(rho=0.15)"
    assert canonical(algorithm(text)) == text
    assert canonical(algorithm(text.replace("0.15", "0.15,ramp=2"))) == "fedgloss(ramp=2)"


MISTAKES: dict[str, tuple[str, ...]] = {
    "fedsma": ("'fedsma'", "fedswa", "fedsam"),
    "fedwmsan": ("fedwmsam",),
    "scafold": ("scaffold",),
    "silobn": ("'silobn'", "--set training.statistics=own"),
    "SiLoBN": ("--set training.statistics=own",),
    "fedavg+mixup": ("'mixup'", "--augmentation mixup"),
    "fedavg+samm": ("'samm'", "sam", "asam"),
    "fedavg+wimaa": ("wima",),
    "fedsam(ro=0.1)": ("fedsam", "'ro'", "rho"),
    "fedmoswa(gama=0.1)": ("gamma",),
    "fedavg+wima(windw=3)": ("wima", "'windw'", "window"),
    "fedprox(lambda=1)": ("fedprox", "'lambda'", "mu, server_lr, variant"),
    "quantum": ("'quantum'", "fedflat algorithms"),
    "fedavg(1.5)": ("fedavg(server_lr=1.5)",),
    "fedsam(variant=released)": ("fedsam", "'released'", "fedlesam"),
    "fedlesam(variant=published)": ("fedlesam", "'published'", "paper"),
    "fedavg+sam(variant=released)": ("sam", "'variant'"),
    "scaffold(option=III)": ("scaffold", "option=III", "I, II"),
    "fedasam(scope=bias)": ("scope=bias", "weight, all"),
    "fedwmsam(perturb_sign=0)": ("perturb_sign=0", "1, -1"),
    "fedwmsam(personal=maybe)": ("personal=maybe", "true or false"),
    "fedsam(rho=big)": ("rho=big", "number"),
    "fedsam(rho=none)": ("rho=none", "number"),
    "fedavg+wima(window=2.5)": ("window=2.5", "integer"),
    "fedsam(rho=0.1": ("'fedsam(rho=0.1'", "missing )"),
    "fedsam(rho=0.1,rho=0.2)": ("'rho'", "twice"),
    "fedavg+": ("name(parameter=value)",),
    "": ("empty", "fedavg"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_reported_with_the_nearest_valid_name(text: str) -> None:
    message = rejection(text)
    assert [piece for piece in MISTAKES[text] if piece not in message] == []


@pytest.mark.parametrize("text", ["fedsam(rho=nan)", "fedsam(rho=inf)", "fedprox(mu=1e999)"])
def test_numbers_must_be_finite(text: str) -> None:
    assert "range" in rejection(text)


def bounds() -> Iterator[Any]:
    """Every bound of every parameter: the bound, a value beyond it, and whether the bound itself is valid."""
    for part, (_, spec) in parts().items():
        for f in dataclasses.fields(spec):
            for kind, beyond in (("low", -1), ("high", 1), ("above", -1)):
                bound = f.metadata.get(kind)
                if bound is not None:
                    case = part, f.name, bound, bound + beyond, kind != "above"
                    yield pytest.param(*case, id=f"{part}.{f.name}-{kind}")


@pytest.mark.parametrize(("part", "name", "bound", "beyond", "closed"), list(bounds()))
def test_every_bound_holds(part: str, name: str, bound: float, beyond: float, closed: bool) -> None:
    base = {"guided": "fedavg+wmsam", "smoo": "feddyn", "aligned": "fedavg+scam"}.get(part, "fedavg")
    message = rejection(f"{base}+{part}({name}={beyond})")
    assert part in message and f"{name}={beyond}" in message and "range" in message
    if closed:
        algorithm(f"{base}+{part}({name}={bound})")
    else:
        rejection(f"{base}+{part}({name}={bound})")


def test_every_number_has_a_range() -> None:
    """A parameter without bounds would accept nonsense."""
    for part, (_, spec) in parts().items():
        for f in dataclasses.fields(spec):
            if isinstance(f.default, float) or "float" in str(f.type) or "int" in str(f.type):
                assert any(f.metadata.get(key) is not None for key in ("low", "above")), f"{part}.{f.name}"
                assert f.default is None or math.isfinite(f.default)


AS_PUBLISHED: dict[str, Algorithm] = {
    # D3, D14: scalar shift against the last global step; D10: variate times 0.1
    "fedlesam": Algorithm(perturbation=Lesam(0.1, direction="global", indexing="tensor")),
    "fedlesam-s": Algorithm(Scaffold(cv_weight=0.1), Lesam(0.1, direction="global", indexing="tensor")),
    "fedlesam-d": dataclasses.replace(
        NAMED["fedlesam-d"], perturbation=Lesam(0.1, direction="global", indexing="tensor")
    ),
    # D3, D9: scalar shift, opposite sign
    "fedwmsam": dataclasses.replace(NAMED["fedwmsam"], perturbation=Guided(0.01, perturb_sign=-1, indexing="tensor")),
    # D6: gamma 0.1, first round 1, trapezoid; 2.19: the decay precedes the first round
    "fedmoswa": Algorithm(
        Mo(0.1, gamma_first_round=1.0, normaliser="trapezoid"),
        lr_schedule=Linear(0.1, early_decay=True),
        server=Sgd(1.5),
    ),
    "fedswa": Algorithm(lr_schedule=Linear(0.1, early_decay=True), server=Sgd(1.5)),
    # D37: the whole second moment, first moment corrected by the steps of the run; D41: factor of the kernel
    "fedadamw": Algorithm(local_optimiser=FedAdamW(second_moment="weight", m_steps="run")),
    "fedmuon": Algorithm(local_optimiser=FedMuon(shape_factor="kernel")),
    # D32: the server's radius during the ramp; D33: the dual divided by the cohort's size
    "fedgloss": Algorithm(Gloss(alpha=0.1, ramp_rho=0.15, dual_divisor="cohort"), RampedSam(0.15)),
    # D35: eps times the cohort's size, decaying with the square of the learning rate
    "fedexp": Algorithm(server=Extrapolation(eps_scale="cohort", eps_decay=0.998**2)),
    # D30: the script of 2026
    "fednsam": Algorithm(MemorylessAcg(lam=0.85, beta=0.0), Sam(0.05)),
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_released_variants(name: str) -> None:
    built = algorithm(f"{name}(variant=released)")
    assert built == AS_PUBLISHED[name]
    assert built == RELEASED[name] == algorithm(released_text(name))
    assert built != algorithm(name) == algorithm(f"{name}(variant=paper)")
    assert len(canonical(built)) <= len(f"{name}(variant=released)")
    assert algorithm(canonical(built)) == built


def test_explicit_parameters_override_the_released_variant() -> None:
    built = algorithm("fedmoswa(variant=released,gamma=0.3)")
    assert built == dataclasses.replace(
        AS_PUBLISHED["fedmoswa"], drift=Mo(0.3, gamma_first_round=1.0, normaliser="trapezoid")
    )
    assert canonical(built) == "fedmoswa(variant=released,gamma=0.3)"
    assert algorithm("fedwmsam(variant=released,perturb_sign=1,indexing=vector)") == algorithm("fedwmsam")
    assert algorithm("fednsam(variant=released,lam=0.5)").drift == MemorylessAcg(0.5, beta=0.0)
    with pytest.raises(UserError, match="direction"):  # a parameter of LESAM, which the published code does not have
        algorithm("fednsam(variant=released,direction=client)")


@pytest.mark.parametrize("name", RELEASED)
def test_released_values_are_parameters_that_differ(name: str) -> None:
    values = CARDS[name].released
    for key, value in values.items() if isinstance(values, dict) else ():
        assert algorithm(show(name, {key: value})) != algorithm(name)
