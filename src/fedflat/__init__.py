"""fedflat: federated learning that finds flat minima under heterogeneous data and measures how flat they are.

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
    from fedflat.api import Rounds, compare, load, report, resume, rounds, run, sweep
    from fedflat.engines.problem.multilabel import MultiLabel
    from fedflat.engines.problem.regression import Huber, Regression
    from fedflat.engines.problem.task import Classification, Task
    from fedflat.errors import UserError
    from fedflat.experiment.callback import Callback, RemoteCallback
    from fedflat.experiment.rounds import Round
    from fedflat.reporting.comparison import Comparison
    from fedflat.reporting.result import Result

# Names by module; a module is imported when one of its names is first used, so that importing fedflat stays fast.
_NAMES = {
    "fedflat.algorithms": ("Algorithm", "algorithm", "canonical", "register"),
    "fedflat.api": ("Rounds", "compare", "load", "report", "resume", "rounds", "run", "sweep"),
    "fedflat.engines.problem.multilabel": ("MultiLabel",),
    "fedflat.engines.problem.regression": ("Huber", "Regression"),
    "fedflat.engines.problem.task": ("Classification", "Task"),
    "fedflat.errors": ("UserError",),
    "fedflat.experiment.callback": ("Callback", "RemoteCallback"),
    "fedflat.experiment.rounds": ("Round",),
    "fedflat.reporting.comparison": ("Comparison",),
    "fedflat.reporting.result": ("Result",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "Algorithm",
    "Callback",
    "Classification",
    "Comparison",
    "Huber",
    "MultiLabel",
    "Regression",
    "RemoteCallback",
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
    "report",
    "resume",
    "rounds",
    "run",
    "sweep",
]


_SUBPACKAGES = ("data", "flatness", "testing")


def __dir__() -> list[str]:
    """List the public names and subpackages, for completion."""
    return sorted([*__all__, *_SUBPACKAGES])


def __getattr__(name: str) -> Any:
    """Import a public name or subpackage on first use."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"fedflat.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'fedflat' has no attribute '{name}'")
