"""The class of all command groups."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from fedflat.errors import one_of

try:  # recent versions of Typer raise the errors of their own copy of Click
    from typer._click.exceptions import NoSuchOption, UsageError  # type: ignore[import-not-found]
except ImportError:
    from click import NoSuchOption, UsageError

__all__ = ["CommandGroup", "NoSuchOption", "UsageError"]


class CommandGroup(TyperGroup):
    """A command group that suggests the nearest command once, where Typer and Click would each suggest it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the remaining arguments; an unknown command raises a ``UsageError``."""
        try:
            return super().resolve_command(ctx, args)
        except UsageError:
            if args[0].startswith("-"):  # an unknown option, not a command
                raise
            raise UsageError(str(one_of("command", args[0], self.commands)), ctx) from None
