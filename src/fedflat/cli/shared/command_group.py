"""Command groups, independent of the version of Typer; without pydantic, whose import would slow down the help."""

from __future__ import annotations

import re
from functools import wraps
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperGroup

from fedflat.errors import one_of
from fedflat.text import expand_home

try:  # recent versions of Typer contain a copy of Click
    from typer._click import exceptions, globals  # type: ignore[import-not-found]
except ImportError:
    from click import exceptions, globals
NoSuchOption, UsageError = exceptions.NoSuchOption, exceptions.UsageError
current_context = globals.get_current_context
NAMES_FILE = Path(__file__).with_name("completion_names.json")
"""Summaries of all commands, and names of all built-in components by kind; written by ``docs/generate.py``."""


def keep_argument_help() -> None:
    """Patch Typer to keep the help text of arguments, which recent versions of Click reset to None."""
    original = TyperArgument.__init__

    @wraps(original)
    def initialise(self: TyperArgument, *, help: str | None = None, **options: Any) -> None:
        original(self, help=help, **options)
        self.help = help

    TyperArgument.__init__ = initialise  # type: ignore[method-assign]


_HOME = re.compile(r"^((?:--[a-z-]+=)?)(~(?:/.*)?)$")
"""A path in the home directory, alone or as the value of an option."""


def _with_home(match: re.Match[str]) -> str:
    return f"{match[1]}{expand_home(match[2])}"


class CommandGroup(TyperGroup):
    """A command group that suggests the nearest command once, where Typer and Click would each suggest it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace ``~`` by the home directory where a shell does not, as in ``--out=~/runs``."""
        parsed: list[str] = super().parse_args(ctx, [_HOME.sub(_with_home, word) for word in args])
        return parsed

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the remaining arguments; an unknown command raises a ``UsageError``."""
        try:
            return super().resolve_command(ctx, args)
        except UsageError:
            if args[0].startswith("-"):  # an unknown option, not a command
                raise
            raise UsageError(str(one_of("command", args[0], self.commands)), ctx) from None
