"""What to try, generated from the command line, the settings and the registries, so that new options are covered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from fedflat.algorithms.composition import PART_REGISTRIES
from fedflat.cli.application import app
from fedflat.data import AUGMENTATIONS, PARTITION_MODIFIERS, PARTITIONERS
from fedflat.experiment.config import setting_names
from fedflat.models import MODELS
from fedflat.privacy import MECHANISMS
from fedflat.text import parameters
from fedflat.timing import CLOCK_PARTS, POLICIES
from tests.fuzz.workspace import DAMAGE, DAMAGED_FOLDER, FILES, WRONG_CONTENT

HOSTILE = {
    "empty": "",
    "blank": " ",
    "NaN": "nan",
    "infinite": "inf",
    "negative": "-1",
    "zero": "0",
    "1e12": "1e12",
    "10^12": "1000000000000",
    "10^30": "1" + "0" * 30,
    "NUL": "a\0b",
    "Unicode": "Ω\u202e\U0001f642",
    "not UTF-8": "\udcff",
    "newline": "a\nb",
    "open bracket": "a(b",
    "brackets": "[({<",
    "commas": ",,",
    "braces": "{x}%s",
    "directory": ".",
    "parent": "../..",
    "missing file": "missing/file.npz",
    "long": "x" * 5000,
}
"""Values that are tried for every argument and option, by name."""
NEVER_VALID = {
    "float": {"empty", "NaN", "infinite", "NUL", "not UTF-8", "Unicode", "brackets", "commas", "directory"},
    "text": {"NUL", "not UTF-8"},
}
"""Hostile values that a command must reject, for options that take numbers and for all others."""
NUMBERS = ("nan", "inf", "-1", "0", "1e12", "1" + "0" * 30, "true", "", "none", "word")
"""Values that are tried for every parameter of every component and for every setting."""
TINY = {
    "--rounds": "1",
    "--local-steps": "1",
    "--clients": "4",
    "--clients-per-round": "2",
    "--model": "mlp(hidden=2)",
    "--dataset": "data.npz",
    "--partition": "iid",
    "--workers": "1",
    "--device": "cpu",
}
"""Flags that make a run tiny."""
FEW = {"--examples": "8", "--device": "cpu"}
Call = tuple[tuple[str, ...], dict[str, str]]
VALID: dict[str, Call] = {
    "run": (("fedavg",), {**TINY, "--out": "new"}),
    "compare": (("fedavg", "fedsam"), {**TINY, "--seeds": "1", "--jobs": "1", "--out": "new"}),
    "sweep": (("sweep.yaml",), {"--out": "new", "--jobs": "1", "--dry-run": ""}),
    "tune": (("tune.yaml",), {"--out": "new", "--jobs": "1", "--dry-run": ""}),
    "discover": (("space.yaml",), {"--out": "new", "--jobs": "1", "--minutes": "1", "--dry-run": ""}),
    "branch": (("run@1", "fedavg", "fedsam"), {"--rounds": "3", "--jobs": "1", "--out": "new", "--dry-run": ""}),
    "reproduce": (("fedswa/table6",), {"--dry-run": "", "--data-dir": "datasets"}),
    "resume": (("run",), {}),
    "show": (("run",), {}),
    "watch": (("run",), {"--once": ""}),
    "report": (("run",), {"--out": "new.html"}),
    "evaluate": (("run",), {}),
    "export": (("run",), {"--out": "new.pt"}),
    "new": (("algorithm", "mine"), {"--out": "new.py"}),
    "clean": (("run",), {}),
    "bench": ((), {**TINY, "--dataset": "missing.npz"}),  # every measurement starts processes: too slow to try
    "algorithms": (("fedavg",), {}),
    "models": (("mlp",), {}),
    "papers": ((), {}),
    "settings": ((), {}),
    "doctor": ((), {}),
    "flatness spectrum": (("run",), {**FEW, "--iterations": "2", "--eigenvalues": "1"}),
    "flatness sharpness": (("run",), FEW),
    "flatness norms": (("run",), {**FEW, "--draws": "2", "--directions": "1"}),
    "flatness landscape": (("run",), {**FEW, "--points": "3", "--dimensions": "1"}),
    "flatness plane": (("run", "run:server@1", "run:server@0"), {**FEW, "--points": "3"}),
    "flatness path": (("run:server@0", "run"), {**FEW, "--points": "3", "--curve-steps": "2"}),
    "flatness clients": (("run",), {"--examples": "8"}),
    "flatness similarity": (("run",), {"--examples": "8", "--eigenvectors": "1"}),
    "flatness log": (("run",), {}),
    "flatness gap": (("run",), {"--examples": "8"}),
    "flatness bounds": (("run",), {"--examples": "8", "--clients": "2"}),
    "flatness stability": (
        ("fedavg",),
        {**{key: value for key, value in TINY.items() if key != "--workers"}, "--twins": "1", "--examples": "8"},
    ),
    "deploy init": (("new",), {}),
    "deploy certificates": (("new",), {}),
    "deploy gateway": (("new",), {}),
    "deploy check": (("localhost:1",), {"--insecure": ""}),
    "data list": ((), {"--data-dir": "datasets"}),
    "data get": (("digits",), {"--data-dir": "datasets"}),
    "data verify": (("digits",), {"--data-dir": "datasets"}),
    "data describe": (("data.npz",), {"--clients": "4", "--partition": "iid"}),
}
"""A valid call of every command, into which hostile values are put: its arguments, and its options."""


@dataclass(frozen=True)
class Case:
    """A command line to try.

    Attributes:
        arguments: the command line without ``fedflat``.
        is_nonsense: whether the command must reject it.
        damage: a file of the workspace to damage first, and how.
        wrong_content: an entry of ``WRONG_CONTENT`` to apply first.
    """

    arguments: tuple[str, ...]
    is_nonsense: bool = False
    damage: tuple[str, str] | None = None
    wrong_content: str | None = None

    def __str__(self) -> str:
        words = " ".join(
            repr(word[:60]) if not word.isprintable() or " " in word else word[:60] for word in self.arguments
        )
        if self.wrong_content is not None:
            return f"{words} [{self.wrong_content}]"
        return words if self.damage is None else f"{words} [{self.damage[0]}: {self.damage[1]}]"


def all_cases() -> list[Case]:
    """Every case, in a fixed order."""
    return [*option_cases(), *setting_cases(), *component_cases(), *file_cases(), *content_cases()]


def commands() -> dict[str, Any]:
    """Every command of ``fedflat`` by its name, such as ``flatness spectrum``."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield name, command
            return
        for word, subcommand in command.commands.items():
            yield from walk(subcommand, f"{name} {word}".strip())

    return dict(walk(typer.main.get_command(app), ""))


