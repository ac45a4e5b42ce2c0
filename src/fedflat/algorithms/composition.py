"""Algorithms as text such as ``fedmoswa+asam(rho=0.5)+wima``: parsing, validation, and the shortest equivalent text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, cast

from fedflat.algorithms.algorithm import SLOTS, Algorithm
from fedflat.algorithms.drift import DRIFTS, Drift
from fedflat.algorithms.lr_schedule import LR_SCHEDULES, LrSchedule
from fedflat.algorithms.named import NAMED, RELEASED
from fedflat.algorithms.perturbation import PERTURBATIONS, Perturbation
from fedflat.algorithms.server import SERVERS, Sgd
from fedflat.averaging import AVERAGES, Average
from fedflat.errors import UserError, one_of
from fedflat.models import MODELS, ModelSpec
from fedflat.registry import Registry
from fedflat.text import Call, Value, changed, make, parameters, parse, revise, show, with_names

GROUP = "fedflat.algorithms"
"""Entry-point group through which installed packages provide algorithms and parts."""
PART_REGISTRIES: dict[str, Registry[Any]] = {
    "drift": DRIFTS,
    "perturbation": PERTURBATIONS,
    "lr_schedule": LR_SCHEDULES,
    "server": SERVERS,
    "averages": AVERAGES,
}
"""Registries of the parts that ``+`` adds to an algorithm, by slot; no two of them share a name."""
_BASES: dict[str, type[Any]] = {
    "drift": Drift,
    "perturbation": Perturbation,
    "lr_schedule": LrSchedule,
    "server": Sgd,
    "averages": Average,
}
_BUILT_IN = {name for registry in (NAMED, *PART_REGISTRIES.values()) for name in registry}


def parts() -> dict[str, tuple[str, type[Any]]]:
    """All parts by name: slot and class."""
    return {name: (slot, spec) for slot, registry in PART_REGISTRIES.items() for name, spec in registry.items()}


def part_name(spec: object) -> str | None:
    """The registered name of a slot's value or an average, or None if its class is not registered."""
    names = (registry.name_of(type(spec)) for registry in PART_REGISTRIES.values())
    return next(filter(None, names), None)


def register(name: str, component: Algorithm | type[Any]) -> None:
    """Register an algorithm, a part or a model, so that texts, commands and configs can use its name.

    Args:
        name: letters, digits and hyphens.
        component: an ``Algorithm``, used like a built-in one (``mine(rho=0.1)+wima``); a subclass of ``Drift``,
            ``Perturbation``, ``LrSchedule``, ``Sgd`` or ``Average``, added to an algorithm (``scaffold+mine``); or a
            subclass of ``ModelSpec``, used like a built-in model (``model="mine(width=8)"``).

    Raises:
        UserError: the name is malformed or taken, or the component is of no known kind.
    """
    registry: Registry[Any]
    others: list[Registry[Any]]
    if isinstance(component, type) and issubclass(component, ModelSpec):
        registry, others = MODELS, []
    elif isinstance(component, Algorithm):
        registry, others = NAMED, [*PART_REGISTRIES.values()]
    else:
        slots = (slot for slot, base in _BASES.items() if isinstance(component, type) and issubclass(component, base))
        slot = next(slots, None)
        if slot is None:
            bases = ", ".join([base.__name__ for base in _BASES.values()] + ["ModelSpec"])
            raise UserError(
                f"cannot register {component!r} as '{name}'; expected an Algorithm or a subclass of one of {bases}"
            )
        registry, others = PART_REGISTRIES[slot], [NAMED]
    taken = next((other.kind for other in others if isinstance(name, str) and other.spelling(name)), None)
    if taken is not None:
        raise UserError(f"'{name}' already names a built-in or registered {taken}; choose another name")
    registry.register(name, cast("Any", component))


def registered() -> dict[str, Algorithm | type[Any]]:
    """The components that are not built in, by name."""
    registries = (NAMED, *PART_REGISTRIES.values())
    return {name: part for registry in registries for name, part in registry.items() if name not in _BUILT_IN}


