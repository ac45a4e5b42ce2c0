"""Regression: losses on numbers, with root mean squared error, mean absolute error and R²."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from fedflat.engines.problem.task import added_means

SUMS = frozenset({"loss", "squared", "absolute", "target", "target_squared"})
"""Names of the sums from which the metrics are computed."""


@dataclass(frozen=True)
class Regression:
    """Regression with squared error as loss and the metrics ``rmse``, ``mae`` and ``r2``. Subclass it for another loss.

    Outputs and targets are [batch, columns]; with one column, either may be [batch].

    Attributes:
        metric: name of the primary metric; ``rmse`` and ``mae`` are better if lower, ``r2`` if higher.
        scale: factor of ``rmse`` and ``mae``: the standard deviation of a standardised target, to report its units.
    """

    metric: str = "rmse"
    scale: float = field(default=1.0, kw_only=True)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the squared error, averaged over the examples and columns of a batch."""
        return F.mse_loss(*_aligned(output, target))

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the loss times the batch size, and the sums per column [columns] that ``finish`` needs."""
        predicted, truth = (values.double() for values in _aligned(output, target))
        residual = predicted - truth
        return {
            "loss": self.loss(output, target) * len(target),
            "squared": residual.square().sum(0),
            "absolute": residual.abs().sum(0),
            "target": truth.sum(0),
            "target_squared": truth.square().sum(0),
        }

    def finish(self, totals: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """Return mean loss, RMSE and MAE over all examples and columns, and R² averaged over columns.

        R² is NaN if a column is constant. Scalars that a subclass adds to ``sums`` become metrics, too: their means
        over examples. ``totals`` are the results of ``sums``, added over batches with ``count`` examples in all.
        """
        variation = totals["target_squared"] - totals["target"].square() / count  # sum of (target - mean)^2
        unexplained = totals["squared"] / variation.clamp(min=0)
        return {
            "loss": float(totals["loss"]) / count,
            "rmse": self.scale * math.sqrt(float(totals["squared"].mean()) / count),
            "mae": self.scale * float(totals["absolute"].mean()) / count,
            "r2": float((1 - unexplained).mean()) if bool((variation > 0).all()) else math.nan,
            **added_means(totals, SUMS, count),
        }

    def by_class(self, totals: Mapping[str, Tensor]) -> dict[int, dict[str, float]]:
        """Return an empty dictionary: regression has no classes."""
        return {}


@dataclass(frozen=True)
class Huber(Regression):
    """Regression with Huber's loss, which is linear for residuals beyond ``delta`` and so less affected by outliers.

    Attributes:
        delta: absolute residual above which the loss is linear.
    """

    delta: float = 1.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return Huber's loss, averaged over the examples and columns of a batch."""
        return F.huber_loss(*_aligned(output, target), delta=self.delta)


def _aligned(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets, both [batch, columns] and of the output's type."""
    columns = target.reshape(len(target), -1)
    return output.reshape(columns.shape), columns.to(output.dtype)
