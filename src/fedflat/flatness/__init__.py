"""How flat a loss is around a model: curvature, sharpness, landscape. Pure mathematics: any torch module, any loss, any data."""

from fedflat.flatness.curvature import Spectrum, spectrum_of
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.lanczos import Eigenpairs, Ends, Largest, lanczos
from fedflat.flatness.objective import Objective
from fedflat.flatness.operator import Operator
from fedflat.flatness.outside import density, sharpness, spectrum, trace
from fedflat.flatness.power import power
from fedflat.flatness.quadrature import Density
from fedflat.flatness.radius import Sharpness, sharpness_of

__all__ = [
    "Density",
    "Eigenpairs",
    "Ends",
    "Estimate",
    "Largest",
    "Objective",
    "Operator",
    "Sharpness",
    "Spectrum",
    "density",
    "lanczos",
    "power",
    "sharpness",
    "sharpness_of",
    "spectrum",
    "spectrum_of",
    "trace",
]
