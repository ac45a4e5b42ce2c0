"""flower-supernode with shorter intervals: it polls every 0.3 s instead of 3 s, and is missed after 20 s, not 60 s."""

from __future__ import annotations

import time
from types import SimpleNamespace

from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.cli import flower_supernode

if __name__ == "__main__":
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10), time=time.time)
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = 10
    flower_supernode()
