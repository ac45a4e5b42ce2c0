"""Flatness of a loss around a model: curvature, sharpness and landscapes, for any torch module, loss and data.

Holds only mathematics on modules and tensors. May import ``fedflat.models.layout``, ``errors``, ``display`` and
``randomness``; ``plot`` methods import their figures from ``fedflat.reporting`` when called.
"""

from fedflat.flatness.curvature.lanczos import Eigenpairs, Ends, Largest, lanczos
from fedflat.flatness.curvature.layers import LayerCurvature
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.curvature.power import power
from fedflat.flatness.curvature.spectrum import Spectrum, spectrum_of
from fedflat.flatness.curvature.trace import Density
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.landscapes.alignment import aligned
from fedflat.flatness.landscapes.curve import curve_of
from fedflat.flatness.landscapes.directions import directions_around, filter_normalised
from fedflat.flatness.landscapes.grid import Landscape, Mark, Model
from fedflat.flatness.landscapes.landscape import landscape_around, landscape_of
from fedflat.flatness.landscapes.path import Barrier, barrier, path_landscape, path_of
from fedflat.flatness.landscapes.plane import Plane, plane_landscape, plane_of
from fedflat.flatness.module_api import density, landscape, norms, sharpness, spectrum, trace
from fedflat.flatness.norms import Norms, norms_of, relative_flatness
from fedflat.flatness.objective import Objective
from fedflat.flatness.sharpness import Sharpness, sharpness_of
from fedflat.flatness.similarity import features_of, linear_cka, subspace_overlap, top_eigenvectors

__all__ = [
    "Barrier",
    "Density",
    "Eigenpairs",
    "Ends",
    "Estimate",
    "Landscape",
    "Largest",
    "LayerCurvature",
    "Mark",
    "Model",
    "Norms",
    "Objective",
    "Operator",
    "Plane",
    "Sharpness",
    "Spectrum",
    "aligned",
    "barrier",
    "curve_of",
    "density",
    "directions_around",
    "features_of",
    "filter_normalised",
    "lanczos",
    "landscape",
    "landscape_around",
    "landscape_of",
    "linear_cka",
    "norms",
    "norms_of",
    "path_landscape",
    "path_of",
    "plane_landscape",
    "plane_of",
    "power",
    "relative_flatness",
    "sharpness",
    "sharpness_of",
    "spectrum",
    "spectrum_of",
    "subspace_overlap",
    "top_eigenvectors",
    "trace",
]
