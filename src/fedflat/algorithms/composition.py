"""Algorithms as text such as ``fedmoswa+asam(rho=0.5)+wima``: parsing, validation, and the shortest equivalent text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from types import FunctionType
from typing import Any, cast

from fedflat.algorithms.algorithm import SLOTS, Algorithm
from fedflat.algorithms.cards import CARDS
from fedflat.algorithms.drift import DRIFTS
from fedflat.algorithms.local_optimiser import LOCAL_OPTIMISERS
from fedflat.algorithms.lr_schedule import LR_SCHEDULES
from fedflat.algorithms.named import NAMED, RELEASED, with_parameters
from fedflat.algorithms.perturbation import PERTURBATIONS
from fedflat.algorithms.server import SERVERS
from fedflat.algorithms.start import STARTS
from fedflat.algorithms.weights import WEIGHTS
from fedflat.averaging import AVERAGES, Average
from fedflat.data import DATASETS, Dataset
from fedflat.data.sources.user_function import function_source
from fedflat.errors import UserError, first_line, one_of
from fedflat.models import MODELS, ModelSpec
from fedflat.registry import Registry, note_registered
from fedflat.setting_names import unknown_parameter
from fedflat.text import (
    Call,
    Value,
    changed,
    make,
    parameters,
    parse,
    positional_parameters,
    show,
    with_names,
    write_value,
)

GROUP = "fedflat.algorithms"
"""Entry-point group through which installed packages provide algorithms and parts."""
PART_REGISTRIES: dict[str, Registry[Any]] = {
    "drift": DRIFTS,
    "perturbation": PERTURBATIONS,
    "lr_schedule": LR_SCHEDULES,
    "local_optimiser": LOCAL_OPTIMISERS,
    "server": SERVERS,
    "start": STARTS,
    "weights": WEIGHTS,
    "averages": AVERAGES,
}
"""Registries of the parts that ``+`` adds to an algorithm, by slot; no two of them share a name."""
_DEFAULTS: dict[str, Any] = {slot: getattr(Algorithm(), slot) for slot in SLOTS}
"""Default part of each slot; together they are FedAvg."""
_BASES: dict[str, type[Any]] = {slot: type(part) for slot, part in _DEFAULTS.items()} | {"averages": Average}
"""Base class of the parts of each slot."""
_BUILT_IN = {name for registry in (NAMED, *PART_REGISTRIES.values()) for name in registry}
"""Names of fedflat's own algorithms and parts."""


def parts() -> dict[str, tuple[str, type[Any]]]:
    """Slot and class of every part that ``+`` can add to an algorithm, by the part's name."""
    return {name: (slot, part) for slot, registry in PART_REGISTRIES.items() for name, part in registry.items()}


def part_name(part: object) -> str | None:
    """The registered name of an algorithm's part, e.g. ``sam`` for ``Sam(rho=0.1)``; None if its class has none."""
    for registry in PART_REGISTRIES.values():
        name = registry.name_of(type(part))
        if name is not None:
            return name
    return None


