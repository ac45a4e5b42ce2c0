"""fedflat settings: every setting of an experiment."""

from __future__ import annotations

import types
import typing
from typing import Any

from fedflat.cli.shared.flags import FLAGS, JSON, field_of
from fedflat.cli.shared.screen import print_json, screen, table
from fedflat.experiment.config import Config
from fedflat.experiment.config import setting_names as names
from fedflat.text import write_value

_KINDS = {int: "integer", float: "number", str: "text", type(None): "none"}


def settings(as_json: bool = JSON) -> None:
    """List all settings with type, default and meaning.

    Set one with --set on the command line, or in a YAML file given by --config.

    Example: fedflat settings
    """
    flags = {full: f"--{flag.replace('_', '-')}" for flag, full in FLAGS.items()}
    found = []
    for name in names():
        field = field_of(name)
        default = None if field.default is None else write_value(field.default)
        kind = kind_of(field.annotation)
        found.append(
            {"name": name, "flag": flags.get(name), "type": kind, "default": default, "description": field.description}
        )
    if as_json:
        print_json(found)
        return
    rows = ([line[key] for key in ("name", "type", "default", "description")] for line in found)
    screen().print(table(("setting", "type", "default", "meaning"), rows))
    screen().print("\nSet one with --set NAME=VALUE, or in a YAML file for --config.", style="dim")


def kind_of(annotation: Any) -> str:
    """A type as text.

    >>> kind_of(int | None), kind_of(typing.Literal["a", "b"])
    ('integer or none', 'a or b')
    """
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(str, typing.get_args(annotation)))
    if isinstance(annotation, types.UnionType):
        return " or ".join(kind_of(part) for part in typing.get_args(annotation))
    return _KINDS.get(annotation, "path")


def flat_settings(config: Config) -> dict[str, Any]:
    """Settings of a config, by full name."""
    found = {}
    for name in names():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value
    return found


def different_from_defaults(config: Config) -> list[tuple[str, str, str]]:
    """Non-default settings: name, value, default."""
    return [
        (name, write_value(value), write_value(field_of(name).default))
        for name, value in flat_settings(config).items()
        if value != field_of(name).default
    ]
