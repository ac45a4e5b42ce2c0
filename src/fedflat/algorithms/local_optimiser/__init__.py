"""Local optimisers: one module each, registered by name in ``LOCAL_OPTIMISERS``.

A new local optimiser is a module here plus a line below. May import ``slot`` and ``descent``.
"""

from fedflat.algorithms.local_optimiser.adamw import AdamW
from fedflat.algorithms.local_optimiser.base import LOCAL_OPTIMISERS, LocalOptimiser
from fedflat.algorithms.local_optimiser.fedadamw import FedAdamW
from fedflat.algorithms.local_optimiser.fedmuon import FedMuon
from fedflat.algorithms.local_optimiser.local_adam import LocalAdam
from fedflat.algorithms.local_optimiser.muon import Muon

LOCAL_OPTIMISERS.register("adamw", AdamW)
LOCAL_OPTIMISERS.register("local-adam", LocalAdam)
LOCAL_OPTIMISERS.register("muon", Muon)
LOCAL_OPTIMISERS.register("fedadamw", FedAdamW)
LOCAL_OPTIMISERS.register("fedmuon", FedMuon)

__all__ = ["LOCAL_OPTIMISERS", "AdamW", "FedAdamW", "FedMuon", "LocalAdam", "LocalOptimiser", "Muon"]
