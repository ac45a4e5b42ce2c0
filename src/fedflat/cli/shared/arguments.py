"""Help texts of arguments: Click 8.5 drops those that Typer up to 0.20 sets."""

from __future__ import annotations

from functools import wraps
from typing import Any

from typer.core import TyperArgument


def keep_help() -> None:
    """Make arguments keep their help text."""
    given = TyperArgument.__init__

    @wraps(given)
    def made(self: TyperArgument, *, help: str | None = None, **rest: Any) -> None:
        given(self, help=help, **rest)
        self.help = help

    TyperArgument.__init__ = made  # type: ignore[method-assign]
