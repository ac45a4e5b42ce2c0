"""The ``fedflat`` command line: one module per command. May import every other package."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""


class Interrupted(Exception):
    """The user pressed Ctrl-C; the message says how to continue."""


def main() -> None:
    """Run the command line; errors become messages on stderr, and a closed pipe is not an error."""
    # Read by torch at import: spinning threads slow measurements down on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        from fedflat.cli.application import app  # here, so that Ctrl-C during imports prints no traceback

        try:
            app(prog_name="fedflat")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout at exit; into /dev/null, that cannot fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
