"""Errors and warnings as one-line messages on stderr, with exit codes."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import typer

from fedflat.cli import INTERRUPTED
from fedflat.errors import UserError

WRONG_REQUEST = 2
PACKAGE = Path(__file__).parents[2]


class Interrupted(Exception):
    """The user pressed Ctrl-C; the message says how to continue."""


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Print user errors as one line on stderr (exit code 2), and warnings of fedflat as one line each."""
    try:
        with _warnings_in_a_sentence():
            yield
    except UserError as mistake:
        raise _ends(str(mistake), WRONG_REQUEST) from None
    except Interrupted as interruption:
        raise _ends(f"interrupted; {interruption}", INTERRUPTED) from None
    except KeyboardInterrupt:
        raise _ends("interrupted", INTERRUPTED) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            raise _ends(f"cannot write output: {(error.strerror or str(error)).lower()}", WRONG_REQUEST) from None
        if error.filename is None:
            raise
        raise _ends(f"cannot use {error.filename}: {(error.strerror or str(error)).lower()}", WRONG_REQUEST) from None


@contextmanager
def _warnings_in_a_sentence() -> Iterator[None]:
    """Print warnings of fedflat without source lines; leave others unchanged."""
    others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UserWarning) and Path(filename).is_relative_to(PACKAGE):
            print(f"fedflat: {message}", file=sys.stderr)
        else:
            others(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = others


def _ends(sentence: str, code: int) -> typer.Exit:
    print(f"fedflat: {' '.join(sentence.split())}", file=sys.stderr)
    return typer.Exit(code)
