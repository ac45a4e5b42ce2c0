"""SuperNodes that poll every 0.3 seconds instead of every 3, as forks of one process, because imports take seconds.

Each line of stdin is a JSON value: a list of a log file and the arguments of a node starts the node and prints its
process id; a process id prints the exit code of that node once, or null while it runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace

from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode


def serve() -> None:
    """Do what stdin asks for; returns only in the process of a node, with the node's arguments in ``sys.argv``."""
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
        elif process := os.fork():
            print(process, flush=True)
        else:
            os.setsid()
            log, *sys.argv[1:] = request
            written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream, descriptor in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
                os.dup2(stream, descriptor)
            return
    raise SystemExit


if __name__ == "__main__":
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10))
    serve()
    flower_supernode()
