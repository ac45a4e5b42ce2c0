"""Flags that several commands share, and flags for settings.

Flags for settings take their names, types, defaults and help from the config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from fedflat.cli.shared.completion import complete_assignment, complete_run, completer_for
from fedflat.experiment.config import Config
from fedflat.experiment.settings_group import SettingsGroup
from fedflat.setting_names import SHORT_NAMES
from fedflat.text import show_value

FLAGS = {"model": "model", "init": "init", "init_head": "init_head", "seed": "seed", **SHORT_NAMES}
"""For each flag, without dashes, the full name of its setting."""

PANELS = {
    **dict.fromkeys(("algorithm", "model", "init", "init_head", "data"), "Model and data"),
    **dict.fromkeys(("seed", "federation", "training"), "Training"),
    **dict.fromkeys(("evaluation", "flatness", "stop", "engine"), "Evaluation and engine"),
}
"""The panel of the help in which the flags of a group of settings appear."""


class Null:
    """Value of a flag that was given as ``null``; None stands for a flag that was not given."""

    def __str__(self) -> str:
        return "null"


NULL = Null()


def optional(flag: str, help: str, default: str, **options: Any) -> Any:
    """Declare a flag that is None unless given; ``default`` is the text that the help shows as its default."""
    return typer.Option(None, flag, help=f"{help} [dim](default: {default})[/dim]", show_default=False, **options)


def no_default(flag: str, help: str, value: Any = None, **options: Any) -> Any:
    """Declare a flag whose help shows no default; ``value`` applies if it is not given."""
    return typer.Option(value, flag, help=help, show_default=False, **options)


RUN = typer.Argument(metavar="RUN", help="the folder of a run", autocompletion=complete_run)
RUNS_BELOW = typer.Argument(
    metavar="RUNS...", help="run folders, or folders that contain runs", autocompletion=complete_run
)
AVERAGE = typer.Option("server", "--average", metavar="NAME", help="model of the run: server, or an average, e.g. wima")
ROUND = optional("--round", "model saved after this round", "the final model", metavar="N", min=0)
SEED = typer.Option(0, "--seed", min=0, help="random seed")
SEEDS = typer.Option("3", "--seeds", metavar="SEEDS", help="number of seeds (3) or a list (0,1,2)")
TARGETS = no_default(
    "--target", "also report rounds to these metric values; comma-separated or repeated", [], metavar="VALUE,..."
)
DATA_DIR = optional("--data-dir", "dataset folder", "$FEDFLAT_DATA, or the user cache", metavar="FOLDER")
JOBS = optional("--jobs", "concurrent runs, one process each", "one per core for small runs", metavar="N", min=1)
DRY_RUN = typer.Option(False, "--dry-run", help="show the plan and its cost, then stop")
PROBE = typer.Option(True, "--probe/--no-probe", help="measure a few local steps to estimate the duration")
JSON = typer.Option(False, "--json", help="print one JSON document instead of tables")
QUIET = typer.Option(False, "--quiet", help="show no progress")
TRACK = no_default("--track", "log every evaluation to tensorboard, mlflow or wandb", metavar="TRACKER")
SET = no_default(
    "--set",
    "any setting by name (list: fedflat settings)",
    [],
    metavar="KEY=VALUE",
    autocompletion=complete_assignment,
)
CONFIG = no_default("--config", "YAML file with settings, e.g. a run's config.yaml", metavar="FILE.yaml")


def field_of(setting: str) -> FieldInfo:
    """Return the config field of a setting's full name, such as ``training.rounds``."""
    *groups, name = setting.split(".")
    settings_class: Any = Config
    for group in groups:
        settings_class = settings_class.model_fields[group].annotation
    field: FieldInfo = settings_class.model_fields[name]
    return field


def with_settings(*excluded: str, show_defaults: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with a flag for every common setting.

    The command receives the values of the flags that were given as the dictionary ``settings``.

    Args:
        excluded: names of the flags to leave out, e.g. ``seed``.
        show_defaults: show default values in the help.
    """
    setting_of_flag = {flag: setting for flag, setting in FLAGS.items() if flag not in excluded}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        """Return the command with one flag per setting in place of its parameter ``settings``.

        Typer makes a flag of every parameter, so the returned function has a parameter for each setting.
        """
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "settings"
        ]
        parameters += [_parameter(flag, setting, show_defaults) for flag, setting in setting_of_flag.items()]

        def with_flags(**arguments: Any) -> None:
            """Collect the flags that were given (those that are not None) in ``settings``, and call the command."""
            values = {flag: arguments.pop(flag) for flag in setting_of_flag}
            given = {flag: None if value is NULL else value for flag, value in values.items() if value is not None}
            command(settings=given, **arguments)

        return _as_command(with_flags, command, parameters)

    return decorate


def with_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command, some of whose parameters are dataclasses of flags: each field becomes a flag.

    The defaults of the fields are Typer's options.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            types = get_type_hints(parameter.annotation)
            members = [
                parameter.replace(name=field.name, annotation=types[field.name], default=field.default)
                for field in fields(parameter.annotation)
            ]
        else:
            members = [parameter]
        parameters += [member.replace(kind=inspect.Parameter.KEYWORD_ONLY) for member in members]

    def with_flags(**arguments: Any) -> None:
        """Collect the flags of each group in an instance of its dataclass, and call the command."""
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        command(**arguments)

    return _as_command(with_flags, command, parameters)


def _as_command(
    function: Callable[..., None], command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Give a function the attributes from which Typer reads a command's name, help and flags."""
    function.__name__, function.__doc__ = command.__name__, command.__doc__
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def _parameter(flag: str, setting: str, show_default: bool) -> inspect.Parameter:
    """Return the parameter of a command function that Typer turns into the flag of a setting."""
    field = field_of(setting)
    has_default = field.default is not None and not isinstance(field.default, SettingsGroup)
    default = f" [dim](default: {show_value(field.default)})[/dim]" if show_default and has_default else ""
    panel = PANELS[setting.partition(".")[0]]
    option = no_default(
        f"--{flag.replace('_', '-')}",
        f"{field.description}{default}",
        rich_help_panel=panel,
        autocompletion=completer_for(setting, field),
        **_accept_null(field.annotation),
    )
    annotation = _type_of_flag(field.annotation) | None
    return inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _accept_null(annotation: Any) -> dict[str, Any]:
    """Return the options of a flag for a number that may be None, so that it accepts ``null`` and ``none``."""
    number = next((member for member in (int, float) if {member, type(None)} <= set(get_args(annotation))), None)
    if number is None:
        return {}
    kind = "integer" if number is int else "float"

    def parse(text: str) -> Any:
        """Convert the text of the flag to a number, or to ``NULL``."""
        if text.strip().lower() in ("null", "none"):
            return NULL
        try:
            return number(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a valid {kind}; expected one, or null") from None

    return {"parser": parse, "metavar": kind.upper()}


def _type_of_flag(annotation: Any) -> Any:
    """Return the type of a flag, given the type of its setting.

    Literals and groups of settings are read as text, because the config validates them.
    """
    is_group = isinstance(annotation, type) and issubclass(annotation, SettingsGroup)
    if is_group or get_origin(annotation) is Literal:
        return str
    for member in get_args(annotation):  # of a union such as int | None, return int
        if member is not type(None):
            return _type_of_flag(member)
    return annotation
