"""Client weights, with which the server averages displacements: one module each, registered by name in ``WEIGHTS``.

New client weights are a module here plus a line below. May import ``slot``, ``start`` and ``perturbation``.
"""

from fedflat.algorithms.weights.aligned import Aligned
from fedflat.algorithms.weights.awa import Awa
from fedflat.algorithms.weights.base import ClientRows, Weights
from fedflat.algorithms.weights.disco import Disco
from fedflat.registry import Registry

WEIGHTS: Registry[type[Weights]] = Registry("client weights", see="fedflat algorithms", namespace="algorithm parts")
"""Client weights by name."""
WEIGHTS.register("disco", Disco)
WEIGHTS.register("aligned", Aligned)
WEIGHTS.register("awa", Awa)

__all__ = ["WEIGHTS", "Aligned", "Awa", "ClientRows", "Disco", "Weights"]
