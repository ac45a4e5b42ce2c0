"""Errors and warnings as one-line messages on stderr, with exit codes."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from fedflat.cli import WRONG_REQUEST, interrupted_code
from fedflat.errors import UserError

PACKAGE = Path(__file__).parents[2]


class Interrupted(Exception):
    """Ctrl-C or another signal stopped the command; the message says how to continue."""


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn expected errors into one line on stderr and an exit code; print warnings of fedflat as one line each.

    Expected errors are those of the user (``UserError``), Ctrl-C, and files or disks that cannot be used.
    """
    try:
        with _one_line_warnings():
            yield
    except UserError as error:
        raise _print_error(str(error), WRONG_REQUEST) from None
    except Interrupted as interruption:
        raise _print_error(f"interrupted; {interruption}", interrupted_code()) from None
    except KeyboardInterrupt:
        raise _print_error("interrupted", interrupted_code()) from None
    except BrokenPipeError:  # an OSError that main() handles
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.filename is not None:
            raise _print_error(f"cannot use {error.filename}: {reason}", WRONG_REQUEST) from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _print_error(f"cannot write output: {reason}", WRONG_REQUEST) from None
        raise


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print warnings of fedflat without source lines; leave others unchanged."""
    original = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *details: Any) -> None:
        """Replace ``warnings.showwarning``; ``details`` are line number, output file and source line."""
        if issubclass(category, UserWarning) and Path(filename).is_relative_to(PACKAGE):
            print(f"fedflat: {message}", file=sys.stderr)
        else:
            original(message, category, filename, *details)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = original


def _print_error(message: str, code: int) -> typer.Exit:
    """Print a message to stderr on one line; return the exception to raise, which exits with ``code``."""
    print(f"fedflat: {' '.join(message.split())}", file=sys.stderr)
    return typer.Exit(code)
