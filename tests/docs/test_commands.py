"""Every fedflat command in the documentation and in a command's own help exists with all its flags, and those marked so run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from fedflat.algorithms import algorithm
from fedflat.cli.application import app
from fedflat.data import canonical_dataset, canonical_partition
from fedflat.models import canonical_model
from tests.docs.blocks import PAGES, blocks, calls, name

COMMAND: Any = typer.main.get_command(app)
CHECKS = {"partition": canonical_partition, "model": canonical_model, "data": canonical_dataset}
"""Texts behind flags, each of which must be readable."""


def understood(arguments: list[str]) -> None:
    """Parse a command as fedflat would, up to the point where it would start to work."""
    command, path, rest = COMMAND, ["fedflat"], list(arguments)
    if rest[0].startswith("--"):  # of fedflat itself
        assert rest[0] in {option for parameter in COMMAND.params for option in parameter.opts}
        return
    while getattr(command, "commands", None):
        assert rest and rest[0] in command.commands, f"there is no command '{' '.join([*path, *rest[:1]])}'"
        path.append(rest[0])
        command = command.commands[rest.pop(0)]
    parameters = command.make_context(path[-1], rest, resilient_parsing=False).params
    if path[1] in ("run", "compare"):
        for flag, check in CHECKS.items():
            if parameters.get(flag) and "FOLDER" not in str(parameters[flag]):
                check(str(parameters[flag]))
    if path[1] in ("run", "compare"):
        texts = parameters.get("algorithm") or parameters.get("algorithms") or ()
        for text in [texts] if isinstance(texts, str) else texts:
            if not text.startswith("damped") and not text.startswith("ALGORITHM"):
                algorithm(text)


IN_PAGES = [
    pytest.param(arguments, id=f"{name(page)}:{block.line} {' '.join(arguments)}"[:90])
    for page in PAGES
    for block in blocks(page, "bash", "console")
    if block.said != "fails"
    for arguments in block.commands()
]


def helps(command: Any = COMMAND, path: tuple[str, ...] = ()) -> list[Any]:
    """The example in the help of every command."""
    _, _, example = (command.help or "").partition("Example:")
    found = [pytest.param(" ".join(example.split()), id=" ".join(("fedflat", *path)))]
    return found + [
        one for part, inside in getattr(command, "commands", {}).items() for one in helps(inside, (*path, part))
    ]


def test_there_are_commands_to_look_at() -> None:
    assert len(IN_PAGES) > 150


@pytest.mark.parametrize("arguments", IN_PAGES)
def test_commands_on_pages_exist_with_their_flags(arguments: list[str]) -> None:
    understood(arguments)


@pytest.mark.parametrize("example", helps())
def test_examples_in_help_exist_with_their_flags(example: str) -> None:
    found = list(calls(example))
    assert found
    for arguments in found:
        understood(arguments)


def test_a_wrong_flag_or_command_or_text_is_noticed() -> None:
    for wrong in (["run", "fedavg", "--round", "3", "--nonsense"], ["rnu", "fedavg"]):
        with pytest.raises((AssertionError, click.exceptions.UsageError)):
            understood(wrong)
    for wrong in (
        ["run", "fedavgg"],
        ["run", "fedavg", "--partition", "dirichlet(beta=1)"],
        ["run", "fedavg", "--dataset", "cifar11"],
    ):
        with pytest.raises(Exception, match=r"did you mean|expected|no parameter"):
            understood(wrong)


RUN_PAGES = [page for page in PAGES if any(block.said in ("runs", "fails") for block in blocks(page, "bash"))]


@pytest.mark.parametrize("page", RUN_PAGES, ids=name)
def test_marked_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _prepare(page)
    for block in blocks(page, "bash"):
        for arguments in block.commands() if block.said in ("runs", "fails") else ():
            result = CliRunner().invoke(app, arguments)
            if block.said == "fails":
                assert result.exit_code == 2 and "did you mean" in result.stderr, result.stderr
            else:
                assert result.exit_code == 0, (
                    f"{name(page)}:{block.line} {' '.join(arguments)}\n{result.stderr}\n{result.exception!r}"
                )


def _prepare(page: Path) -> None:
    """The file that the first block of the page on own data writes."""
    if page.name == "bring-your-own.md":
        exec(blocks(page, "python")[0].code, {})
