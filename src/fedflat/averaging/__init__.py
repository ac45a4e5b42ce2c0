"""Averages of the server model over rounds: one module each, registered by name in ``AVERAGES``.

They are evaluated and never fed back into training. A new average is a module here plus a line below.
May import ``flatness``, ``data``, ``models`` and the base modules, but not ``algorithms``.
"""

from fedflat.averaging.base import AVERAGES, Average, AverageState, Ring, RunInfo, average_name
from fedflat.averaging.ema import Ema
from fedflat.averaging.swa import Swa
from fedflat.averaging.wima import Wima

AVERAGES.register("swa", Swa)
AVERAGES.register("wima", Wima)
AVERAGES.register("ema", Ema)

__all__ = ["AVERAGES", "Average", "AverageState", "Ema", "Ring", "RunInfo", "Swa", "Wima", "average_name"]
