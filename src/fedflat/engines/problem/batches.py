"""Batches: from positions in the training set to augmented, normalised inputs and targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedflat.data import Augmentation, Examples, MappedTensor, normalise

CACHE_BYTES = 64 * 2**20
"""Normalise the training images once and keep them if they take at most this many bytes."""


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one step.

    With mixup, ``mixed_targets`` holds the targets of the second image and ``share`` the weight of the first.
    """

    inputs: Tensor
    targets: Tensor
    mixed_targets: Tensor | None = None
    share: float | Tensor = 1.0


class BatchLoader:
    """Gathers, augments and normalises training examples.

    On a CPU, images in memory that are not augmented are stored channels last: convolutions want that layout, and whole
    rows can then be gathered and normalised.

    Attributes:
        examples: the training examples, in the memory layout chosen here.
    """

    def __init__(
        self,
        examples: Examples,
        augmentation: Augmentation,
        mean: Tensor,
        std: Tensor,
        dtype: torch.dtype,
        channels_last: bool,
    ) -> None:
        self.examples, self._rows = examples, examples.inputs
        self._augmentation, self._mean, self._std, self._dtype = augmentation, mean, std, dtype
        self._channels_last = channels_last and examples.inputs.ndim == 4
        self._by_pixel = self._normalised = False
        if not augmentation.steps and _images_in_memory(examples.inputs):
            self._prepare()

    def inputs(self, positions: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Inputs at ``positions`` [batch], augmented with the given random draws and normalised."""
        rows = self._rows.index_select(0, positions)
        raw = rows.permute(0, 3, 1, 2) if self._by_pixel else rows
        if self._normalised:
            return raw
        values = self._augmentation.inputs(raw, draws, self._mean, self._std, self._dtype)
        return values.contiguous(memory_format=torch.channels_last) if self._channels_last else values

    def targets(self, positions: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Targets at ``positions`` [batch]; masks are augmented like their images."""
        return self._augmentation.targets(self.examples.targets.index_select(0, positions), draws)

    def _prepare(self) -> None:
        inputs = self.examples.inputs
        self._by_pixel = self._channels_last
        inputs = inputs.contiguous(memory_format=torch.channels_last if self._by_pixel else torch.contiguous_format)
        self.examples = replace(self.examples, inputs=inputs)
        if self._by_pixel:
            self._mean, self._std = (v.repeat(*inputs.shape[2:], 1).permute(2, 0, 1) for v in (self._mean, self._std))
        self._normalised = inputs.numel() * self._dtype.itemsize <= CACHE_BYTES
        if self._normalised:
            inputs = normalise(inputs, self._mean, self._std, self._dtype)
        self._rows = inputs.permute(0, 2, 3, 1) if self._by_pixel else inputs


def _images_in_memory(inputs: Tensor) -> bool:
    """Whether the inputs are images in main memory, neither memory-mapped nor on a GPU."""
    return (
        inputs.dtype == torch.uint8
        and inputs.ndim == 4
        and inputs.device.type == "cpu"
        and not isinstance(inputs, MappedTensor)
    )
