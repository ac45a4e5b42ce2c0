"""Space files: the slots, parts and parameters of a search over algorithms, with their checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.composition import PART_REGISTRIES, SLOT_NAMES, canonical
from fedflat.errors import UserError, one_of
from fedflat.experiment.campaign.sweep_file import (
    PLACEHOLDER,
    Halving,
    SearchRange,
    Space,
    Values,
    all_placeholders,
    check_names,
    check_space,
    extreme_values,
    flat_base,
    validate_file,
    with_full_names,
)
from fedflat.experiment.settings_group import SettingsGroup
from fedflat.experiment.store.files import read_yaml
from fedflat.setting_names import full_name
from fedflat.text import make, parse_one

NONE = "none"
"""The choice that leaves a slot unchanged from ``base``."""


class Confirmation(SettingsGroup):
    """Runs that confirm the result of a search."""

    seeds: list[int] = Field(list(range(1000, 1005)), min_length=2, description="seeds that the search does not use")
    ablation: bool = Field(True, description="also train the winner without each of its parts, on the search's problem")
    also: list[Values] = Field(
        default_factory=list, description="further problems: settings that differ from base, such as dataset, partition"
    )


class SpaceFile(SettingsGroup):
    """A space file."""

    base: Values = Field(default_factory=dict, description="settings of all runs, by full or short name")
    slots: dict[str, list[str]] = Field(description="by slot: parts to choose from; none leaves the slot empty")
    parameters: Space = Field(
        default_factory=dict, description="by setting or placeholder: a list of values, or a range (low, high, log)"
    )
    baselines: list[str] = Field(["fedavg"], min_length=1, description="algorithms to compare with; tuned, too")
    candidates: int = Field(30, ge=1, description="number of candidates of the search, and of each baseline's")
    minutes: float | None = Field(None, gt=0, description="time limit of all searches together")
    seeds: list[int] = Field([0], min_length=1, description="seeds of every candidate, whose scores are averaged")
    halving: Halving | None = Field(None, description="default: rungs at 1/9 and 1/3 of the rounds")
    sampler: Literal["tpe", "random"] = Field("tpe", description="tpe (learns from earlier candidates) or random")
    sampler_seed: int = Field(0, ge=0, description="seed of the sampler")
    confirm: Confirmation = Field(Confirmation(), description="seeds and further problems of the confirmation")
    jobs: int | None = Field(None, ge=1, description="concurrent runs, each in its own process")
    devices: list[int | str] = Field(default_factory=list, description="GPU numbers over which candidates are spread")


def read_space(source: str | Path | Mapping[str, Any]) -> SpaceFile:
    """Read and check a space, from a YAML file or a mapping."""
    where, values = (
        ("the space", dict(source)) if isinstance(source, Mapping) else (str(source), read_yaml(Path(source)))
    )
    keys = {"confirm": list(Confirmation.model_fields), "parameters": list(SearchRange.model_fields)}
    keys["halving"] = list(Halving.model_fields)
    return validate_file(SpaceFile, values, where, keys)


def check_file(file: SpaceFile) -> None:
    """Raise a ``UserError`` if a space contradicts itself or has an unknown name; nothing is combined yet."""
    base = flat_base(file.base)
    _check_seeds(file)
    _check_slots(file.slots)
    choices = [choice for listed in file.slots.values() for choice in listed]
    used = all_placeholders([*base.values(), *choices, *file.baselines])
    check_names({**dict.fromkeys(base, "base"), **dict.fromkeys(file.parameters, "parameters")}, used)
    given = {*base, *map(full_name, file.parameters)}
    for name in sorted(name for name in used if full_name(name) not in given):
        raise UserError(f"{{{name}}} has no values; add it to parameters, for example {name}: {{low: 0.01, high: 1}}")
    if "algorithm" in file.parameters:
        raise UserError("algorithm cannot be a parameter; list parts in slots, and algorithms in baselines")
    parameters = with_full_names(file.parameters, "parameters")
    check_space(parameters, "parameters")
    text = fill(str(base.get("algorithm", "fedavg")), {**base, **extreme_values(parameters)[0]})
    for slot in file.slots:
        if slot != "averages" and getattr(algorithm(text), slot) != getattr(Algorithm(), slot):
            raise UserError(
                f"the {SLOT_NAMES[slot]} is filled twice: by {text} in base and by slots.{slot}; remove one of them"
            )
    seen: set[tuple[str, frozenset[str]]] = set()
    for text in file.baselines:
        filled = canonical(algorithm(fill(text, {**base, **extreme_values(parameters)[0]})))
        meaning = (filled, frozenset(all_placeholders([text])))  # different placeholders may have the same values
        if meaning in seen:
            raise UserError(f"baselines lists {text} twice; list each algorithm once")
        seen.add(meaning)


def _check_seeds(file: SpaceFile) -> None:
    """Raise a ``UserError`` unless seeds are distinct, and the search and the confirmation share none."""
    for name, seeds in (("seeds", file.seeds), ("confirm.seeds", file.confirm.seeds)):
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise UserError(f"{name} is {seeds}; expected distinct seeds of 0 or more, for example [0, 1, 2]")
    shared = sorted(set(file.seeds) & set(file.confirm.seeds))
    if shared:
        raise UserError(
            f"the search and its confirmation share the seed {shared[0]}; confirm.seeds must be seeds that the search "
            f"does not use, for example {list(range(1000, 1005))}"
        )


def _check_slots(slots: Mapping[str, list[str]]) -> None:
    """Raise a ``UserError`` for an unknown slot or part, or a part in another slot's list."""
    if not slots:
        raise UserError("slots is empty; list parts to choose from, for example {perturbation: [none, sam]}")
    for slot, listed in slots.items():
        if slot not in PART_REGISTRIES:
            raise one_of("slot", slot, PART_REGISTRIES, "fedflat algorithms")
        if not listed:
            raise UserError(f"slots.{slot} is empty; list parts to choose from, for example [none, ...], or remove it")
        repeated = [choice for index, choice in enumerate(listed) if choice in listed[:index]]
        if repeated:
            raise UserError(f"slots.{slot} lists {repeated[0]} twice; list each choice once")
        for choice in listed:
            _check_choice(slot, choice)


def _check_choice(slot: str, choice: str) -> None:
    """Raise a ``UserError`` if a choice is not a part of its slot."""
    if choice == NONE:
        return
    name = parse_one(PLACEHOLDER.sub("1", choice)).name
    other = next((key for key, registry in PART_REGISTRIES.items() if registry.spelling(name)), None)
    if other is not None and other != slot:
        raise UserError(f"{name} is listed in slots.{slot}, but it fills the {SLOT_NAMES[other]}; use slots.{other}")
    if other is None:
        PART_REGISTRIES[slot].find(name)  # loads installed packages; an unknown name raises an error


def fill(text: str, values: Values) -> str:
    """Replace the placeholders of a text by their values, which are given by full name.

    >>> fill("sam(rho={rho})", {"rho": 0.1})
    'sam(rho=0.1)'
    """
    return PLACEHOLDER.sub(lambda match: str(values[full_name(match[1])]), text)


def make_part(slot: str, choice: str, values: Values) -> Any:
    """The part that a choice stands for, with ``values`` for its placeholders; None if it leaves the slot unchanged."""
    if choice == NONE:
        return None
    call = parse_one(fill(choice, values))
    return make(PART_REGISTRIES[slot].find(call.name), call, "part")
