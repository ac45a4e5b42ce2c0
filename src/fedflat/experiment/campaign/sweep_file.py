"""Sweep files: settings that all runs share, settings that vary, and combinations to leave out.

``{name}`` in a text is a placeholder for a value that varies: ``algorithm: fedsam(rho={rho})`` with ``rho: [0.05,
0.1]`` gives two runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError

from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config, setting_names
from fedflat.experiment.make_config import suggest_command
from fedflat.experiment.settings_group import SettingsGroup
from fedflat.experiment.store.cleanup import Keep
from fedflat.experiment.store.files import read_yaml
from fedflat.setting_names import SHORT_NAMES, flat, full_name

Values = dict[str, Any]
"""Values by name of the setting or placeholder."""
SETTINGS = frozenset((*setting_names(), "flatness"))
"""Full names of all settings; any other name in a sweep file must be that of a placeholder."""
MAX_RUNS = 10_000
PLACEHOLDER = re.compile(r"\{(\w+)\}")


class SearchRange(SettingsGroup):
    """A range of numbers to search over."""

    low: float = Field(description="smallest value")
    high: float = Field(description="largest value")
    log: bool = Field(False, description="sample on a logarithmic scale")
    whole: bool = Field(False, description="sample integers only")
    step: float | None = Field(None, gt=0, description="distance between values")


Space = dict[str, SearchRange | list[Any]]
"""What to search over, by setting: a list of values or a range."""


class Halving(SettingsGroup):
    """Asynchronous successive halving: at each rung, only the best trials continue.

    The rungs are at ``min_rounds``, ``min_rounds * reduction``, ``min_rounds * reduction**2``, ... rounds.
    """

    min_rounds: int = Field(ge=1, description="number of rounds after which a trial is first compared with others")
    reduction: int = Field(3, ge=2, description="at each rung, one trial in this many continues")


_SWITCH_OR_HALVING = Discriminator(lambda value: "bool" if isinstance(value, bool) else "Halving")
"""Without it, an invalid ``Halving`` would be reported as an invalid boolean."""


class Tune(SettingsGroup):
    """A search for the settings with the best validation metric."""

    trials: int = Field(20, ge=1, description="number of combinations to try")
    space: Space = Field(description="by setting: a list of values, or a range (low, high, log, whole, step)")
    seeds: list[int] = Field([0], min_length=1, description="seeds of every trial, whose scores are averaged")
    sampler: Literal["tpe", "random"] = Field("tpe", description="tpe (learns from earlier trials) or random")
    sampler_seed: int = Field(0, ge=0, description="seed of the sampler")
    prune: Annotated[Annotated[bool, Tag("bool")] | Annotated[Halving, Tag("Halving")], _SWITCH_OR_HALVING] = Field(
        False,
        description="stop trials that are below the median of the others at the same round (true), or by successive "
        "halving (min_rounds, reduction)",
    )


class SweepFile(SettingsGroup):
    """A sweep file."""

    model_config = ConfigDict(populate_by_name=True)

    base: Values = Field(default_factory=dict, description="settings of all runs, by full or short name")
    grid: dict[str, list[Any]] = Field(default_factory=dict, description="values by setting; all combinations are run")
    entries: list[Values] = Field(
        default_factory=list, alias="list", description="combinations one by one, each with the whole grid"
    )
    exclude: list[Values] = Field(default_factory=list, description="combinations to leave out")
    branch: str | None = Field(None, description="RUN@ROUND: the model from which all runs start")
    keep: Keep = Field(Keep(), description="what finished runs keep on disk")
    jobs: int | None = Field(None, ge=1, description="concurrent runs, each in its own process")
    devices: list[int | str] = Field(default_factory=list, description="GPU numbers over which runs are spread")
    ray_address: str | None = Field(
        None, description="HOST:PORT of a Ray cluster, or auto: runs are spread over its nodes"
    )
    tune: Tune | None = Field(None, description="a search instead of a grid (fedflat tune)")


def read_sweep(source: str | Path | Mapping[str, Any]) -> SweepFile:
    """Read and check a sweep, from a YAML file or a mapping."""
    if isinstance(source, Mapping):
        where, values = "the sweep", dict(source)
    else:
        where, values = str(source), read_yaml(Path(source))
    grid = values.get("grid")
    if isinstance(grid, dict):
        for key, value in grid.items():
            if value is not None and not isinstance(value, list):
                raise UserError(f"{where}: grid gives {key} {value!r}; expected a list such as [1, 2]")
            if not value:
                raise UserError(f"{where}: grid gives {key} no values; expected a list such as [1, 2]")
    return validate_file(
        SweepFile, values, where, {"tune": [*Tune.model_fields, *SearchRange.model_fields, *Halving.model_fields]}
    )


_EXPECTED: dict[str, tuple[str, str, type[SettingsGroup]]] = {
    SearchRange.__name__: ("a list of values, or ", "a range", SearchRange),
    Halving.__name__: ("true, false, or ", "a mapping", Halving),
}
"""By class: what else a key may hold, and what it holds."""
T = TypeVar("T")
File = TypeVar("File", bound=SettingsGroup)


def validate_file(kind: type[File], values: Values, where: str, keys: Mapping[str, list[str]]) -> File:
    """Check the content of a sweep or space file; keys without a value are ignored.

    Args:
        kind: the settings that the file may contain.
        values: its content.
        where: name of the file, for messages.
        keys: by section, the keys to suggest for an unknown one.

    Raises:
        UserError: a key is unknown, or a value is of the wrong type.
    """
    known = [field.alias or name for name, field in kind.model_fields.items()]
    unknown = [key for key in values if key not in known]
    if unknown and set(values) <= {*Config.model_fields, *SHORT_NAMES}:
        raise UserError(f"{where} is the config of one run; use fedflat run --config FILE")
    suggest_command(where, unknown)
    if unknown:
        raise one_of("key", unknown[0], known, place=where)
    try:
        return kind.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        # A location also names members of unions.
        location = ".".join(str(part) for part in first["loc"] if part not in _EXPECTED)
        if first["type"] == "extra_forbidden":
            section, _, key = location.rpartition(".")
            valid = {"keep": list(Keep.model_fields), **keys}.get(str(first["loc"][0]), known)
            raise one_of("key", key, valid, place=f"{section} of {where}") from None
        message = first["msg"]
        is_union = len(first["loc"]) > 1 and first["loc"][-1] in _EXPECTED
        if first["type"] == "model_type" and (names := _EXPECTED.get(first["ctx"]["class_name"])):
            alternatives, expected, member = names
            message = f"expected {alternatives if is_union else ''}{expected} with {', '.join(member.model_fields)}"
        raise UserError(f"{where}: {location}: {message[0].lower()}{message[1:]}") from None


def placeholders(value: Any) -> set[str]:
    """The names of the placeholders in a value; empty unless it is a text."""
    return set(PLACEHOLDER.findall(value)) if isinstance(value, str) else set()


def all_placeholders(values: Iterable[Any]) -> set[str]:
    """The names of the placeholders in any of several values."""
    return set().union(*map(placeholders, values))


def check_names(names: Mapping[str, str], known_placeholders: set[str]) -> None:
    """Raise a ``UserError`` for a name that is neither a setting nor a placeholder.

    Args:
        names: the section of the file (``base``, ``grid``, ...) in which each name occurs, by name.
        known_placeholders: the placeholders that some text contains.
    """
    for name, where in names.items():
        if full_name(name) not in SETTINGS and name not in known_placeholders:
            known = SETTINGS | set(SHORT_NAMES) | known_placeholders
            see = f"fedflat settings; no text contains {{{name}}}"
            raise one_of(f"setting in {where}", name, known, see)


def check_space(space: Space, section: str) -> None:
    """Raise a ``UserError`` for a setting that cannot be searched, or values that cannot be drawn.

    ``section`` is the section of the file with the space, for messages.
    """
    for name, values in space.items():
        if name in ("seed", "data.validation"):
            raise UserError(f"cannot search over {name}, which changes how trials are scored; remove it from {section}")
        if isinstance(values, list):
            if not values or not all(isinstance(value, (bool, int, float, str)) or value is None for value in values):
                raise UserError(
                    f"{section}: {name} is {values}; expected a list of numbers or texts, or a range with low and high"
                )
        elif values.low >= values.high:
            raise UserError(
                f"{section}: {name} has low={values.low:g} and high={values.high:g}; low must be below high"
            )
        elif values.log and (values.low <= 0 or values.step is not None):
            raise UserError(f"{section}: {name} is on a logarithmic scale, which needs low above 0 and no step")
        elif values.whole and any((number or 0) % 1 for number in (values.low, values.high, values.step)):
            raise UserError(f"{section}: {name} has whole=true; low, high and step must be integers")


def extreme_values(space: Space) -> tuple[Values, Values]:
    """The first value of every setting and the last, with which a search is checked before it starts."""
    first: Values = {}
    last: Values = {}
    for name, values in space.items():
        if isinstance(values, list):
            first[name], last[name] = values[0], values[-1]
        elif values.whole:
            first[name], last[name] = int(values.low), int(values.high)
        else:
            first[name], last[name] = values.low, values.high
    return first, last


def combinations(file: SweepFile) -> list[Values]:
    """Every distinct combination of the varied settings, by full name, without those that the file excludes.

    Each entry of the file's ``list`` is combined with every combination of ``grid``. Placeholders are not filled in.
    """
    _check_variation(file)
    base = flat_base(file.base)
    _check_names_of_file(file, base)
    count = math.prod(map(len, file.grid.values())) * max(1, len(file.entries))
    if count > MAX_RUNS:
        raise UserError(
            f"this sweep has {count} combinations; expected at most {MAX_RUNS}: at one minute each they would take "
            f"{count / 1440:,.0f} days; shorten the lists of the grid, or search with fedflat tune"
        )
    grid = with_full_names(file.grid, "grid")
    distinct: list[Values] = []
    for entry in file.entries or [{}]:
        for grid_values in itertools.product(*grid.values()):
            combination = with_full_names(entry, "list") | dict(zip(grid, grid_values, strict=True))
            combination = _without_unused(combination, base)
            if combination not in distinct:
                distinct.append(combination)
    remaining = _without_excluded(distinct, base, file.exclude)
    if not remaining:
        raise UserError("exclude leaves no run of the sweep; remove some of its entries")
    return remaining


def _check_names_of_file(file: SweepFile, base: Values) -> None:
    """Raise a ``UserError`` for a name in any section that is neither a setting nor a placeholder."""
    texts = [*base.values(), *itertools.chain(*file.grid.values())]
    sections = {**dict.fromkeys(base, "base"), **dict.fromkeys(file.grid, "grid")}
    for entry in file.entries:
        texts += entry.values()
        sections |= dict.fromkeys(entry, "list")
    for entry in file.exclude:
        sections |= dict.fromkeys(entry, "exclude")
    check_names(sections, all_placeholders(texts))


def with_full_names(values: Mapping[str, T], section: str) -> dict[str, T]:
    """The same values by the full names of settings; ``section`` of the file must not give a setting twice."""
    return _each_once(((full_name(name), value) for name, value in values.items()), section)


def flat_base(base: Values) -> Values:
    """The settings of the section ``base`` by full name; none may be given twice."""
    return _each_once(flat(base), "base")


def _each_once(values: Iterable[tuple[str, T]], section: str) -> dict[str, T]:
    by_name: dict[str, T] = {}
    for name, value in values:
        if name in by_name:
            raise UserError(f"{name} is given twice in {section}, under different names; give it once")
        by_name[name] = value
    return by_name


def _check_variation(file: SweepFile) -> None:
    """Raise a ``UserError`` if nothing varies, or if a value or a setting is listed twice."""
    if not file.grid and not file.entries:
        if file.tune is not None:
            raise UserError("the sweep has the key tune, so it is a search; run it with fedflat tune FILE")
        raise UserError(
            "the sweep varies nothing: grid and list are both empty; add for example grid: {seed: [0, 1, 2]}"
        )
    for name, values in file.grid.items():
        repeated = [value for index, value in enumerate(values) if value in values[:index]]
        if repeated:
            raise UserError(f"grid lists {repeated[0]} twice for {name}; list each value once")
    in_grid = set(map(full_name, file.grid))
    for entry in file.entries:
        in_both = [name for name in entry if full_name(name) in in_grid]
        if in_both:
            raise UserError(f"{in_both[0]} is in both grid and list; leave it in one of them")


def _without_unused(combination: Values, base: Values) -> Values:
    """A combination without values for placeholders that none of its texts contains."""
    used = all_placeholders({**base, **combination}.values())
    return {name: value for name, value in combination.items() if name in SETTINGS or name in used}


def _without_excluded(combinations: list[Values], base: Values, exclude: list[Values]) -> list[Values]:
    """The combinations that no rule of ``exclude`` matches; a rule that matches none raises a ``UserError``."""
    for rule in exclude:
        excluded = with_full_names(rule, "exclude")
        remaining = [values for values in combinations if not _matches({**base, **values}, excluded)]
        if len(remaining) == len(combinations):
            text = ", ".join(f"{name}={value}" for name, value in rule.items())
            raise UserError(f"exclude: no combination has {text or 'an empty rule'}; correct or remove it")
        combinations = remaining
    return combinations


def _matches(values: Values, rule: Values) -> bool:
    """Whether each setting in a rule has the value, or one of the values, that the rule lists for it."""
    if not rule:  # an empty rule would match everything
        return False
    can_fill = all_placeholders(values.values()) <= set(values)  # a missing value is reported later
    filled = values | fill_placeholders(values) if can_fill else values
    for name, listed in rule.items():
        if name not in values:
            return False
        alternatives = listed if isinstance(listed, list) else [listed]
        if _normal_form(name, filled[name]) not in [_normal_form(name, value) for value in alternatives]:
            return False
    return True


def _normal_form(name: str, value: Any) -> Any:
    """A form that equal settings share: canonical algorithms, numbers as floats, anything else as text."""
    if name == "algorithm" and not placeholders(value):
        from fedflat.algorithms import algorithm, canonical

        return canonical(algorithm(str(value)))
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def fill_placeholders(values: Values) -> Values:
    """Replace placeholders in settings by their values, and drop values that belong only to placeholders.

    >>> fill_placeholders({"algorithm": "fedsam(rho={rho})", "rho": 0.1})
    {'algorithm': 'fedsam(rho=0.1)'}
    """
    by_short_name = {short: values[full] for short, full in SHORT_NAMES.items() if full in values}
    replacements = {**values, **by_short_name}
    filled: Values = {}
    for name, value in values.items():
        if name not in SETTINGS:
            continue
        for placeholder in sorted(placeholders(value)):
            if placeholder not in replacements:
                raise UserError(
                    f"{name} is '{value}', but {placeholder} has no value; "
                    f"add it to the grid, for example {placeholder}: [0.1, 0.2]"
                )
            value = value.replace(f"{{{placeholder}}}", str(replacements[placeholder]))
        filled[name] = value
    return filled
