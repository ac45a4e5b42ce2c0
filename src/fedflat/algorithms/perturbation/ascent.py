"""Base class of perturbations that need a gradient of their own."""

from fedflat.algorithms.slot import Perturbation


class AscentStep(Perturbation):
    """The offset depends on the gradient at the client's model, which costs one backward pass unless rho is 0."""

    rho: float

    @property
    def ascent_passes(self) -> int:
        return 1 if self.rho else 0
