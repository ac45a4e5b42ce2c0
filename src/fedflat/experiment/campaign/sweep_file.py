"""A sweep as it is written: settings that all runs share, those that vary, and what is left out.

``{name}`` in any text stands for a value that varies, so that ``algorithm: fedsam(rho={rho})`` and ``rho: [0.05, 0.1]`` are two runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from fedflat.errors import UserError, one_of
from fedflat.experiment.config import SHORT, SettingsGroup, read_yaml, setting_names
from fedflat.experiment.store.cleanup import Keep

Values = dict[str, Any]
HOLE = re.compile(r"\{(\w+)\}")


class Range(SettingsGroup):
    """Numbers between two bounds, from which a search draws."""

    low: float = Field(description="the smallest value")
    high: float = Field(description="the largest value")
    log: bool = Field(False, description="whether to draw evenly on a logarithmic scale")
    whole: bool = Field(False, description="whether only whole numbers are meant")
    step: float | None = Field(None, gt=0, description="the distance of values from one another")


class Tune(SettingsGroup):
    """A search for the settings with the best validation metric."""

    trials: int = Field(20, ge=1, description="how many combinations are tried")
    space: dict[str, Range | list[Any]] = Field(
        description="by setting: a list of values, or a range (low, high, log, whole, step)"
    )
    seeds: list[int] = Field(
        [0], min_length=1, description="every combination is run with each of these seeds; their mean counts"
    )
    sampler: str = Field(
        "tpe", pattern="^(tpe|random)$", description="tpe, which learns from the trials before, or random"
    )
    sampler_seed: int = Field(0, ge=0, description="seed of what the sampler draws")
    prune: bool = Field(
        False, description="whether to stop trials that are worse than half of the others after as many rounds"
    )


class SweepFile(SettingsGroup):
    """The whole file."""

    model_config = ConfigDict(populate_by_name=True)

    base: Values = Field(default_factory=dict, description="settings of all runs, as in a config file or by short name")
    grid: dict[str, list[Any]] = Field(
        default_factory=dict, description="every value of each with every value of all others"
    )
    entries: list[Values] = Field(
        default_factory=list, alias="list", description="combinations one by one, each with the whole grid"
    )
    exclude: list[Values] = Field(default_factory=list, description="combinations to leave out")
    branch: str | None = Field(None, description="RUN@ROUND: all runs go on from this model instead of a fresh one")
    keep: Keep = Field(Keep(), description="what stays on disk of runs that are over")
    jobs: int | None = Field(None, ge=1, description="runs at the same time, each in a process of its own")
    devices: list[int | str] = Field(
        default_factory=list, description="GPUs, by number, over which these processes are spread"
    )
    ray_address: str | None = Field(
        None, description="HOST:PORT of a Ray cluster, or auto: runs are spread over its nodes"
    )
    tune: Tune | None = Field(None, description="a search instead of a grid (fedflat tune)")


def read_sweep(source: str | Path | Mapping[str, Any]) -> SweepFile:
    """A checked sweep from a YAML file or from its values."""
    where, values = (
        ("the sweep", dict(source)) if isinstance(source, Mapping) else (str(source), read_yaml(Path(source)))
    )
    known = [field.alias or name for name, field in SweepFile.model_fields.items()]
    for key in values:
        if key not in known:
            raise one_of(f"part of a sweep ({where})", key, known)
    for key, value in values["grid"].items() if isinstance(values.get("grid"), dict) else ():
        if not isinstance(value, list) or not value:
            found = "no values" if value is None or isinstance(value, list) else repr(value)
            raise UserError(f"{where}: grid gives {key} {found}; expected a list such as [1, 2]")
    try:
        return SweepFile.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            raise one_of(
                f"key in {'.'.join(map(str, first['loc'][:-1]))} of {where}", first["loc"][-1], _keys(first["loc"][0])
            ) from None
        raise UserError(
            f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"
        ) from None


def _keys(part: Any) -> list[str]:
    if part == "keep":
        return list(Keep.model_fields)
    return [*Tune.model_fields, *Range.model_fields] if part == "tune" else list(SweepFile.model_fields)


# --- from the file to combinations ----------------------------------------------------------------------------------------------------


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by full name; what is short is written out.

    >>> dict(flat({"rounds": 3, "data": {"name": "digits"}, "training.lr": 0.1}))
    {'training.rounds': 3, 'data.dataset': 'digits', 'training.lr': 0.1}
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        else:
            yield SHORT.get(name, name), value


def holes(value: Any) -> set[str]:
    """The names in braces in a text."""
    return set(HOLE.findall(value)) if isinstance(value, str) else set()


def check_names(names: Mapping[str, str], known_holes: set[str]) -> None:
    """Refuse a name that is neither a setting nor in braces in any text; ``names`` has where each one stands."""
    settings = {*setting_names(), "flatness"}
    for name, where in names.items():
        if SHORT.get(name, name) not in settings and name not in known_holes:
            raise one_of(f"setting ({where})", name, settings | set(SHORT) | known_holes, "fedflat settings")


def combinations(file: SweepFile) -> list[Values]:
    """Every combination of what varies, by full name, before values stand in for braces; each one once."""
    if not file.grid and not file.entries:
        raise UserError(
            "the sweep varies nothing: grid and list are both empty; add for example grid: {seed: [0, 1, 2]}"
        )
    for name, values in file.grid.items():
        twice = [value for number, value in enumerate(values) if value in values[:number]]
        if twice:
            raise UserError(f"grid lists {twice[0]} twice for {name}; list each value once")
    for entry in file.entries:
        both = [name for name in entry if SHORT.get(name, name) in {SHORT.get(key, key) for key in file.grid}]
        if both:
            raise UserError(f"{both[0]} stands both in grid and in list; leave it in one of them")
    base = dict(flat(file.base))
    written = [
        *base.values(),
        *itertools.chain(*file.grid.values()),
        *(value for entry in file.entries for value in entry.values()),
    ]
    known = set().union(*map(holes, written))
    named = {**dict.fromkeys(base, "base"), **dict.fromkeys(file.grid, "grid")}
    named |= {name: "list" for entry in file.entries for name in entry} | {
        name: "exclude" for entry in file.exclude for name in entry
    }
    check_names(named, known)
    axes = [[(SHORT.get(name, name), value) for value in values] for name, values in file.grid.items()]
    listed = [{SHORT.get(name, name): value for name, value in entry.items()} for entry in file.entries or [{}]]
    all_of_them = [{**entry, **dict(chosen)} for entry in listed for chosen in itertools.product(*axes)]
    found = _without_excluded([_needed(one, base, known) for one in all_of_them], base, file.exclude)
    if not found:
        raise UserError("exclude leaves no run of the sweep; remove some of it")
    return found


def _needed(one: Values, base: Values, known: set[str]) -> Values:
    """A combination without values that stand for braces it does not have."""
    settings = set(setting_names())
    used = set().union(*map(holes, {**base, **one}.values()))
    return {
        name: value
        for name, value in one.items()
        if name in settings or name == "flatness" or name not in known or name in used
    }


def _without_excluded(found: list[Values], base: Values, exclude: list[Values]) -> list[Values]:
    once = [one for number, one in enumerate(found) if one not in found[:number]]
    for rule in exclude:
        full = {SHORT.get(name, name): value for name, value in rule.items()}
        left = [one for one in once if not _matches({**base, **one}, full)]
        if len(left) == len(once):
            said = ", ".join(f"{name}={value}" for name, value in rule.items())
            raise UserError(f"exclude: no combination has {said or 'nothing'}; mend or remove it")
        once = left
    return once


def _matches(one: Values, rule: Values) -> bool:
    filled = fill(one) if set().union(*map(holes, one.values())) <= set(one) else one
    return bool(rule) and all(
        name in one
        and any(
            _plain(name, filled[name]) == _plain(name, value)
            for value in (wanted if isinstance(wanted, list) else [wanted])
        )
        for name, wanted in rule.items()
    )


def _plain(name: str, value: Any) -> Any:
    """A value as it is compared: algorithms by what they are, numbers by their size, all else by how it is written."""
    if name == "algorithm" and not holes(value):
        from fedflat.algorithms import algorithm, canonical

        return canonical(algorithm(str(value)))
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def fill(values: Values) -> Values:
    """Settings with values in place of braces; values that only stood for these are gone."""
    settings = {*setting_names(), "flatness"}
    by_name = {**values, **{short: values[full] for short, full in SHORT.items() if full in values}}

    def filled(name: str, text: Any) -> Any:
        for hole in sorted(holes(text)):
            if hole not in by_name:
                raise UserError(
                    f"{name} is '{text}', and nothing gives {hole} a value; add it to the grid, for example {hole}: [0.1, 0.2]"
                )
            text = text.replace(f"{{{hole}}}", str(by_name[hole]))
        return text

    return {name: filled(name, value) for name, value in values.items() if name in settings}
