"""fedflat settings: every setting of an experiment."""

from __future__ import annotations

import types
import typing
from operator import attrgetter
from typing import Any

from fedflat.cli.shared.flags import FLAGS, JSON, field_of
from fedflat.cli.shared.screen import print_json, screen, table
from fedflat.experiment.config import Config, setting_names
from fedflat.text import show_value

TYPE_NAMES = {int: "integer", float: "number", str: "text", type(None): "none"}


def settings(as_json: bool = JSON) -> None:
    """List all settings with type, default and meaning.

    Set one with --set on the command line, or in a YAML file given by --config.

    Example: fedflat settings
    """
    flags = {setting: f"--{flag.replace('_', '-')}" for flag, setting in FLAGS.items()}
    documents = []
    for name in setting_names():
        field = field_of(name)
        documents.append(
            {
                "name": name,
                "flag": flags.get(name),
                "type": kind_of(field.annotation),
                "default": None if field.default is None else show_value(field.default),
                "description": field.description,
            }
        )
    if as_json:
        print_json(documents)
        return
    rows = ([document[key] for key in ("name", "type", "default", "description")] for document in documents)
    screen().print(table(("setting", "type", "default", "meaning"), rows))
    screen().print("\nSet one with --set NAME=VALUE, or in a YAML file for --config.", style="dim")


def kind_of(annotation: Any) -> str:
    """Return the type annotation of a setting as text for users.

    >>> kind_of(int | None), kind_of(typing.Literal["a", "b"])
    ('integer or none', 'a or b')
    """
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(str, typing.get_args(annotation)))
    if isinstance(annotation, types.UnionType):
        return " or ".join(kind_of(member) for member in typing.get_args(annotation))
    return TYPE_NAMES.get(annotation, "path")


def flat_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a config by full name, e.g. ``training.lr``."""
    return {name: attrgetter(name)(config) for name in setting_names()}


USUAL_DECISIONS = {("engine.compile", "off"), ("engine.precision", "float32")}


def different_from_defaults(config: Config) -> list[tuple[str, str, str]]:
    """Return name, value and default of every setting that differs from its default.

    A run records what ``engine.compile=auto`` and ``engine.precision=auto`` decided. The usual decisions, off and
    float32, do not count as differences.
    """
    differences = []
    for name, value in flat_settings(config).items():
        default = field_of(name).default
        if value != default and (name, value) not in USUAL_DECISIONS:
            differences.append((name, show_value(value), show_value(default)))
    return differences
