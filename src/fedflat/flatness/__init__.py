"""How flat a loss is around a model: curvature, sharpness, landscape. Pure mathematics: any torch module, any loss, any data."""

from fedflat.flatness.curvature import Spectrum, spectrum_of
from fedflat.flatness.directions import directions_around, filter_normalised
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.lanczos import Eigenpairs, Ends, Largest, lanczos
from fedflat.flatness.landscape import landscape_around, landscape_of
from fedflat.flatness.objective import Objective
from fedflat.flatness.operator import Operator
from fedflat.flatness.outside import density, sharpness, spectrum, trace
from fedflat.flatness.path import Barrier, barrier, path_landscape, path_of
from fedflat.flatness.plane import Plane, plane_landscape, plane_of
from fedflat.flatness.power import power
from fedflat.flatness.quadrature import Density
from fedflat.flatness.radius import Sharpness, sharpness_of
from fedflat.flatness.survey import Landscape, Mark, Model

__all__ = [
    "Barrier",
    "Density",
    "Eigenpairs",
    "Ends",
    "Estimate",
    "Landscape",
    "Largest",
    "Mark",
    "Model",
    "Objective",
    "Operator",
    "Plane",
    "Sharpness",
    "Spectrum",
    "barrier",
    "density",
    "directions_around",
    "filter_normalised",
    "lanczos",
    "landscape_around",
    "landscape_of",
    "path_landscape",
    "path_of",
    "plane_landscape",
    "plane_of",
    "power",
    "sharpness",
    "sharpness_of",
    "spectrum",
    "spectrum_of",
    "trace",
]