def register(name: str, component: Algorithm | type[Any] | Callable[[], Dataset]) -> None:
    """Register an algorithm, a part of algorithms, a model or a dataset, so that commands and configs can use its name.

    Args:
        name: letters, digits and hyphens.
        component: an ``Algorithm``, used like a built-in one (``mine(rho=0.1)+wima``); a subclass of ``Drift``,
            ``Perturbation``, ``LrSchedule``, ``LocalOptimiser``, ``Sgd``, ``Start``, ``Weights`` or ``Average``, added
            to an algorithm (``scaffold+mine``); a subclass of ``ModelSpec``, used like a built-in model
            (``model="mine(width=8)"``); or a function without arguments that returns a dataset, used like a built-in
            one (``dataset="mine"``).

    Raises:
        UserError: the name is malformed or taken, the component is not of a supported type, or a parameter of a class
            has no default.
    """
    registry = _registry_for(name, component)
    if isinstance(component, type):
        try:
            component()
        except TypeError as error:
            raise UserError(
                f"cannot register {component.__name__} as '{name}': {first_line(error)}; give every parameter a default"
            ) from error
    # An algorithm and a part must not share a name: both occur in one text, such as ``scaffold+sam``. Part registries
    # reject each other's names themselves. Models and datasets have their own settings and may share names with parts.
    registries_to_check: list[Registry[Any]] = []
    if registry is NAMED:
        registries_to_check = list(PART_REGISTRIES.values())
    elif registry is DATASETS:  # wrap the function as a data source
        component = cast("Any", function_source(name, cast("Any", component)))
    elif registry is not MODELS:
        registries_to_check = [NAMED]
    for other in registries_to_check:
        if isinstance(name, str) and other.spelling(name):  # a name that is not a string is rejected below
            raise UserError(f"'{name}' already names a built-in or registered {other.kind}; choose another name")
    registry.register(name, cast("Any", component))
    note_registered(name)


def _registry_for(name: str, component: object) -> Registry[Any]:
    """The registry to which a component belongs; raises ``UserError`` for anything that cannot be registered.

    Args:
        name: the requested name, for the error message.
        component: an algorithm, a class derived from a part's base class or from ``ModelSpec``, or a function that
            returns a dataset.
    """
    if isinstance(component, Algorithm):
        return NAMED
    if isinstance(component, type):
        if issubclass(component, ModelSpec):
            return MODELS
        for slot, base in _BASES.items():
            if issubclass(component, base):
                return PART_REGISTRIES[slot]
    if isinstance(component, FunctionType):
        return DATASETS
    bases = ", ".join([base.__name__ for base in _BASES.values()] + ["ModelSpec"])
    raise UserError(
        f"cannot register {component!r} as '{name}'; expected an Algorithm, a subclass of one of {bases}, "
        "or a function that returns a dataset"
    )


def registered() -> dict[str, Algorithm | type[Any]]:
    """The algorithms and parts that users or installed packages have registered, by name."""
    components = dict(NAMED)
    for registry in PART_REGISTRIES.values():
        components |= registry
    return {name: component for name, component in components.items() if name not in _BUILT_IN}


@cache
def load_installed() -> tuple[str, ...]:
    """Register the algorithms and parts that installed packages provide as entry points; returns their names.

    Cached, because a name can be registered only once.
    """
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
    "local_optimiser": "local optimiser",
    "server": "server optimiser",
    "start": "start",
    "weights": "client weights",
    "averages": "average",
}
"""Names of the slots in messages and documentation."""
SETTINGS = {
    "silobn": "--set training.statistics=own",
    "mixup": "--augmentation mixup",
    "cutout": "--augmentation cutout",
    "lora": "--train 'lora(rank=8)'",
}
"""Methods from papers that fedflat configures as settings, and the flag that selects each."""


def algorithm(text: str) -> Algorithm:
    """Parse a text into an algorithm: a named algorithm, then parts added with ``+``.

    Raises:
        UserError: a name or parameter is unknown, a slot is set twice, or the slots cannot be combined.

    >>> algorithm("scaffold+sam(rho=0.1)") == algorithm("FedGAMMA")
    True
    """
    if not text.strip():
        raise UserError("the algorithm is empty; expected e.g. fedavg")
    calls = parse(text)
    # Load installed packages only if the text has names that are not known without them.
    if any(NAMED.spelling(call.name) is None and _slot_of(call.name) is None for call in calls):
        load_installed()
    result = _named(calls[0])
    filled_slots: set[str] = set()
    for part in calls[1:]:
        result = _with_part(result, part, text, filled_slots)
    reason = result.conflict()
    if reason is not None:
        raise UserError(f"'{text}' is not a valid combination: {reason}")
    return result


