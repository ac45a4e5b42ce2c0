"""Perturbations: one module each, registered by name in ``PERTURBATIONS``.

A new perturbation is a module here plus a line below. May import ``slot`` and ``drift``.
"""

from fedflat.algorithms.perturbation.asam import Asam
from fedflat.algorithms.perturbation.guided import Guided
from fedflat.algorithms.perturbation.lesam import Lesam
from fedflat.algorithms.perturbation.ramped_sam import RampedSam
from fedflat.algorithms.perturbation.sam import Sam
from fedflat.algorithms.perturbation.scam import Scam
from fedflat.algorithms.perturbation.smoo import Smoo
from fedflat.algorithms.perturbation.sol import Sol
from fedflat.algorithms.slot import Perturbation
from fedflat.registry import Registry

PERTURBATIONS: Registry[type[Perturbation]] = Registry(
    "perturbation", see="fedflat algorithms", namespace="algorithm parts"
)
"""Perturbations by name."""
PERTURBATIONS.register("sam", Sam)
PERTURBATIONS.register("asam", Asam)
PERTURBATIONS.register("lesam", Lesam)
PERTURBATIONS.register("smoo", Smoo)
PERTURBATIONS.register("guided", Guided)
PERTURBATIONS.register("sol", Sol)
PERTURBATIONS.register("ramped-sam", RampedSam)
PERTURBATIONS.register("scam", Scam)

__all__ = ["PERTURBATIONS", "Asam", "Guided", "Lesam", "Perturbation", "RampedSam", "Sam", "Scam", "Smoo", "Sol"]
