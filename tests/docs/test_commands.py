"""Check that every fedflat command in the documentation and in --help parses, and run those marked ``runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedflat.algorithms import algorithm
from fedflat.cli.application import app
from fedflat.cli.shared.command_group import UsageError
from fedflat.data import canonical_dataset, canonical_partition
from fedflat.errors import UserError
from fedflat.models import canonical_model
from tests.docs.blocks import PAGES, blocks, calls, name, run_python

COMMAND: Any = typer.main.get_command(app)
CHECKS = {"partition": canonical_partition, "model": canonical_model, "dataset": canonical_dataset}
"""Parsers of the texts given to run and compare, by flag."""
PLACEHOLDERS = ("ALGORITHM", "FOLDER", "damped", "my-")
"""Placeholders, and components that the reader writes."""


def check(arguments: list[str]) -> None:
    """Parse a command as fedflat would, without running it."""
    command, path, rest = COMMAND, ["fedflat"], list(arguments)
    if rest[0].startswith("--"):  # an option of fedflat itself
        assert rest[0] in {option for parameter in COMMAND.params for option in parameter.opts}
        return
    while getattr(command, "commands", None):
        assert rest and rest[0] in command.commands, f"no command '{' '.join([*path, *rest[:1]])}'"
        path.append(rest[0])
        command = command.commands[rest.pop(0)]
    parameters = command.make_context(path[-1], rest, resilient_parsing=False).params
    if path[1] in ("run", "compare"):
        texts = parameters.get("algorithm") or parameters.get("algorithms") or ()
        values = [(algorithm, text) for text in ([texts] if isinstance(texts, str) else texts)]
        values += [(parse, parameters[flag]) for flag, parse in CHECKS.items() if parameters.get(flag)]
        for parse, text in values:
            if not any(placeholder in text for placeholder in PLACEHOLDERS):
                parse(text)


IN_PAGES = [
    pytest.param(arguments, id=f"{name(page)}:{block.line} {' '.join(arguments)}"[:90])
    for page in PAGES
    for block in blocks(page, "bash", "console")
    if block.marker != "fails"
    for arguments in block.commands()
]


def help_examples(command: Any = COMMAND, path: tuple[str, ...] = ()) -> list[Any]:
    """The example in the help of a command and of all commands below it."""
    _, _, example = (command.help or "").partition("Example:")
    examples = [pytest.param(" ".join(example.split()), id=" ".join(("fedflat", *path)))]
    for part, subcommand in getattr(command, "commands", {}).items():
        examples += help_examples(subcommand, (*path, part))
    return examples


def test_commands_are_found() -> None:
    assert len(IN_PAGES) > 150


@pytest.mark.parametrize("arguments", IN_PAGES)
def test_command_on_page_parses(arguments: list[str]) -> None:
    check(arguments)


@pytest.mark.parametrize("example", help_examples())
def test_example_in_help_parses(example: str) -> None:
    commands = list(calls(example))
    assert commands
    for arguments in commands:
        check(arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        ["run", "fedavg", "--round", "3", "--nonsense"],
        ["rnu", "fedavg"],
        ["run", "fedavgg"],
        ["run", "fedavg", "--partition", "dirichlet(beta=1)"],
        ["run", "fedavg", "--dataset", "cifar11"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_noticed(wrong: list[str]) -> None:
    with pytest.raises((AssertionError, UsageError, UserError)):
        check(wrong)


PREPARING_BLOCKS = {"bring-your-own.md": 3, "measure-a-model.md": 2}
"""Number of Python blocks, by page, that write the files which the commands read."""
RUN_PAGES = [page for page in PAGES if any(block.marker in ("runs", "fails") for block in blocks(page, "bash"))]


@pytest.mark.parametrize("page", RUN_PAGES, ids=name)
def test_marked_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    preparing = [block for block in blocks(page, "python") if not block.skipped]
    run_python(preparing[: PREPARING_BLOCKS.get(page.name, 0)], page)
    for block in blocks(page, "bash"):
        for arguments in block.commands() if block.marker in ("runs", "fails") else ():
            result = CliRunner().invoke(app, arguments)
            if block.marker == "fails":
                assert result.exit_code == 2 and "did you mean" in result.stderr, result.stderr
            else:
                assert result.exit_code == 0, (
                    f"{name(page)}:{block.line} {' '.join(arguments)}\n{result.stderr}\n{result.exception!r}"
                )
