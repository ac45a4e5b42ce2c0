"""From positions in the training set to batches that a model can take."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedflat.data import Augmentation, Examples, MappedTensor, normalise

SMALL = 64 * 2**20
"""Bytes of normalised training images up to which they are kept, instead of being normalised batch by batch."""


class BatchLoader:
    """Gathers training inputs and targets, augments and normalises them.

    ``examples`` are the same examples, in the memory order that this likes.

    On a CPU, images that lie in memory and are not augmented are kept channels last, as convolutions want them: they are then gathered,
    and normalised, by whole rows.
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

    def __call__(self, positions: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """The inputs at some positions, augmented by given draws."""
        rows = self._rows.index_select(0, positions)
        raw = rows.permute(0, 3, 1, 2) if self._by_pixel else rows
        if self._normalised:
            return raw
        values = self._augmentation.inputs(raw, draws, self._mean, self._std, self._dtype)
        return values.contiguous(memory_format=torch.channels_last) if self._channels_last else values

    def targets(self, positions: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """The targets at some positions; masks are augmented by the draws of their images."""
        return self._augmentation.targets(self.examples.targets.index_select(0, positions), draws)

    def _prepare(self) -> None:
        inputs = self.examples.inputs
        self._by_pixel = self._channels_last
        inputs = inputs.contiguous(memory_format=torch.channels_last if self._by_pixel else torch.contiguous_format)
        self.examples = replace(self.examples, inputs=inputs)
        if self._by_pixel:
            self._mean, self._std = (v.repeat(*inputs.shape[2:], 1).permute(2, 0, 1) for v in (self._mean, self._std))
        self._normalised = inputs.numel() * self._dtype.itemsize <= SMALL
        if self._normalised:
            inputs = normalise(inputs, self._mean, self._std, self._dtype)
        self._rows = inputs.permute(0, 2, 3, 1) if self._by_pixel else inputs


def _images_in_memory(inputs: Tensor) -> bool:
    """Whether inputs are images in the memory of this machine, neither in a file nor on a GPU."""
    return (
        inputs.dtype == torch.uint8
        and inputs.ndim == 4
        and inputs.device.type == "cpu"
        and not isinstance(inputs, MappedTensor)
    )
