"""The ``fedflat`` command line: one module per command. May import every other package."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType

RUNS_FAILED = 1
"""Exit code if runs of a comparison or sweep failed."""
USER_ERROR = 2
"""Exit code after any other user error."""
_signal: int = signal.SIGINT
"""The signal that interrupted the command."""


def interrupted_code() -> int:
    """Exit code after an interruption, as in a shell: 128 plus the number of the signal, e.g. 130 after Ctrl-C."""
    return 128 + _signal


class Interrupted(Exception):
    """Ctrl-C or another signal stopped the command; the message says how to continue."""


def main() -> None:
    """Run the command line; errors become messages on stderr, and a closed pipe is not an error."""
    # torch reads this variable on import. Threads that spin while waiting slow each other down on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # the precision is a setting
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # print ? for characters that the terminal's encoding lacks
    try:
        Path.cwd()
    except FileNotFoundError:  # importing torch would fail
        print("fedflat: the working directory was deleted; change to another one (cd)", file=sys.stderr)
        sys.exit(USER_ERROR)
    try:
        _interrupt_on_signals()
        from fedflat.cli.application import build  # here, so that Ctrl-C during imports prints no traceback

        completes = "_FEDFLAT_COMPLETE" in os.environ  # set by the shell's completion, which passes no arguments
        try:
            build(None if completes else sys.argv[1:])(prog_name="fedflat")
        finally:
            exec("")  # clears CPython's record of an interrupt within exec(), which would end `python -m` by SIGINT
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        sys.exit(1)
    except OSError as error:  # from the last flush
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        discard_output()
        print(f"fedflat: cannot write output: {os.strerror(error.errno).lower()}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(interrupted_code())


def discard_output() -> None:
    """Connect stdout to /dev/null, so that Python's flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_closed_streams() -> None:
    """Connect closed standard streams (``>&-``) and those of a closed terminal to /dev/null.

    Otherwise the next opened file would get the stream's descriptor and receive the output of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None or (name != "stdin" and not _is_open(number)):
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _is_open(descriptor: int) -> bool:
    """Whether an output stream is usable; if its terminal was closed, even an empty write fails."""
    try:
        os.write(descriptor, b"")
    except OSError as error:
        return error.errno != errno.EIO
    return True


def _interrupt_on_signals() -> None:
    """Treat SIGTERM and SIGHUP (a closed terminal) like Ctrl-C, unless they are ignored (``nohup``)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember its number for the exit code, and raise ``KeyboardInterrupt`` like Ctrl-C."""
        global _signal  # noqa: PLW0603
        _signal = number
        _replace_closed_streams()
        raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, interrupt)
