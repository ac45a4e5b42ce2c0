"""One registry per kind of component, and the registration of user-defined and installed components."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, cast

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.drift import DRIFTS, Drift
from fedflat.algorithms.lr_schedule import LR_SCHEDULES, LrSchedule
from fedflat.algorithms.named import NAMED
from fedflat.algorithms.perturbation import PERTURBATIONS, Perturbation
from fedflat.algorithms.server import SERVERS, Sgd
from fedflat.averaging import AVERAGES, Average
from fedflat.errors import UserError
from fedflat.registry import Registry

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
    """Register an algorithm or a part, so that texts, commands and configs can use its name.

    Args:
        name: letters, digits and hyphens.
        component: an ``Algorithm``, used like a built-in one (``mine(rho=0.1)+wima``); or a subclass of ``Drift``,
            ``Perturbation``, ``LrSchedule``, ``Sgd`` or ``Average``, added to an algorithm (``scaffold+mine``).

    Raises:
        UserError: the name is malformed or taken, or the component is of no known kind.
    """
    registry: Registry[Any]
    others: list[Registry[Any]]
    if isinstance(component, Algorithm):
        registry, others = NAMED, [*PART_REGISTRIES.values()]
    else:
        slots = (slot for slot, base in _BASES.items() if isinstance(component, type) and issubclass(component, base))
        slot = next(slots, None)
        if slot is None:
            bases = ", ".join(base.__name__ for base in _BASES.values())
            raise UserError(
                f"cannot register {component!r} as '{name}'; expected an Algorithm or a subclass of {bases}"
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
