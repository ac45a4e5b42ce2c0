"""FedGloSS's radius, which rises in the first rounds."""

from torch import Tensor

RAMP = "number of rounds, from the first, over which the radius rises linearly from start_rho; 0 keeps it constant"
START_RHO = "radius in round 0, if ramp is above 0"


def ramped(rho: float, start_rho: float, ramp: int, round: Tensor) -> Tensor:
    """The radius in a round (counted from 0, shape ()), which rises linearly to ``rho`` in the first ``ramp`` rounds.

    >>> from torch import tensor
    >>> ramped(0.5, start_rho=0.1, ramp=4, round=tensor(1.0))
    tensor(0.2000)
    """
    return start_rho + (rho - start_rho) * round.clamp(max=ramp) / ramp
