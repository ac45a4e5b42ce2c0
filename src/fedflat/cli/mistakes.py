"""What goes wrong, told in one sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedflat.cli import INTERRUPTED
from fedflat.errors import UserError

WRONG_REQUEST = 2


class Interrupted(Exception):
    """The user pressed Ctrl-C; the message says how to go on."""


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Turn every mistake that a user can mend into one sentence on stderr and exit code 2."""
    try:
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
        if error.filename is None:
            raise
        raise _ends(f"cannot use {error.filename}: {(error.strerror or str(error)).lower()}", WRONG_REQUEST) from None


def _ends(sentence: str, code: int) -> typer.Exit:
    print(f"fedflat: {' '.join(sentence.split())}", file=sys.stderr)
    return typer.Exit(code)
