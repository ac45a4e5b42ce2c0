"""The record of a run, and formulas that several methods share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
EPS = 1e-12


@dataclass
class Trace:
    """Server models x^1..x^T, states and further evaluated models, after every round."""

    x: list[Vector] = field(default_factory=list)
    server: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    evaluated: dict[str, list[Vector]] = field(default_factory=dict)

    def record(
        self,
        x: Vector,
        server: Mapping[str, Any] | None = None,
        clients: Mapping[str, Any] | None = None,
        **evaluated: Vector,
    ) -> None:
        """Copy the state after a round; `clients` maps names to rows (an array, or a dict by client)."""
        self.x.append(x.copy())
        self.server.append({name: np.copy(value) for name, value in (server or {}).items()})
        states: dict[int, dict[str, Any]] = {}
        for name, rows in (clients or {}).items():
            for i, row in rows.items() if isinstance(rows, dict) else enumerate(rows):
                states.setdefault(i, {})[name] = np.copy(row)
        self.clients.append(states)
        for name, model in evaluated.items():
            self.evaluated.setdefault(name, []).append(model.copy())


def at(value: Any, index: int) -> Any:
    """`value`, or its entry if there is one per round (learning rates) or per client (steps)."""
    return value if np.isscalar(value) else value[index]


def unit(v: Vector) -> Vector:
    """v / (||v||_2 + eps), zero for zero."""
    return v / (np.linalg.norm(v) + EPS)


def linear_rates(eta: float, steps: int, final_lr: float) -> list[float]:
    """FedSWA's learning rates eta_k = eta (1 - k/K) + (k/K) rho eta, k = 0..K-1."""
    return [eta * (1 - k / steps) + k / steps * final_lr * eta for k in range(steps)]
