"""Every command explains itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from fedflat.cli.application import app, build


def commands(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inside in getattr(command, "commands", {}).items():
        yield from commands(inside, (*path, name))


PATHS = list(commands(typer.main.get_command(app)))


def test_all_commands_are_listed():
    top = {path[0] for path in PATHS if path}
    assert top == {
        *(
            "run",
            "compare",
            "sweep",
            "tune",
            "discover",
            "branch",
            "reproduce",
            "resume",
            "show",
            "watch",
            "report",
            "evaluate",
            "export",
            "new",
            "clean",
        ),
        *("flatness", "deploy", "bench", "settings", "algorithms", "models", "papers", "data", "doctor"),
    }
    assert {path[1] for path in PATHS if len(path) == 2 and path[0] == "data"} == {"list", "get", "verify", "describe"}
    measurements = {path[1] for path in PATHS if len(path) == 2 and path[0] == "flatness"}
    assert {
        "spectrum",
        "sharpness",
        "norms",
        "similarity",
        "clients",
        "gap",
        "bounds",
        "stability",
        "landscape",
        "plane",
        "path",
    } <= measurements


def test_commands_that_are_not_imported_are_listed_alike(fedflat):
    assert CliRunner().invoke(build(["--help"]), ["--help"]).stdout == fedflat("--help").stdout


def test_usage_lines_are_valid_markup():
    root = typer.main.get_command(app)
    for path in PATHS:
        command = root
        for word in path:
            command = command.commands[word]
        Text.from_markup(command.get_usage(typer.Context(command)))  # as in the message for an unknown option


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_an_example(fedflat, path):
    result = fedflat(*path, "--help")
    assert result.exit_code == 0
    assert f"Example: fedflat {' '.join(path)}".strip() in " ".join(result.stdout.split())


def every(command: object) -> Iterator[object]:
    yield command
    for inside in getattr(command, "commands", {}).values():
        yield from every(inside)


def test_every_argument_and_flag_has_help():
    silent = [
        f"{command.name} {parameter.name}"
        for command in every(typer.main.get_command(app))
        for parameter in command.params
        if not parameter.help
    ]
    assert not silent


def test_every_command_has_the_json_flag():
    commands = [command for command in every(typer.main.get_command(app)) if not hasattr(command, "commands")]
    for command in commands:
        flags = [option for option in command.params if "--json" in option.opts]
        assert [(flag.is_flag, flag.help) for flag in flags] == [(True, "print one JSON document instead of tables")]


def test_an_option_has_the_same_kind_in_every_command():
    kinds: dict[str, dict[bool, str]] = {}
    for command in every(typer.main.get_command(app)):
        for option in command.params:
            for name in option.opts:
                if name.startswith("--"):
                    kinds.setdefault(name, {})[option.is_flag] = command.name
    assert not {name: commands for name, commands in kinds.items() if len(commands) > 1}


def test_the_help_of_an_argument_is_shown(fedflat):
    assert "the folder of a run" in fedflat("export", "--help").stdout


def test_version(fedflat):
    assert fedflat("--version").stdout.startswith("fedflat ")
