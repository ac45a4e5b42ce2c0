"""Averages of the server's models over rounds, by name."""

from fedflat.averaging.base import Average, Ring, Running, Scene
from fedflat.averaging.ema import Ema
from fedflat.averaging.swa import Swa
from fedflat.averaging.wima import Wima

AVERAGES: dict[str, type[Average]] = {"swa": Swa, "wima": Wima, "ema": Ema}

__all__ = ["AVERAGES", "Average", "Ema", "Ring", "Running", "Scene", "Swa", "Wima"]
