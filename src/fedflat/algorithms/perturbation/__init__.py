"""Perturbations, by name."""

from fedflat.algorithms.perturbation.asam import Asam
from fedflat.algorithms.perturbation.base import Perturbation
from fedflat.algorithms.perturbation.guided import Guided
from fedflat.algorithms.perturbation.lesam import Lesam
from fedflat.algorithms.perturbation.sam import Sam
from fedflat.algorithms.perturbation.smoo import Smoo

PERTURBATIONS: dict[str, type[Perturbation]] = {
    "sam": Sam,
    "asam": Asam,
    "lesam": Lesam,
    "smoo": Smoo,
    "guided": Guided,
}
"""Perturbations, by name."""

__all__ = ["PERTURBATIONS", "Asam", "Guided", "Lesam", "Perturbation", "Sam", "Smoo"]
