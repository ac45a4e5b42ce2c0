"""Time limits for tests that wait for other processes."""

from __future__ import annotations

import os


def scaled(seconds: float) -> float:
    """A time limit, extended if the machine has more runnable processes than cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
