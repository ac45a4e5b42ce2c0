"""Reference of the command line and of every setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from fedflat.cli.application import app
from fedflat.cli.lookup.settings import kind_of
from fedflat.cli.shared.flags import FLAGS, field_of
from fedflat.experiment.config import Config, setting_names
from fedflat.text import write_value
from making.markdown import block, code, joined, table


def pages() -> dict[str, str]:
    """The pages of the reference."""
    return {"reference/commands.md": commands(), "reference/settings.md": settings()}


def commands() -> str:
    """Every command with its arguments and flags."""
    lines = [
        "# Commands",
        "",
        "Every command, argument and flag, as `--help` shows them; [what the commands are for](../cli.md) is told elsewhere. This page is made from the code.",
        "",
    ]
    for path, command in walk(typer.main.get_command(app)):
        lines += [f"## fedflat {' '.join(path)}", "", *_command(path, command)]
    return joined(lines)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, by its path."""
    inside = getattr(command, "commands", {})
    if not inside:
        yield path, command
    for name, one in inside.items():
        yield from walk(one, (*path, name))


def _command(path: tuple[str, ...], command: Any) -> list[str]:
    help_text, _, example = (command.help or "").partition("Example:")
    about = " ".join(help_text.split())
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    rows = [
        (code(p.metavar or p.human_readable_name.upper()), _text(getattr(p, "help", "")), "")
        for p in arguments
        if _text(getattr(p, "help", ""))
    ]
    rows += [(", ".join(map(code, (*p.opts, *p.secondary_opts))), *_told(p)) for p in options if not p.hidden]
    usage = block([" ".join(example.split())], "bash") if example.strip() else []
    return [about, "", *usage, *table(("flag", "meaning", "default"), rows)]


def _text(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def _told(option: Any) -> tuple[str, str]:
    """What an option means, and its default, which the help of some has in brackets."""
    found = re.fullmatch(r"(.*?) ?\[dim\]\(default: (.*)\)\[/dim\]", _text(option.help))
    if found:
        return found[1], code(found[2])
    value = option.default
    if value in (None, False, (), []) or callable(value) or option.is_flag:
        return _text(option.help), ""
    return _text(option.help), code(
        ",".join(map(str, value)) if isinstance(value, (list, tuple)) else write_value(value)
    )


def settings() -> str:
    """Every setting by section."""
    flags = {full: f"--{flag.replace('_', '-')}" for flag, full in FLAGS.items()}
    sections: dict[str, list[tuple[str, ...]]] = {}
    for name in setting_names():
        field = field_of(name)
        section = name.partition(".")[0] if "." in name else ""
        default = "" if field.default is None else code(write_value(field.default))
        sections.setdefault(section, []).append(
            (code(name), kind_of(field.annotation), default, code(flags.get(name)), field.description or "")
        )
    lines = [
        "# Settings",
        "",
        "Everything that can be said of an experiment. The same names stand in a YAML file (`--config`), behind `--set NAME=VALUE`, and in Python,",
        "where `training.lr_decay` is written `training__lr_decay`; common ones have a flag and, in Python, its name. `fedflat settings` lists them too.",
        "",
    ]
    for section, rows in sections.items():
        said = Config.model_fields[section].annotation.__doc__ if section else "The experiment itself."
        lines += [
            f"## {section or 'Experiment'}",
            "",
            said or "",
            "",
            *table(("setting", "type", "default", "flag", "meaning"), rows),
        ]
    return joined(lines)
