"""What has no meaning is refused, with the reason, in one sentence; and the released variants are what they say."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from fedflat.algorithms import Algorithm, algorithm, canonical
from fedflat.algorithms.composition import PARTS
from fedflat.algorithms.drift import Mo, Scaffold
from fedflat.algorithms.lr_schedule import Linear
from fedflat.algorithms.perturbation import Guided, Lesam
from fedflat.algorithms.server import Sgd
from fedflat.algorithms.named import NAMED, RELEASED
from fedflat.errors import UserError
from fedflat.text import show, write_value


def refused(text: str) -> str:
    """The one sentence with which a text is refused."""
    with pytest.raises(UserError) as caught:
        algorithm(text)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert 20 < len(sentence) < 400
    return sentence


NO_MEANING = {
    # FedACG is its own server optimiser
    **{f"fedacg+{part}": "momentum twice" for part in ("momentum", "adam", "yogi", "adagrad", "sgd(server_lr=0.5)")},
    "fedacg(server_lr=0.5)": "momentum twice",
    "fedavgm+acg": "momentum twice",
    "fedswa+acg": "momentum twice",
    "fedavg+acg+momentum": "momentum twice",
    # WMSAM's C1 and SMOO belong to their drifts
    **{f"{base}+guided": "needs the drift wmsam" for base in ("fedavg", "scaffold", "fedcm", "feddyn", "fedmoswa")},
    **{f"{base}+smoo": "needs the drift dyn" for base in ("fedavg", "scaffold", "fedcm", "adabest", "fedavg+wmsam")},
    "fedwmsam(alpha0=1)": "no momentum to follow",
    "fedavg+wmsam(alpha0=1)+guided": "no momentum to follow",
    "fedspeed(share=0.5,perturb_from=total)": "add the drift's part twice",
    # one value for each slot
    **{f"fedwmsam+{part}": "perturbation is already guided" for part in ("sam", "asam", "lesam", "smoo", "guided")},
    **{f"fedsmoo+{part}": "perturbation is already smoo" for part in ("sam", "asam", "lesam", "guided")},
    **{f"fedlesam+{part}": "perturbation is already lesam" for part in ("sam", "asam")},
    **{f"fedsam+{part}": "perturbation is already sam" for part in ("sam(rho=0.2)", "asam", "lesam")},
    "fedasam+sam": "perturbation is already asam",
    "fedavg+sam+lesam": "perturbation is already sam",
    "scaffold+prox": "drift correction is already scaffold",
    "feddyn(alpha=0.3)+mime": "drift correction is already dyn(alpha=0.3)",
    "fedswa+cyclic": "local rate is already linear",
    "fedavg+cyclic+linear": "local rate is already cyclic",
    "fedavgm+adam": "server optimiser is already momentum",
    "fedswa+momentum": "server optimiser is already sgd(server_lr=1.5)",
    "fedavg+sgd+momentum": "server optimiser is already sgd",
    "fedavg+sgd+sgd(server_lr=2)": "server optimiser is already sgd",
    "fedavg+swa+swa": "swa twice",
    "fedavg+wima(window=5)+ema+wima(window=5)": "wima twice",
    # words in the wrong place
    "sam": "write it behind one, as in fedavg+sam",
    "wima(window=3)": "write it behind one, as in fedavg+wima",
    "fedavg+fedsam": "cannot be added to another",
    "fedavg+scaffold+fedswa": "cannot be added to another",
}


@pytest.mark.parametrize("text", NO_MEANING)
def test_combinations_without_meaning(text: str) -> None:
    assert NO_MEANING[text] in refused(text)
    if "+" in text:
        assert f"'{text}'" in refused(text) or "cannot be added to another" in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "fedacg+sgd", "fedacg+sam", "fedacg+wima+ema+swa", "fedavg+wmsam+sam", "fedavg+wmsam+lesam", "fedwmsam(alpha0=1,rho=0)",
        "feddyn+smoo", "fedspeed(rho=0)+wima", "fedavg+swa(start=0.5)+swa+wima+wima(window=7)+ema", "fedswa(server_lr=1)+momentum",
        "mime+sam", "feddyn+adam", "adabest+momentum", "scaffold+linear+adagrad", "fedmoswa+asam", "fedavg+cyclic(length=20)+swa",
        "feddyn+sgd(server_lr=0.5)",
    ],
)  # fmt: skip
def test_combinations_nobody_reports_but_that_have_a_meaning(text: str) -> None:
    assert isinstance(algorithm(text), Algorithm)


MISTAKES = {
    "fedsma": "did you mean fedswa or fedsam",
    "fedwmsan": "did you mean fedwmsam",
    "scafold": "did you mean scaffold",
    "silobn": "'silobn' is not an algorithm but a setting that goes with any; add --set training.statistics=own",
    "fedavg+mixup": "'mixup' is not an algorithm but a setting that goes with any; add --augmentation mixup",
    "fedavg+samm": "there is no part 'samm'; did you mean sam or asam",
    "fedavg+wimaa": "did you mean wima",
    "fedsam(ro=0.1)": "there is no parameter of fedsam 'ro'; did you mean rho",
    "fedmoswa(gama=0.1)": "did you mean gamma",
    "fedavg+wima(windw=3)": "there is no parameter of part wima 'windw'; did you mean window",
    "fedprox(lambda=1)": "there is no parameter of fedprox 'lambda'; expected one of mu, server_lr, variant",
    "quantum": "for example",
    "fedsam(variant=released)": "fedsam has no variant 'released'; expected paper or released (which exists for fedlesam",
    "fedlesam(variant=published)": "fedlesam has no variant 'published'",
    "fedavg+sam(variant=released)": "there is no parameter of part sam 'variant'",
    "scaffold(option=III)": "scaffold: option=III is not possible; expected one of I, II",
    "fedasam(scope=bias)": "expected one of weight, all",
    "fedwmsam(perturb_sign=0)": "expected one of 1, -1",
    "fedwmsam(personal=maybe)": "personal=maybe is not possible; expected true or false",
    "fedsam(rho=big)": "rho=big is not possible; expected a number",
    "fedsam(rho=none)": "rho=none is not possible; expected a number",
    "fedavg+wima(window=2.5)": "window=2.5 is not possible; expected a whole number",
    "fedsam(rho=0.1": "cannot read 'fedsam(rho=0.1' at '(rho=0.1'",
    "fedsam(0.1)": "expected parameter=value",
    "fedsam(rho=0.1,rho=0.2)": "parameter 'rho' stands twice",
    "fedavg+": "expected name(parameter=value)",
    "": "expected name(parameter=value)",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_told_with_the_nearest_right_thing(text: str) -> None:
    assert MISTAKES[text] in refused(text)


OUT_OF_RANGE = [
    "fedsam(rho=-0.1)", "fedasam(rho=-1)", "fedasam(eta=-0.1)", "fedlesam(rho=-0.1)", "fedsmoo(rho=-1)", "fedwmsam(rho=-0.01)",
    "fedwmsam(alpha0=1.1)", "fedwmsam(lam=-0.1)", "fedmoswa(gamma=1.5)", "fedmoswa(gamma=-0.1)", "fedmo(gamma_first_round=2)",
    "fedmo(option_I_batches=-1)", "fedavg+wima(window=0)", "fedavg+swa(start=1.5)", "fedavg+swa(every=0)", "fedavg+ema(decay=1.1)",
    "feddyn(alpha=-0.1)", "feddyn(alpha=0)", "fedcm(alpha=1.1)", "fedprox(mu=-1)", "adabest(mu=-1)", "adabest(beta=1.5)", "fedacg(lam=1.2)",
    "fedacg(beta=-1)", "mime(beta=-0.1)", "scaffold(cv_weight=-1)", "fedswa(final_lr=1.5)", "fedswa(server_lr=0)", "fedavgm(beta=1.2)",
    "fedadam(tau=0)", "fedadam(beta2=1.1)", "fedadam(v_init=-1)", "fedspeed(share=1.2)", "fedavg+cyclic(length=0)", "fedavg+cyclic(low=-1)",
    "fedavg+cyclic(start=-0.5)", "fedsam(rho=nan)", "fedsam(rho=inf)", "fedprox(mu=1e999)",
]  # fmt: skip


@pytest.mark.parametrize("text", OUT_OF_RANGE)
def test_parameters_outside_their_domain(text: str) -> None:
    name, value = re.findall(r"(\w+)=([-\w.]+)", text)[0]
    sentence = refused(text)
    assert f"{name}={write_value(float(value)) if '1e' in value else value}" in sentence or "inf" in sentence
    assert "out of range; expected a number" in sentence


def bounds() -> Iterator[Any]:
    """Every bound of every parameter of every part: the bound itself, a value beyond it, and whether the bound is allowed."""
    for part, (slot, spec) in PARTS.items():
        for f in dataclasses.fields(spec):
            for kind, beyond in (("low", -1), ("high", 1), ("above", -1)):
                bound = f.metadata.get(kind)
                if bound is not None:
                    yield pytest.param(
                        part, slot, f.name, bound, bound + beyond, kind != "above", id=f"{part}.{f.name}-{kind}"
                    )


@pytest.mark.parametrize(("part", "slot", "name", "bound", "beyond", "closed"), list(bounds()))
def test_every_bound_holds(part: str, slot: str, name: str, bound: float, beyond: float, closed: bool) -> None:
    base = {"guided": "fedavg+wmsam", "smoo": "feddyn"}.get(part, "fedavg")
    assert f"part {part}: {name}={beyond} is out of range" in refused(f"{base}+{part}({name}={beyond})")
    if closed:
        algorithm(f"{base}+{part}({name}={bound})")
    else:
        refused(f"{base}+{part}({name}={bound})")


def test_every_number_has_a_domain() -> None:
    """A parameter without any bound would take what makes no sense."""
    for part, (_, spec) in PARTS.items():
        for f in dataclasses.fields(spec):
            if isinstance(f.default, float) or "float" in str(f.type) or "int" in str(f.type):
                assert any(f.metadata.get(key) is not None for key in ("low", "above")), f"{part}.{f.name}"
                assert f.default is None or math.isfinite(f.default)


# --- released variants ---------------------------------------------------------------------------------------------------------------

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
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_released_variants(name: str) -> None:
    built = algorithm(f"{name}(variant=released)")
    assert built == AS_PUBLISHED[name]
    assert built == algorithm(show(name, RELEASED[name]))
    assert built != algorithm(name) == algorithm(f"{name}(variant=paper)")
    assert len(canonical(built)) <= len(f"{name}(variant=released)")
    assert algorithm(canonical(built)) == built


def test_what_a_released_variant_sets_can_be_set_otherwise() -> None:
    built = algorithm("fedmoswa(variant=released,gamma=0.3)")
    assert built == dataclasses.replace(
        AS_PUBLISHED["fedmoswa"], drift=Mo(0.3, gamma_first_round=1.0, normaliser="trapezoid")
    )
    assert canonical(built) == "fedmoswa(variant=released,gamma=0.3)"
    assert algorithm("fedwmsam(variant=released,perturb_sign=1,indexing=vector)") == algorithm("fedwmsam")


@pytest.mark.parametrize("name", RELEASED)
def test_released_values_are_parameters_that_differ(name: str) -> None:
    for key, value in RELEASED[name].items():
        assert algorithm(show(name, {key: value})) != algorithm(name)