def command_line(name: str, changes: Mapping[str, str] = {}, positions: Mapping[int, str] = {}) -> tuple[str, ...]:
    """The valid call of a command with some options and positional arguments changed."""
    arguments, options = VALID[name]
    words = name.split()
    for flag, value in {**options, **changes}.items():
        words += [flag] if flag in ("--dry-run", "--once", "--insecure") else [f"{flag}={value}"]
    values = [positions.get(position, value) for position, value in enumerate(arguments)]
    values += [value for position, value in positions.items() if position >= len(arguments)]
    return (*words, *values)


def option_cases() -> Iterator[Case]:
    """Every hostile value for every argument and option of every command."""
    for name, command in commands().items():
        position = 0
        for parameter in command.params:
            if getattr(parameter, "is_flag", False):
                continue
            kind = "float" if parameter.type.name.startswith(("float", "integer")) else "text"
            is_option = parameter.param_type_name == "option"
            for label, value in HOSTILE.items():
                changed = {parameter.opts[0]: value} if is_option else {}
                line = command_line(name, changed, {} if is_option else {position: value})
                yield Case(line, is_nonsense=label in NEVER_VALID[kind])
            position += not is_option


def setting_cases() -> Iterator[Case]:
    """Hostile values for every setting of a config."""
    for name in setting_names():
        for value in (*NUMBERS, "[1]", "{a: 1}", ".nan", ".inf", "a\0b", "&a [*a]"):
            yield Case((*command_line("run"), "--set", f"{name}={value}"), is_nonsense=value in (".nan", ".inf"))


def component_cases() -> Iterator[Case]:
    """Hostile values for every parameter of every model, partition, augmentation, clock, policy and algorithm part."""
    registries: dict[str, Mapping[str, Any]] = {
        "--model": MODELS,  # type: ignore[dict-item]
        "--partition": {**PARTITIONERS, **PARTITION_MODIFIERS},
        "--augmentation": AUGMENTATIONS,
        "--clock": CLOCK_PARTS,
        "--policy": POLICIES,
        "--privacy": MECHANISMS,
    }
    for flag, registry in registries.items():
        for name in registry:
            for field in parameters(registry[name]):
                for value in NUMBERS:
                    text = f"{name}({field.name}={value})"
                    text = f"iid+{text}" if name in PARTITION_MODIFIERS else text
                    changed = {flag: text} | ({"--clock": "lognormal"} if flag == "--policy" else {})
                    yield Case(command_line("run", changed), is_nonsense=value in ("nan", "inf"))
    for parts in PART_REGISTRIES.values():
        for name in parts:
            for field in parameters(parts[name]):
                for value in NUMBERS:
                    text = f"fedavg+{name}({field.name}={value})"
                    yield Case(command_line("run", {}, {0: text}), is_nonsense=value in ("nan", "inf"))


def file_cases() -> Iterator[Case]:
    """Every damage to every file that a command reads."""
    for file, lines in FILES.items():
        for damage in DAMAGE:
            for line in lines:
                yield Case(tuple(line.split()), damage=(file, damage))
    for command in ("show", "report", "resume", "evaluate", "export", "watch", "clean", "flatness gap"):
        for damage in DAMAGE:
            yield Case(command_line(command), damage=(DAMAGED_FOLDER, damage))


def content_cases() -> Iterator[Case]:
    """Every file with wrong content, for every command that reads it."""
    for name, (_, _, lines) in WRONG_CONTENT.items():
        for line in lines:
            yield Case(tuple(line.split()), wrong_content=name)