@cache
def load_installed() -> tuple[str, ...]:
    """Register the components of installed packages, once; returns their names."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    for point in points:
        try:
            component = point.load()
        except Exception as error:  # any error of a third-party package
            raise UserError(
                f"cannot load the algorithm '{point.name}' of the installed package "
                f"{point.dist.name if point.dist else point.value} ({type(error).__name__}: {error}); "
                "update or uninstall the package"
            ) from error
        register(point.name, component)
    return tuple(point.name for point in points)


SLOT_NAMES = {
    "drift": "drift correction",
    "perturbation": "perturbation",
    "lr_schedule": "learning-rate schedule",
    "server": "server optimiser",
    "averages": "average",
}
"""The slots as they are called in messages and documentation."""
SETTINGS = {
    "silobn": "--set training.statistics=own",
    "mixup": "--augmentation mixup",
    "cutout": "--augmentation cutout",
    "lora": "--train 'lora(rank=8)'",
}
"""Methods from papers that fedflat configures as settings, and the flag that selects each."""


def algorithm(text: str) -> Algorithm:
    """Parse a text into an algorithm.

    >>> algorithm("scaffold+sam(rho=0.1)") == algorithm("FedGAMMA")
    True
    """
    base, *added = parse(text)
    if any(NAMED.spelling(call.name) is None and _slot_of(call.name) is None for call in (base, *added)):
        load_installed()
    built = _named(base)
    filled: set[str] = set()
    for part in added:
        built = _with_part(built, part, text, filled)
    if reason := built.conflict():
        raise UserError(f"'{text}' is not a valid combination: {reason}")
    return built


def canonical(algorithm: Algorithm) -> str:
    """The shortest text that ``algorithm`` parses into the same algorithm.

    >>> from fedflat.algorithms.drift import Scaffold
    >>> from fedflat.algorithms.perturbation import Sam
    >>> canonical(Algorithm(Scaffold(), Sam(rho=0.2)))
    'fedgamma(rho=0.2)'
    """
    texts = [_as(name, algorithm, released) for name in NAMED for released in (False, True)]
    if not any(texts):
        values = [*(getattr(algorithm, slot) for slot in SLOTS), *algorithm.averages]
        unnamed = [type(value).__name__ for value in values if not _is_default(value) and part_name(value) is None]
        raise UserError(
            f"this algorithm has no name because {', '.join(unnamed)} is not registered; "
            "register it with fedflat.register('my-algorithm', algorithm)"
        )
    return min(filter(None, texts), key=len)


def _is_default(value: object) -> bool:
    return value in (getattr(Algorithm(), slot) for slot in SLOTS)


def _slot_of(name: str) -> str | None:
    """The slot of the part called ``name``, or None if there is no such part."""
    return next((slot for slot, registry in PART_REGISTRIES.items() if registry.spelling(name)), None)


def _named(call: Call) -> Algorithm:
    """The named algorithm of a text's first call, with its parameters set."""
    name = NAMED.spelling(call.name)
    if name is None:
        if _slot_of(call.name):
            raise UserError(f"'{call.name}' is a part, not an algorithm; add it to one, as in fedavg+{call.name}")
        _reject_setting(call.name)
        raise NAMED.unknown(call.name)
    built = NAMED[name]
    # A positional value sets the first parameter of the slots that characterise the algorithm.
    own = [getattr(built, slot) for slot in SLOTS if not _is_default(getattr(built, slot))]
    values = with_names(call.values, [field.name for spec in own for field in parameters(spec)], name)
    variant = values.pop("variant", "paper")
    if variant == "released" and name in RELEASED:
        values = RELEASED[name] | values
    elif variant != "paper":
        released = ", ".join(RELEASED)
        raise UserError(f"{name} has no variant '{variant}'; expected paper, or released (available for {released})")
    known = {field.name for slot in SLOTS for field in parameters(getattr(built, slot))}
    for key in values:
        if key not in known:
            raise one_of("parameter", key, [*known, "variant"], f"fedflat algorithms {name}", owner=name)
    for slot in SLOTS:
        spec = getattr(built, slot)
        names = {field.name for field in parameters(spec)}
        mine = {key: value for key, value in values.items() if key in names}
        built = replace(built, **{slot: revise(spec, mine, name)})
    return built


def _with_part(built: Algorithm, call: Call, text: str, filled: set[str]) -> Algorithm:
    """``built`` with one more part; ``filled`` collects the slots that the text has set."""
    slot = _slot_of(call.name)
    if slot is None:
        if NAMED.spelling(call.name):
            raise UserError(
                f"'{call.name}' is an algorithm and cannot be added to another one; the parts are {', '.join(parts())}"
            )
        _reject_setting(call.name)
        raise one_of("part", call.name, parts(), "fedflat algorithms")
    spec = make(PART_REGISTRIES[slot].find(call.name), call, "part")
    if isinstance(spec, Average):
        if spec in built.averages:
            raise UserError(f"'{text}' adds {call.name} twice with the same parameters; remove one of them")
        return replace(built, averages=(*built.averages, spec))
    present = getattr(built, slot)
    if slot in filled or present != getattr(Algorithm(), slot):
        raise UserError(
            f"'{text}' sets the {SLOT_NAMES[slot]} twice: it is already {_part_text(present)}; remove {call.name}"
        )
    filled.add(slot)
    return replace(built, **{slot: spec})


def _reject_setting(name: str) -> None:
    if name.lower() in SETTINGS:
        raise UserError(
            f"'{name}' is a setting that works with every algorithm, not an algorithm; use {SETTINGS[name.lower()]}"
        )


def _part_text(spec: Any) -> str:
    return show(part_name(spec) or type(spec).__name__, changed(spec))


def _as(name: str, target: Algorithm, released: bool) -> str | None:
    """``target`` as the named algorithm with changes, or None if the named algorithm has parts that it lacks."""
    if released and name not in RELEASED:
        return None
    values: dict[str, Value] = {"variant": "released"} if released else {}
    base = _named(Call(name, dict(values)))
    added: list[Any] = []
    for slot in SLOTS:
        wanted, present = getattr(target, slot), getattr(base, slot)
        if type(wanted) is type(present):
            values |= changed(wanted, present)
        elif present == getattr(Algorithm(), slot):
            added.append(wanted)
        else:
            return None
    added += target.averages
    if any(part_name(spec) is None for spec in added):
        return None
    return "+".join([show(name, values), *map(_part_text, added)])
