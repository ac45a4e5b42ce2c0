"""Flags for settings, with names, types, defaults and help from the config."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperArgument

from fedflat.experiment.config import SHORT_NAMES, Config, SettingsGroup
from fedflat.text import write_value

FLAGS = {"model": "model", "init": "init", "init_head": "init_head", "seed": "seed", **SHORT_NAMES}
"""Flags and their full setting names."""

PANELS = {
    **dict.fromkeys(("algorithm", "model", "init", "init_head", "data"), "Model and data"),
    **dict.fromkeys(("seed", "federation", "training"), "Training"),
    **dict.fromkeys(("evaluation", "flatness", "stop", "engine"), "Evaluation and engine"),
}
"""Help panels of the setting groups."""

JSON = typer.Option(False, "--json", help="print one JSON document instead of tables")
QUIET = typer.Option(False, "--quiet", help="show no progress")
TRACK = typer.Option(
    None,
    "--track",
    metavar="PLACE",
    help="log every evaluation to tensorboard, mlflow or wandb",
    show_default=False,
)
SET = typer.Option(
    [],
    "--set",
    metavar="KEY=VALUE",
    help="any setting by full name (list: fedflat settings)",
    show_default=False,
)
CONFIG = typer.Option(
    None,
    "--config",
    metavar="FILE.yaml",
    help="YAML file with settings, e.g. a run's config.yaml",
    show_default=False,
)


def optional(flag: str, help: str, default: str, **more: Any) -> Any:
    """An optional flag; ``default`` describes its default."""
    return typer.Option(None, flag, help=f"{help} [dim](default: {default})[/dim]", show_default=False, **more)


def field_of(full_name: str) -> FieldInfo:
    """The config field of a full name such as ``training.rounds``."""
    *sections, last = full_name.split(".")
    inside: Any = Config
    for section in sections:
        inside = inside.model_fields[section].annotation
    field: FieldInfo = inside.model_fields[last]
    return field


def with_settings(*left_out: str, defaults: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a flag for every common setting to a command, which receives the given ones as ``settings``.

    ``defaults`` shows default values in the help.
    """
    names = {flag: full for flag, full in FLAGS.items() if flag not in left_out}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        flags = [_parameter(flag, full, defaults) for flag, full in names.items()]

        def with_flags(**values: Any) -> None:
            given = {flag: values.pop(flag) for flag in names}
            command(settings={flag: value for flag, value in given.items() if value is not None}, **values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *flags]]
        with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return with_flags

    return decorate


def _parameter(flag: str, full_name: str, defaults: bool) -> inspect.Parameter:
    field = field_of(full_name)
    kind = _type_of_flag(field.annotation)
    shown = defaults and field.default is not None and not isinstance(field.default, SettingsGroup)
    default = f" [dim](default: {write_value(field.default)})[/dim]" if shown else ""
    option = typer.Option(
        None,
        f"--{flag.replace('_', '-')}",
        help=f"{field.description}{default}",
        show_default=False,
        rich_help_panel=PANELS[full_name.partition(".")[0]],
    )
    return inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def _type_of_flag(annotation: Any) -> Any:
    """The type of a flag; literals are validated by the config."""
    if get_origin(annotation) is Literal or (isinstance(annotation, type) and issubclass(annotation, SettingsGroup)):
        return str
    return next((_type_of_flag(kind) for kind in get_args(annotation) if kind is not type(None)), annotation)


def keep_help() -> None:
    """Make arguments keep their help text."""
    given = TyperArgument.__init__

    @wraps(given)
    def made(self: TyperArgument, *, help: str | None = None, **rest: Any) -> None:
        given(self, help=help, **rest)
        self.help = help

    TyperArgument.__init__ = made  # type: ignore[method-assign]


CARDS = Path(__file__).parents[2] / "algorithms" / "named.py"


def algorithm_names(incomplete: str) -> list[str]:
    """Named algorithms that start with ``typed``.

    >>> algorithm_names("fedlesam")
    ['fedlesam', 'fedlesam-s', 'fedlesam-d']
    """
    return [name for name in _named() if name.startswith(incomplete)]


def _named() -> list[str]:
    """Algorithm names parsed from source, because importing torch would make completion slow."""
    for statement in ast.parse(CARDS.read_text(encoding="utf-8")).body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.target.id == "CARDS"
        ):
            assert isinstance(statement.value, ast.Dict)
            return [str(key.value) for key in statement.value.keys if isinstance(key, ast.Constant)]
    return []