def canonical(algorithm: Algorithm) -> str:
    """The shortest text that ``fedflat.algorithm`` parses into the same algorithm.

    Raises ``UserError`` if one of its parts is not registered.

    >>> from fedflat.algorithms.drift import Scaffold
    >>> from fedflat.algorithms.perturbation import Sam
    >>> canonical(Algorithm(Scaffold(), Sam(rho=0.2)))
    'fedgamma(rho=0.2)'
    """
    # Try every named algorithm as the start of the text, in the paper's variant and in that of the published code.
    texts = [_text_based_on(name, algorithm, released) for name in NAMED for released in (False, True)]
    if not any(texts):
        all_parts = [*(getattr(algorithm, slot) for slot in SLOTS), *algorithm.averages]
        unnamed = [type(part).__name__ for part in all_parts if not _is_default(part) and part_name(part) is None]
        raise UserError(
            f"this algorithm has no name because {', '.join(unnamed)} is not registered; "
            "register it with fedflat.register('my-algorithm', algorithm)"
        )
    return min(filter(None, texts), key=len)


def _is_default(part: object) -> bool:
    """Whether a part is the default of its slot."""
    return part in _DEFAULTS.values()


def _slot_of(name: str) -> str | None:
    """The slot that the part called ``name`` sets, e.g. ``perturbation`` for ``sam``; None if there is no such part."""
    return next((slot for slot, registry in PART_REGISTRIES.items() if registry.spelling(name)), None)


def _named(call: Call) -> Algorithm:
    """Build a named algorithm from a call such as ``fedsam(rho=0.1)``.

    A parameter is set in every part of the algorithm that has a parameter of this name.
    """
    name = NAMED.spelling(call.name)
    if name is None:
        if _slot_of(call.name):
            raise UserError(f"'{call.name}' is a part, not an algorithm; add it to one, as in fedavg+{call.name}")
        _reject_setting(call.name)
        raise NAMED.unknown(call.name)
    values = dict(call.values)
    variant = values.pop("variant", "paper")
    if variant == "released" and name in RELEASED:
        base = RELEASED[name]
    elif variant == "paper":
        base = NAMED[name]
    else:
        released = ", ".join(RELEASED)
        raise UserError(f"{name} has no variant '{variant}'; expected paper, or released (available for {released})")
    return with_parameters(base, _values_of_call(name, base, values), name)


