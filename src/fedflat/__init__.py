"""fedflat: federated learning that finds flat minima under heterogeneous data, and proves it.

>>> import fedflat
>>> fedflat.algorithm("scaffold+sam(rho=0.1)") == fedflat.algorithm("fedgamma")
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedflat.algorithms import Algorithm, algorithm, canonical, register
    from fedflat.api import Rounds, compare, load, resume, rounds, run, sweep
    from fedflat.engines.problem.task import Classification, Task
    from fedflat.errors import UserError
    from fedflat.experiment.callback import Callback
    from fedflat.experiment.rounds import Round
    from fedflat.reporting.result import Comparison, Result

# Imported when first used, so that importing fedflat costs no more than importing torch.
_WHERE = {
    "Algorithm": "fedflat.algorithms",
    "algorithm": "fedflat.algorithms",
    "canonical": "fedflat.algorithms",
    "compare": "fedflat.api",
    "load": "fedflat.api",
    "register": "fedflat.algorithms",
    "resume": "fedflat.api",
    "Round": "fedflat.experiment.rounds",
    "Rounds": "fedflat.api",
    "rounds": "fedflat.api",
    "run": "fedflat.api",
    "sweep": "fedflat.api",
    "UserError": "fedflat.errors",
    "Callback": "fedflat.experiment.callback",
    "Classification": "fedflat.engines.problem.task",
    "Task": "fedflat.engines.problem.task",
    "Comparison": "fedflat.reporting.result",
    "Result": "fedflat.reporting.result",
}
__all__ = [
    "Algorithm",
    "Callback",
    "Classification",
    "Comparison",
    "Result",
    "Round",
    "Rounds",
    "Task",
    "UserError",
    "__version__",
    "algorithm",
    "canonical",
    "compare",
    "load",
    "register",
    "resume",
    "rounds",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in ("data", "flatness", "testing"):
        return importlib.import_module(f"fedflat.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'fedflat' has no attribute '{name}'")
