"""Starts the driver of the simulator that the measuring process wrote to the benchmark's folder."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import import_module
from types import FrameType

from fedflat.bench.contender_process import NoMoreRounds
from fedflat.bench.drivers import benchmark_folder
from fedflat.bench.peers import read_simulator
from fedflat.errors import UserError
from fedflat.operating_system import descendants, kill_processes

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def end(signal_number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: kill all processes that this one started, and exit.

    An exception could interrupt ``main`` while it kills these processes itself.
    """
    kill_processes(descendants(os.getpid()))
    os._exit(1)


def main(measuring_process: int) -> None:
    """Run the driver, and end all processes that it started; ``measuring_process`` is the id of this one's parent."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        # Processes that detach themselves stay descendants of this one, so that they can be paused and ended.
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        # If the measuring process is killed, this one ends too, together with all that it started.
        signal.signal(signal.SIGTERM, end)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != measuring_process:  # it was killed before the call above
            sys.exit("the measuring process has ended")
    simulator = read_simulator(benchmark_folder())
    try:
        import_module(f"fedflat.bench.drivers.{simulator.key}").run(simulator)
    except NoMoreRounds:
        return
    except UserError as error:
        sys.exit(str(error))
    finally:
        kill_processes(descendants(os.getpid()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
