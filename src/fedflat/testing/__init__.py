"""Checks for user-defined algorithms, models, datasets and partitions, and example inputs for the methods of slots.

Each check is one call that returns the verified properties and raises ``Broken`` with the first violated one.
May import ``engines`` and below, but not ``experiment``.

>>> from fedflat.testing import check_algorithm
>>> "engines agree" in check_algorithm("scaffold", claims=["finds the joint optimum"])
True
"""

from fedflat.testing.algorithms import CLAIMS, check_algorithm
from fedflat.testing.broken import Broken
from fedflat.testing.datasets import check_dataset
from fedflat.testing.models import check_model
from fedflat.testing.partitions import check_partition
from fedflat.testing.slots import cohort_means, local_context, run_info

__all__ = [
    "CLAIMS",
    "Broken",
    "check_algorithm",
    "check_dataset",
    "check_model",
    "check_partition",
    "cohort_means",
    "local_context",
    "run_info",
]
