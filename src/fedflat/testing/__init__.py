"""Checks for what you bring yourself: an algorithm, a model, a dataset, a partition.

One call each, and a message that names what does not hold.

>>> from fedflat.testing import check_algorithm
>>> "engines agree" in check_algorithm("scaffold", claims=["finds the joint optimum"])
True
"""

from fedflat.testing.algorithms import CLAIMS, check_algorithm
from fedflat.testing.broken import Broken
from fedflat.testing.datasets import check_dataset
from fedflat.testing.models import check_model
from fedflat.testing.partitions import check_partition

__all__ = ["CLAIMS", "Broken", "check_algorithm", "check_dataset", "check_model", "check_partition"]
