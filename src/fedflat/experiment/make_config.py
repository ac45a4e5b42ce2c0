"""Building a config from a base, keyword settings and command-line assignments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config, assign, config, read_yaml
from fedflat.experiment.quantities import flatness_values
from fedflat.experiment.setting_names import SHORT, unknown_setting
from fedflat.experiment.user_objects import called


def make_config(
    base: str | Path | Config | None = None, settings: dict[str, Any] | None = None, assignments: Sequence[str] = ()
) -> Config:
    """Build a config.

    Args:
        base: a YAML file or config to start from; default: the defaults.
        settings: values by short name (``lr``) or full name (``training__lr`` or ``training.lr``).
        assignments: further settings as ``a.b=value``, as on the command line.
    """
    values: dict[str, Any] = {}
    if isinstance(base, Config):
        values = base.model_dump(mode="json")
    elif base is not None:
        if not isinstance(base, str | os.PathLike):
            raise UserError(f"base is {called(base)}; expected a YAML file or a config; pass settings as rounds=50")
        values = read_yaml(Path(base))
    given: dict[str, str] = {}
    for name, value in (settings or {}).items():
        _check_name(name)
        full = SHORT.get(name, name).replace("__", ".")
        _check_once(full, f"{name}={value!r}", given)
        *groups, last = full.split(".")
        inside = values
        for group in groups:
            inside = inside.setdefault(group, {})
            if not isinstance(inside, dict):
                raise UserError(f"{group} is {inside!r}, but it is a group of settings; set those instead")
        if last == "flatness" and isinstance(value, str):
            value = flatness_values(value)
        merge = isinstance(value, dict) and isinstance(inside.get(last), dict)
        inside[last] = {**inside[last], **value} if merge else value
    for assignment in assignments:
        _check_once(assignment.partition("=")[0].strip(), assignment, given)
        assign(values, assignment)
    return config(values)


def _check_once(full_name: str, now: str, given: dict[str, str]) -> None:
    """Reject a setting that was already given, possibly under another name."""
    if full_name in given:
        raise UserError(f"{full_name} is given twice, as {given[full_name]} and as {now}; give it once")
    given[full_name] = now


def _check_name(name: str) -> None:
    """Reject an unknown keyword; a full name without its group gets a hint."""
    known = {*SHORT, *Config.model_fields}
    if name in known or "__" in name or "." in name:
        return
    groups = {group: getattr(field.annotation, "model_fields", {}) for group, field in Config.model_fields.items()}
    full = [f"{group}__{name}" for group, fields in groups.items() if name in fields]
    raise one_of("setting", name, full, "fedflat settings") if full else unknown_setting(name, known, keyword=True)
