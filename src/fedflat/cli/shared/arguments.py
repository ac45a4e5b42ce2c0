"""Arguments that explain themselves: Click from 8.5 on forgets the help that Typer up to 0.20 gives them."""

from __future__ import annotations

from functools import wraps
from typing import Any

from typer.core import TyperArgument


def keep_help() -> None:
    """From now on an argument keeps its help, whatever is made of it further down."""
    given = TyperArgument.__init__

    @wraps(given)
    def made(self: TyperArgument, *, help: str | None = None, **rest: Any) -> None:
        given(self, help=help, **rest)
        self.help = help

    TyperArgument.__init__ = made  # type: ignore[method-assign]