def _values_of_call(name: str, base: Algorithm, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the parameter values that a call such as ``fedsam(0.1)`` sets, by parameter name.

    A value without a name sets the positional parameter of the only part that distinguishes the algorithm from FedAvg.

    Args:
        name: registered name of the algorithm.
        base: the algorithm in the variant of the call.
        values: the call's arguments as parsed, without the variant.
    """
    slot_parts = [getattr(base, slot) for slot in SLOTS]
    known = {field.name for part in slot_parts for field in parameters(part)}
    own_parts = [part for part in slot_parts if not _is_default(part)]
    positional = [field.name for part in own_parts for field in parameters(part)]
    if len(own_parts) == 1:
        positional = positional_parameters(own_parts[0])
    named_values = with_names(values, positional or [*known, "variant"], name)
    for parameter, value in named_values.items():
        if parameter not in known:
            options = [*known, "variant"]
            raise unknown_parameter(parameter, write_value(value), options, name, f"fedflat algorithms {name}")
    return named_values


def _with_part(base: Algorithm, call: Call, text: str, filled_slots: set[str]) -> Algorithm:
    """Add one part, such as ``asam(rho=0.5)``, to an algorithm; raises ``UserError`` if its slot is already filled.

    Args:
        base: the algorithm so far.
        call: name and parameters of the part.
        text: the whole text, for error messages.
        filled_slots: the slots that parts in the text have filled so far, even with the default; this function adds
            the new part's slot.
    """
    slot = _slot_of(call.name)
    if slot is None:
        if NAMED.spelling(call.name):
            raise UserError(
                f"'{call.name}' is an algorithm and cannot be added to another one; add one of its parts instead "
                f"(fedflat algorithms {call.name} lists them)"
            )
        _reject_setting(call.name)
        raise one_of("part", call.name, parts(), "fedflat algorithms")
    part = make(PART_REGISTRIES[slot].find(call.name), call, "part")
    if isinstance(part, Average):
        if part in base.averages:
            raise UserError(f"'{text}' adds {call.name} twice with the same parameters; remove one of them")
        return replace(base, averages=(*base.averages, part))
    present = getattr(base, slot)
    if slot in filled_slots or present != _DEFAULTS[slot]:
        remedy = f"remove {call.name}"
        if slot not in filled_slots:  # the named algorithm brought the part
            remedy += _replacement(replace(base, **{slot: _DEFAULTS[slot]}), call, text)
        raise UserError(f"'{text}' sets the {SLOT_NAMES[slot]} twice: it is already {part_text(present)}; {remedy}")
    filled_slots.add(slot)
    return replace(base, **{slot: part})


def _replacement(base: Algorithm, call: Call, text: str) -> str:
    """The end of an error message: an algorithm in which a part replaces that of the named algorithm.

    Args:
        base: the algorithm without both parts.
        call: name and parameters of the part.
        text: the whole text.

    Returns:
        For example ``, or write fedmo+linear+momentum``; empty if that is not a valid text.
    """
    calls = parse(text)
    added = [show(part.name, part.values) for part in calls[calls.index(call) :]]
    try:
        spelling = "+".join([canonical(base), *added])
        algorithm(spelling)
    except UserError:  # e.g. because a part is not registered
        return ""
    return f", or write {spelling}"


def _reject_setting(name: str) -> None:
    """Raise ``UserError`` if ``name`` is a method, such as mixup, that is a setting of a run and not an algorithm."""
    if name.lower() in SETTINGS:
        raise UserError(
            f"'{name}' is a setting that works with every algorithm, not an algorithm; use {SETTINGS[name.lower()]}"
        )


def part_text(part: Any) -> str:
    """The text of a part, with its non-default parameters."""
    return show(part_name(part) or type(part).__name__, changed(part))


def released_text(name: str) -> str:
    """The text of an algorithm's ``variant=released`` without the word: its parameters, or its parts if others."""
    released = CARDS[name].released
    if isinstance(released, dict):
        return show(name, released)
    parts = [getattr(released, slot) for slot in SLOTS]
    return "+".join(["fedavg", *(part_text(part) for part in parts if not _is_default(part))])


def _text_based_on(name: str, target: Algorithm, released: bool) -> str | None:
    """The text for ``target`` that starts with a named algorithm, e.g. ``fedgamma(rho=0.2)+wima``.

    Args:
        name: the named algorithm.
        target: the algorithm to write.
        released: whether to start from ``variant=released``.

    Returns:
        The text; None if the named algorithm has parts that ``target`` lacks, has no released variant, cannot be given
        the parameters of ``target``, or if a part to add is not registered.
    """
    if released and name not in RELEASED:
        return None
    values: dict[str, Value] = {}
    base = RELEASED[name] if released else NAMED[name]
    kept: list[Any] = []  # parts that the named algorithm has, perhaps with other parameters
    added: list[Any] = []
    for slot in SLOTS:
        wanted, present = getattr(target, slot), getattr(base, slot)
        if type(wanted) is type(present):
            values |= changed(wanted, present)  # the parameters that differ
            kept.append(wanted)
        elif present == _DEFAULTS[slot]:
            added.append(wanted)
        else:  # a text cannot replace the part that a named algorithm has in a slot
            return None
    # A text sets a parameter in all of the algorithm's parts that have it.
    if any(getattr(part, key, value) != value for part in kept for key, value in values.items()):
        return None
    count = len(base.averages)
    if target.averages[:count] != base.averages:
        return None
    added += target.averages[count:]
    if any(part_name(part) is None for part in added):
        return None
    variant: dict[str, Value] = {"variant": "released"} if released else {}
    return "+".join([show(name, variant | values), *map(part_text, added)])
