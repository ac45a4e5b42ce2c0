"""Semantic segmentation: a loss over the hardest pixels, and mean intersection over union."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.data import IGNORED
from fedflat.engines.problem.objective import divergence

Output = Tensor | tuple[Tensor, ...]
"""Logits [n, classes, H, W]. In training, a model with auxiliary heads returns a tuple: main head first."""


@dataclass(frozen=True)
class Segmentation:
    """Cross-entropy over the hardest pixels of each image, and mean intersection over union (mIoU).

    Pixels whose target is IGNORED affect neither the loss nor the metrics. A model with auxiliary heads is trained on
    the sum of all heads' losses (booster training; Yu et al. 2021).

    Attributes:
        hard: share of each image's pixels over which the loss is averaged; these are the pixels with the highest loss
            (Caldarola et al. 2022, appendix C.2).
        auxiliary: weight of the loss of each auxiliary head.
        metric: name of the primary metric.
    """

    hard: float = 0.25
    auxiliary: float = 1.0
    metric: str = "miou"

    def loss(self, output: Output, target: Tensor) -> Tensor:
        """Return the loss of the main head plus ``auxiliary`` times the loss of each other head.

        Args:
            output: logits [n, classes, H, W], or a tuple with those of each head.
            target: class of each pixel [n, H, W].
        """
        main_head, *auxiliary_heads = output if isinstance(output, tuple) else (output,)
        loss = self._hard_pixel_loss(main_head, target)
        for head in auxiliary_heads:
            loss = loss + self.auxiliary * self._hard_pixel_loss(head, target)
        return loss

    def _hard_pixel_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy over the ``hard`` share of each image's valid pixels: rounded down, at least one pixel.

        Args:
            logits: output of one head [n, classes, H, W].
            target: class of each pixel [n, H, W]; pixels with ``IGNORED`` are not valid.
        """
        losses, hard_pixels = _cross_entropy(logits, target).flatten(1), self._hard_pixels(target)
        # Select as many pixels as an image without ignored ones needs, so that shapes do not depend on the data.
        most = max(1, int(self.hard * losses.shape[1]))
        highest_losses = losses.topk(most, 1).values  # ignored pixels have loss 0 and come last
        is_hard = torch.arange(most, device=losses.device) < hard_pixels[:, None]
        return torch.where(is_hard, highest_losses, 0).sum() / hard_pixels.sum().clamp(min=1)

    def _hard_pixels(self, target: Tensor) -> Tensor:
        """Number of pixels of each image [n] over which the loss is averaged, for classes [n, H, W]."""
        valid_pixels = (target != IGNORED).flatten(1).sum(1)
        return (valid_pixels.double() * self.hard).long().clamp(min=1).minimum(valid_pixels)

    def weight(self, target: Tensor) -> Tensor:
        """Return the number of pixels over which the loss of a batch is averaged: its weight in a mean over batches."""
        return self._hard_pixels(target).sum()

    def sums(self, output: Output, target: Tensor) -> dict[str, Tensor]:
        """Return sums over the valid pixels of a batch, given logits [n, classes, H, W] and classes [n, H, W].

        Returns:
            ``confusion`` [truth, prediction] counts pixels, ``loss`` [classes] is the cross-entropy by true class, and
            ``images`` [classes] counts the images in which a class occurs.
        """
        logits = output[0] if isinstance(output, tuple) else output
        classes = logits.shape[1]
        truth, prediction = target.long().flatten(1), logits.argmax(1).flatten(1)
        label = torch.where(truth == IGNORED, classes, truth)  # ignored pixels form an extra class, cut off below
        counts = torch.bincount((label * classes + prediction).flatten(), minlength=(classes + 1) * classes)
        confusion = counts.view(classes + 1, classes)
        losses = _cross_entropy(logits, target).flatten(1)
        # Class by class, because scatter_add on a GPU sums in no fixed order.
        loss = torch.stack([torch.where(label == c, losses, 0).sum(dtype=torch.float64) for c in range(classes)])
        occurs = truth.new_zeros(len(truth), classes + 1).scatter_(1, label, 1)  # [images, classes], 0 or 1
        images = occurs.sum(0)
        return {"confusion": confusion[:classes], "loss": loss, "images": images[:classes]}

    def distillation(self, output: Output, teacher_output: Output, target: Tensor, temperature: float) -> Tensor:
        """Return the KL divergence from the teacher's predictions, averaged over valid pixels; main heads only."""
        logits, teacher_logits = (each[0] if isinstance(each, tuple) else each for each in (output, teacher_output))
        is_valid = target != IGNORED
        divergences = torch.where(is_valid, divergence(logits, teacher_logits, temperature), 0)
        return divergences.sum() / is_valid.sum().clamp(min=1)

    def finish(self, totals: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """Return mean cross-entropy per pixel, mIoU over the classes that occur, and pixel accuracy.

        Args:
            totals: the results of ``sums``, added over batches.
            count: number of images; unused, since all metrics count pixels.
        """
        confusion, iou = totals["confusion"].double(), _intersection_over_union(totals["confusion"])
        pixels = max(float(confusion.sum()), 1.0)
        occurs = confusion.sum(1) > 0
        mean_iou = float(iou[occurs].mean()) if bool(occurs.any()) else 0.0
        return {
            "loss": float(totals["loss"].sum()) / pixels,
            self.metric: mean_iou,
            "pixel_accuracy": float(confusion.trace()) / pixels,
        }

    def by_class(self, totals: Mapping[str, Tensor]) -> dict[int, dict[str, float]]:
        """Return IoU, mean cross-entropy and number of images of each class that occurs.

        ``totals`` are the results of ``sums``, added over batches.
        """
        pixels, iou = totals["confusion"].sum(1), _intersection_over_union(totals["confusion"])
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


def _intersection_over_union(confusion: Tensor) -> Tensor:
    """IoU of each class from the confusion matrix M [truth, prediction]: M_cc / (sum_j M_cj + sum_i M_ic - M_cc)."""
    counts = confusion.double()
    intersection = counts.diagonal()
    return intersection / (counts.sum(0) + counts.sum(1) - intersection).clamp(min=1)
