"""flower-supernode that asks for messages every 0.3 seconds instead of every 3 seconds."""

from __future__ import annotations

import time
from types import SimpleNamespace

from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

if __name__ == "__main__":
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10))
    flower_supernode()
