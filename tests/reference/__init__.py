"""An independent float64 reference of every method in numpy, written from the papers.

It shares no code with fedflat: every method is its own loop over rounds and clients.
"""

from . import averages, identities
from .averages import cyclic_rates, ema, swa, wima, wima_closed_form
from .golden import GOLDEN, Golden
from .methods import METHODS
from .problem import Quadratics, Recording, Setting, bed, draw_cohorts, golden
from .trace import Trace, linear_rates, unit

__all__ = [
    "GOLDEN",
    "METHODS",
    "Golden",
    "Quadratics",
    "Recording",
    "Setting",
    "Trace",
    "averages",
    "bed",
    "cyclic_rates",
    "draw_cohorts",
    "ema",
    "golden",
    "identities",
    "linear_rates",
    "swa",
    "unit",
    "wima",
    "wima_closed_form",
]
