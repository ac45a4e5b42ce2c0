"""Reference pages of the command line and of all settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from fedflat.cli.application import app
from fedflat.cli.lookup.settings import kind_of
from fedflat.cli.shared.flags import FLAGS, field_of
from fedflat.experiment.config import Config, setting_names
from fedflat.text import show_value
from making.markdown import block, code, joined, summary, table


def pages() -> dict[str, str]:
    """The reference pages by path."""
    return {"reference/commands.md": commands(), "reference/settings.md": settings()}


def commands() -> str:
    """Every command with its arguments and flags."""
    lines = [
        "# Commands and flags",
        "",
        "This page lists every command with its arguments and flags, as `--help` shows them. See [Command line](../cli.md) for an",
        "introduction. This page is generated from the code.",
        "",
    ]
    for path, command in leaf_commands(typer.main.get_command(app)):
        lines += [f"## fedflat {' '.join(path)}", "", *_command(command)]
    return joined(lines)


def leaf_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that is not a group, with the words that call it."""
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from leaf_commands(child, (*path, name))


def _command(command: Any) -> list[str]:
    description, _, example = (command.help or "").partition("Example:")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    rows = [
        (code(p.metavar or p.human_readable_name.upper()), _one_line(p.help), "")
        for p in arguments
        if _one_line(getattr(p, "help", ""))
    ]
    rows += [(", ".join(map(code, (*p.opts, *p.secondary_opts))), *_option(p)) for p in options if not p.hidden]
    usage = block([_one_line(example)], "bash") if example.strip() else []
    return [_one_line(description), "", *usage, *table(("argument or flag", "meaning", "default"), rows)]


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _option(option: Any) -> tuple[str, str]:
    """Meaning and default of an option; some help texts carry the default themselves."""
    text, value = _one_line(option.help), option.default
    inline = re.fullmatch(r"(.*?) ?\[dim\]\(default: (.*)\)\[/dim\]", text)
    if inline:
        return inline[1], code(inline[2])
    if value in (None, False, (), []) or callable(value) or option.is_flag:
        return text, ""
    return text, code(",".join(map(str, value)) if isinstance(value, (list, tuple)) else show_value(value))


HEADINGS = {"": "Experiment", "training": "training: learning rate, batch size, local epochs"}
"""Headings that contain further words, for readers who search the page for them."""


def settings() -> str:
    """Every setting, by section."""
    flags = {setting: f"--{flag.replace('_', '-')}" for flag, setting in FLAGS.items()}
    sections: dict[str, list[tuple[str, ...]]] = {}
    for name in setting_names():
        field = field_of(name)
        section = name.partition(".")[0] if "." in name else ""
        default = "" if field.default is None else code(show_value(field.default))
        sections.setdefault(section, []).append(
            (code(name), kind_of(field.annotation), default, code(flags.get(name)), field.description or "")
        )
    lines = [
        "# Settings",
        "",
        "This page lists all settings of an experiment. Use their names in a YAML file (`--config`), with `--set NAME=VALUE`,",
        "and in Python, where `training.lr_decay` is written `training__lr_decay`. Common settings also have a flag; its",
        "name works in Python, too (`--lr-decay` and `lr_decay`). `fedflat settings` prints the same list. This page is",
        "generated from the code.",
        "",
    ]
    for section, rows in sections.items():
        description = summary(Config.model_fields[section].annotation) if section else "The experiment itself."
        columns = ("setting", "type", "default", "flag", "meaning")
        lines += [f"## {HEADINGS.get(section, section)}", "", description, "", *table(columns, rows)]
    return joined(lines)
