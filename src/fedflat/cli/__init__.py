"""The command line: one file per group of commands."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """The entry point: every mistake is one sentence on stderr, and a pipe that nobody reads any more is no mistake."""
    # Read by torch when it is loaded: threads that spin while they wait make a measurement take minutes where others
    # use the cores too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        from fedflat.cli.application import (
            app,
        )  # here, so that an interruption is no traceback even while modules are read

        try:
            app(prog_name="fedflat")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end, so that stdout must lead somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
