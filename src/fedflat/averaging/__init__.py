"""Averages of the server model over rounds: one module each, registered by name in ``AVERAGES``.

They are evaluated and never fed back into training. A new average is a module here plus a line below.
May import ``flatness``, ``data``, ``models`` and the base modules, but not ``algorithms``.
"""

from fedflat.averaging.base import Average, AverageState, Ring, RunInfo
from fedflat.averaging.ema import Ema
from fedflat.averaging.swa import Swa
from fedflat.averaging.wima import Wima
from fedflat.registry import Registry
from fedflat.text import changed, show

AVERAGES: Registry[type[Average]] = Registry("average", see="fedflat algorithms", namespace="algorithm parts")
"""Averages by name."""
AVERAGES.register("swa", Swa)
AVERAGES.register("wima", Wima)
AVERAGES.register("ema", Ema)


def average_name(average: Average) -> str:
    """Return the text that identifies an averaged model in metrics and files: name and non-default parameters.

    >>> average_name(Wima(window=50))
    'wima(window=50)'
    """
    return show(AVERAGES.name_of(type(average)) or type(average).__name__.lower(), changed(average))


__all__ = ["AVERAGES", "Average", "AverageState", "Ema", "Ring", "RunInfo", "Swa", "Wima", "average_name"]
