"""Averages of the server's models over rounds, by name."""

from fedflat.averaging.base import Average, AverageState, Ring, RunInfo
from fedflat.averaging.ema import Ema
from fedflat.averaging.swa import Swa
from fedflat.averaging.wima import Wima
from fedflat.text import changed, show

AVERAGES: dict[str, type[Average]] = {"swa": Swa, "wima": Wima, "ema": Ema}
"""Averages, by name."""


def average_name(average: Average) -> str:
    """An average as text, by which its model is known: ``wima(window=50)``."""
    name = next(name for name, spec in AVERAGES.items() if spec is type(average))
    return show(name, changed(average))


__all__ = ["AVERAGES", "Average", "Ema", "Ring", "AverageState", "RunInfo", "Swa", "Wima", "average_name"]
