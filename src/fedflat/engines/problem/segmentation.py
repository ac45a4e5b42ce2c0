"""The task of giving every pixel its class: the loss over the hardest pixels, and how far prediction and truth overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.data import IGNORED

Output = Tensor | tuple[Tensor, ...]
"""Logits [n, classes, H, W]; from a model with auxiliary heads, in training, those of the main head and then of each other one."""


@dataclass(frozen=True)
class Segmentation:
    """Cross-entropy over the hardest pixels of each image, and the mean over classes of intersection over union.

    Pixels whose target is IGNORED count in neither. A model with auxiliary heads, which gives several logits in training, is trained on the
    sum of the losses of all (booster training; Yu et al. 2021).
    """

    hard: float = 0.25
    """The share of each image's pixels, those of the highest loss, that the mean is over (Caldarola et al. 2022, appendix C.2)."""
    auxiliary: float = 1.0
    """The weight of each auxiliary head's loss."""
    metric: str = "miou"

    def loss(self, output: Output, target: Tensor) -> Tensor:
        """The mean over the hardest pixels of a batch, summed over heads."""
        main, *others = output if isinstance(output, tuple) else (output,)
        loss = self._mined(main, target)
        for other in others:
            loss = loss + self.auxiliary * self._mined(other, target)
        return loss

    def _mined(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean over the ``hard`` share of each image's pixels that count, rounded down but at least one, of highest cross-entropy."""
        each = _cross_entropy(logits, target).flatten(1)
        valid = (target != IGNORED).flatten(1).sum(1)
        chosen = (valid.double() * self.hard).long().clamp(min=1).minimum(valid)
        # As many as there could be are sorted, so that shapes do not depend on the data; ignored pixels have loss 0 and come last.
        most = max(1, int(self.hard * each.shape[1]))
        worst = each.topk(most, 1).values
        counted = torch.arange(most, device=each.device) < chosen[:, None]
        return torch.where(counted, worst, 0).sum() / chosen.sum().clamp(min=1)

    def sums(self, output: Output, target: Tensor) -> dict[str, Tensor]:
        """Over pixels that count: the confusion matrix [truth, prediction], cross-entropy by true class; and how many images have it."""
        logits = output[0] if isinstance(output, tuple) else output
        classes = logits.shape[1]
        truth, guess = target.long().flatten(1), logits.argmax(1).flatten(1)
        place = torch.where(truth == IGNORED, classes, truth)  # what is ignored is counted apart, and cut off
        confusion = torch.bincount((place * classes + guess).flatten(), minlength=(classes + 1) * classes).view(
            classes + 1, classes
        )
        each = _cross_entropy(logits, target).flatten(1)
        # Class by class: on a GPU, scattering sums in no fixed order, and evaluations would differ in their last digits.
        loss = torch.stack([torch.where(place == label, each, 0).sum(dtype=torch.float64) for label in range(classes)])
        images = truth.new_zeros(len(truth), classes + 1).scatter_(1, place, 1).sum(0)
        return {"confusion": confusion[:classes], "loss": loss, "images": images[:classes]}

    def finish(self, totals: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """Mean cross-entropy of a pixel, mIoU over the classes that occur, and the share of pixels that are right."""
        confusion, iou = totals["confusion"].double(), _overlap(totals["confusion"])
        pixels = max(float(confusion.sum()), 1.0)
        occurs = confusion.sum(1) > 0
        mean = float(iou[occurs].mean()) if bool(occurs.any()) else 0.0
        return {
            "loss": float(totals["loss"].sum()) / pixels,
            self.metric: mean,
            "pixel_accuracy": float(confusion.trace()) / pixels,
        }

    def by_class(self, totals: Mapping[str, Tensor]) -> dict[int, dict[str, float]]:
        """For each class that occurs: its intersection over union, its mean cross-entropy, and how many images have it."""
        pixels, iou = totals["confusion"].sum(1), _overlap(totals["confusion"])
        return {
            label: {
                "loss": float(totals["loss"][label]) / float(pixels[label]),
                self.metric: float(iou[label]),
                "examples": int(totals["images"][label]),
            }
            for label in range(len(iou))
            if pixels[label] > 0
        }


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target.long(), ignore_index=IGNORED, reduction="none")


def _overlap(confusion: Tensor) -> Tensor:
    """Intersection over union of each class: IoU_c = M_cc / (sum_j M_cj + sum_i M_ic - M_cc)."""
    exact = confusion.double()
    both = exact.diagonal()
    return both / (exact.sum(0) + exact.sum(1) - both).clamp(min=1)
