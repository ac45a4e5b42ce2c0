"""Algorithms as text: ``fedmoswa+asam(rho=0.5)+wima``, read, checked, and written back in their shortest form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.drift import DRIFTS, Acg, Dyn, Wmsam
from fedflat.algorithms.lr_schedule import LR_SCHEDULES
from fedflat.algorithms.perturbation import PERTURBATIONS, Guided, Sam, Smoo
from fedflat.algorithms.server import SERVERS, Sgd
from fedflat.algorithms.table import NAMED, RELEASED
from fedflat.averaging import AVERAGES, Average
from fedflat.errors import UserError, one_of
from fedflat.text import Call, Value, changed, make, parameters, parse, revise, show

SLOTS = ("drift", "perturbation", "lr_schedule", "server")
PARTS: dict[str, tuple[str, type[Any]]] = {
    **{name: ("drift", spec) for name, spec in DRIFTS.items()},
    **{name: ("perturbation", spec) for name, spec in PERTURBATIONS.items()},
    **{name: ("lr_schedule", spec) for name, spec in LR_SCHEDULES.items()},
    **{name: ("server", spec) for name, spec in SERVERS.items()},
    **{name: ("averages", spec) for name, spec in AVERAGES.items()},
}
_NAMES = {spec: name for name, (_, spec) in PARTS.items()}
SETTINGS = {
    "silobn": "--set training.statistics=own",
    "mixup": "--augmentation mixup",
    "cutout": "--augmentation cutout",
    "lora": "--train 'lora(rank=8)'",
}
"""What papers name beside algorithms, and what it is here."""


def name_part(name: str, slot: str, spec: type[Any]) -> None:
    """Let texts know one more part."""
    PARTS[name], _NAMES[spec] = (slot, spec), name


def part_name(spec: object) -> str:
    """The name of a slot's value as a part; of a class that has none, the class's own in small letters."""
    return _NAMES.get(type(spec), type(spec).__name__.lower())


def _look_further(name: str) -> None:
    """Let installed packages bring a name that is not known yet."""
    if name not in NAMED and name not in PARTS:
        from fedflat.algorithms.registration import load_installed

        load_installed()


def algorithm(text: str) -> Algorithm:
    """The algorithm that a text names.

    >>> algorithm("scaffold+sam(rho=0.1)") == algorithm("fedgamma")
    True
    """
    base, *parts = parse(text)
    for call in (base, *parts):
        _look_further(call.name)
    built = _named(base)
    filled: set[str] = set()
    for part in parts:
        built = _with(built, part, text, filled)
    _refuse_what_has_no_meaning(built, text)
    return built


def canonical(algorithm: Algorithm) -> str:
    """The shortest text that names an algorithm.

    >>> canonical(Algorithm(DRIFTS["scaffold"](), PERTURBATIONS["sam"](rho=0.2)))
    'fedgamma(rho=0.2)'
    """
    texts = [text for name in NAMED for text in (_as(name, algorithm, False), _as(name, algorithm, True)) if text]
    if not texts:
        kinds = ", ".join(
            type(getattr(algorithm, slot)).__name__ for slot in SLOTS if type(getattr(algorithm, slot)) not in _NAMES
        )
        raise UserError(
            f"this algorithm has no name, since {kinds} is of your own; give it one: fedflat.register('my-algorithm', algorithm)"
        )
    return min(texts, key=len)


def _named(call: Call) -> Algorithm:
    if call.name not in NAMED:
        if call.name in PARTS:
            raise UserError(f"'{call.name}' is a part, not an algorithm; write it behind one, as in fedavg+{call.name}")
        _refuse_settings(call.name)
        raise one_of("algorithm", call.name, NAMED, "fedflat algorithms")
    values = dict(call.values)
    variant = values.pop("variant", "paper")
    if variant == "released" and call.name in RELEASED:
        values = RELEASED[call.name] | values
    elif variant != "paper":
        known = f"expected paper or released (which exists for {', '.join(RELEASED)})"
        raise UserError(f"{call.name} has no variant '{variant}'; {known}")
    built = NAMED[call.name]
    unknown = set(values)
    for slot in SLOTS:
        spec = getattr(built, slot)
        own = {key: value for key, value in values.items() if key in {f.name for f in parameters(spec)}}
        built = replace(built, **{slot: revise(spec, own, call.name)})
        unknown -= set(own)
    for name in unknown:
        known_names = [f.name for slot in SLOTS for f in parameters(getattr(built, slot))]
        raise one_of(f"parameter of {call.name}", name, [*known_names, "variant"], f"fedflat algorithms {call.name}")
    return built


def _with(built: Algorithm, call: Call, text: str, filled: set[str]) -> Algorithm:
    if call.name not in PARTS:
        if call.name in NAMED:
            raise UserError(
                f"'{call.name}' is an algorithm of its own and cannot be added to another; add parts: {', '.join(PARTS)}"
            )
        _refuse_settings(call.name)
        raise one_of("part", call.name, PARTS, "fedflat algorithms")
    slot, spec = PARTS[call.name]
    value = make(spec, call, "part")
    if isinstance(value, Average):
        if value in built.averages:
            raise UserError(f"'{text}' has {call.name} twice with the same parameters; one of them is enough")
        return replace(built, averages=(*built.averages, value))
    there = getattr(built, slot)
    if slot in filled or there != getattr(Algorithm(), slot):
        have = show(_NAMES[type(there)], changed(there))
        raise UserError(
            f"'{text}' has two values for one slot: the {_words(slot)} is already {have}, so {call.name} cannot be added"
        )
    filled.add(slot)
    return replace(built, **{slot: value})


def _refuse_settings(name: str) -> None:
    if name in SETTINGS:
        raise UserError(f"'{name}' is not an algorithm but a setting that goes with any; add {SETTINGS[name]}")


def _words(slot: str) -> str:
    return {"drift": "drift correction", "lr_schedule": "learning-rate schedule", "server": "server optimiser"}.get(
        slot, slot
    )


def _refuse_what_has_no_meaning(a: Algorithm, text: str) -> None:
    if isinstance(a.drift, Acg) and a.server != Sgd():
        raise UserError(
            f"'{text}' applies momentum twice: FedACG is its own server optimiser and goes only with sgd(server_lr=1)"
        )
    if isinstance(a.perturbation, Guided) and not isinstance(a.drift, Wmsam):
        raise UserError(
            f"'{text}': the guided perturbation follows FedWMSAM's personalised momentum and needs the drift wmsam"
        )
    if isinstance(a.perturbation, Smoo) and not isinstance(a.drift, Dyn):
        raise UserError(f"'{text}': the smoo perturbation belongs to FedDyn's dual and needs the drift dyn")
    if isinstance(a.perturbation, Guided) and isinstance(a.drift, Wmsam) and a.perturbation.rho and a.drift.alpha0 == 1:
        raise UserError(f"'{text}': at alpha0=1 there is no momentum to follow; use rho=0 or alpha0 below 1")
    if isinstance(a.perturbation, Sam) and a.perturbation.share < 1 and a.perturbation.perturb_from == "total":
        raise UserError(
            f"'{text}' would add the drift's part twice: a blend (share below 1) is of gradients of the data; use perturb_from=data"
        )


def _as(name: str, a: Algorithm, released: bool) -> str | None:
    """``a`` as the named algorithm with changes, or None where that algorithm has something that ``a`` lacks."""
    if released and name not in RELEASED:
        return None
    base = algorithm(show(name, {"variant": "released"} if released else {}))
    values: dict[str, Value] = {"variant": "released"} if released else {}
    parts = []
    for slot in SLOTS:
        mine, theirs = getattr(a, slot), getattr(base, slot)
        if type(mine) is type(theirs):
            values |= changed(mine, theirs)
        elif theirs == getattr(Algorithm(), slot) and type(mine) in _NAMES:
            parts.append(show(_NAMES[type(mine)], changed(mine)))
        else:
            return None
    parts += [show(_NAMES[type(average)], changed(average)) for average in a.averages]
    return "+".join([show(name, values), *parts])
