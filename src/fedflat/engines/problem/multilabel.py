"""Multi-label classification: binary cross-entropy, mean average precision and accuracy per label."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.engines.problem.task import added_means

SUMS = frozenset({"loss", "own_loss", "correct", "positive", "negative"})
"""Names of the sums from which the metrics are computed."""
BINS, LINEAR_LOGIT, LARGEST_LOGIT = 8192, 0.01, 1000.0
"""Average precision is computed from histograms of the logits with this many bins between -1000 and 1000.

The width of a bin is 0.3 % of the logit, and at least 0.00003.
"""


@dataclass(frozen=True)
class MultiLabel:
    """Binary cross-entropy; metrics ``mAP`` (mean average precision) and ``label_accuracy``.

    Outputs are logits [batch, labels], targets are 0 or 1 [batch, labels].

    Attributes:
        metric: name of the primary metric.
    """

    metric: str = "mAP"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross-entropy, averaged over the examples and labels of a batch."""
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return sums over a batch, from which ``finish`` computes the metrics.

        Returns:
            ``loss`` and ``correct`` [labels] are the summed loss and the number of correct predictions of each label.
            ``positive`` and ``negative`` [labels, bins] are histograms of the logits of examples with and without the
            label. If a subclass overrides ``loss``, ``own_loss`` is its mean times the batch size.
        """
        truth = target.bool()
        losses = F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none")
        # Map logits from [-LARGEST_LOGIT, LARGEST_LOGIT] to bins 0 to BINS - 1; those beyond go to the outermost bins.
        largest = math.asinh(LARGEST_LOGIT / LINEAR_LOGIT)
        scaled = (torch.asinh(output.double() / LINEAR_LOGIT) + largest) * ((BINS - 1) / (2 * largest))
        labels = output.shape[1]
        # NaN counts as the lowest logit; the loss is NaN, too, and reports it.
        bins = torch.nan_to_num(scaled, nan=0.0).round().clamp(0, BINS - 1).long()
        # One bincount computes the histograms of all labels: label j has the bins from j * BINS on.
        label_bins = bins + BINS * torch.arange(labels, device=output.device)
        positive = torch.bincount(label_bins[truth], minlength=labels * BINS).view(labels, BINS)
        negative = torch.bincount(label_bins[~truth], minlength=labels * BINS).view(labels, BINS)
        sums = {
            "loss": losses.double().sum(0),
            "correct": ((output > 0) == truth).sum(0),
            "positive": positive,
            "negative": negative,
        }
        if type(self).loss is not MultiLabel.loss:
            sums["own_loss"] = self.loss(output, target).double() * len(target)
        return sums

    def finish(self, totals: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """Return mean loss, average precision (averaged over the labels that occur) and share of correct labels.

        Scalars that a subclass adds to ``sums`` become metrics, too: their means over examples. ``totals`` are the
        results of ``sums``, added over batches with ``count`` examples in all.
        """
        precision, occurs = _average_precision(totals), totals["positive"].sum(1) > 0
        return {
            "loss": float(totals["own_loss"] if "own_loss" in totals else totals["loss"].mean()) / count,
            "mAP": float(precision[occurs].mean()) if bool(occurs.any()) else 0.0,
            "label_accuracy": float(totals["correct"].double().mean()) / count,
            **added_means(totals, SUMS, count),
        }

    def by_class(self, totals: Mapping[str, Tensor]) -> dict[int, dict[str, float]]:
        """Return the metrics of each label that occurs; ``examples`` is the number of examples with the label.

        ``totals`` are the results of ``sums``, added over batches.
        """
        precision, positive = _average_precision(totals), totals["positive"].sum(1)
        count = positive + totals["negative"].sum(1)
        return {
            label: {
                "loss": float(totals["loss"][label] / count[label]),
                "mAP": float(precision[label]),
                "label_accuracy": float(totals["correct"][label] / count[label]),
                "examples": int(positive[label]),
            }
            for label in range(len(positive))
            if positive[label] > 0
        }


def _average_precision(totals: Mapping[str, Tensor]) -> Tensor:
    """Average precision of each label [labels]: the sum over thresholds of precision times the increase in recall.

    ``totals`` holds histograms ``positive`` and ``negative`` [labels, bins] of the logits of examples with and without
    the label. The thresholds are the bins.
    """
    positive, negative = (totals[name].double().flip(1) for name in ("positive", "negative"))  # highest logits first
    hits, false_alarms = positive.cumsum(1), negative.cumsum(1)
    precision = hits / (hits + false_alarms).clamp(min=1)
    return (precision * positive).sum(1) / positive.sum(1).clamp(min=1)
