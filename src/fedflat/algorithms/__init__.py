"""Federated algorithms as combinations of slots: drift correction, perturbation, local optimiser and others.

``named`` lists the published algorithms; ``composition`` reads and writes texts such as ``fedmoswa+asam(rho=0.5)``.
May import ``averaging``, ``data``, ``models`` and the base modules, but no engine.
"""

from fedflat.algorithms.algorithm import Algorithm
from fedflat.algorithms.composition import algorithm, canonical, register

__all__ = ["Algorithm", "algorithm", "canonical", "register"]
