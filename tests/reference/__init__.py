"""An independent float64 reference of every method in numpy, written from the papers.

It shares no code with fedflat: every method is its own loop over rounds and clients.
"""

from . import averages, identities
from .averages import cyclic_rates
from .golden import GOLDEN, Golden
from .golden_softmax import GOLDEN_SOFTMAX
from .methods import METHODS
from .problem import Quadratics, Setting, bed, draw_cohorts, golden
from .softmax import Softmax, golden_softmax
from .trace import Trace, linear_rates, unit

__all__ = [
    "GOLDEN",
    "GOLDEN_SOFTMAX",
    "METHODS",
    "Golden",
    "Quadratics",
    "Setting",
    "Softmax",
    "Trace",
    "averages",
    "bed",
    "cyclic_rates",
    "draw_cohorts",
    "golden",
    "golden_softmax",
    "identities",
    "linear_rates",
    "unit",
]
