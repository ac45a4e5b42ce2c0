"""Batches: from positions in the training set to augmented, normalised inputs and targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedflat.data import Augmentation, Examples, MappedTensor, normalise
from fedflat.errors import UserError

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

    On a CPU, images in memory that are not augmented are stored channels last: convolutions are fastest in that layout,
    and whole images can then be gathered as contiguous rows. They are normalised in advance if the result is small.

    Args:
        examples: the training examples.
        augmentation: random transformations of inputs.
        mean: mean of each input channel.
        std: standard deviation of each input channel.
        dtype: precision of the inputs that the model receives.
        channels_last: whether the model takes images channels last.

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
        """Choose how to store the examples; the arguments are those of the class."""
        self.examples, self._inputs = examples, examples.inputs
        self._augmentation, self._mean, self._std, self._dtype = augmentation, mean, std, dtype
        self._channels_last = channels_last and examples.inputs.ndim == 4
        self._stored_channels_last = False  # if true, _inputs is [examples, height, width, channels]
        self._stored_normalised = False
        if not augmentation.steps and _are_images_in_memory(examples.inputs):
            self._prepare_images()

    def inputs(self, positions: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Inputs at ``positions`` [batch] of the training set, augmented and normalised.

        ``draws`` are the random numbers of the augmentation for this batch, by name.
        """
        stored = self._inputs.index_select(0, positions)
        if self._stored_channels_last:
            stored = stored.permute(0, 3, 1, 2)
        if self._stored_normalised:  # only without augmentation
            return stored
        inputs = self._augmentation.inputs(stored, draws, self._mean, self._std, self._dtype)
        return inputs.contiguous(memory_format=torch.channels_last) if self._channels_last else inputs

    def targets(self, positions: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Targets at ``positions`` [batch]; masks are augmented like their images."""
        return self._augmentation.targets(self.examples.targets.index_select(0, positions), draws)

    def _prepare_images(self) -> None:
        """Choose the memory layout of the stored images, and normalise them in advance if that takes little memory."""
        images = self.examples.inputs
        self._stored_channels_last = self._channels_last
        layout = torch.channels_last if self._stored_channels_last else torch.contiguous_format
        images = images.contiguous(memory_format=layout)
        self.examples = replace(self.examples, inputs=images)
        if self._stored_channels_last:  # repeat mean and std for every pixel, in the same layout as the images
            height, width = images.shape[2:]
            self._mean = self._mean.repeat(height, width, 1).permute(2, 0, 1)
            self._std = self._std.repeat(height, width, 1).permute(2, 0, 1)
        self._stored_normalised = images.numel() * self._dtype.itemsize <= CACHE_BYTES
        if self._stored_normalised:
            images = normalise(images, self._mean, self._std, self._dtype)
        self._inputs = images.permute(0, 2, 3, 1) if self._stored_channels_last else images


def _are_images_in_memory(inputs: Tensor) -> bool:
    """Whether the inputs are images in main memory, neither memory-mapped nor on a GPU."""
    return (
        inputs.dtype == torch.uint8
        and inputs.ndim == 4
        and inputs.device.type == "cpu"
        and not isinstance(inputs, MappedTensor)
    )


def move_examples(examples: Examples, device: torch.device) -> Examples:
    """Move examples to ``device``; raises ``UserError`` if they do not fit on the GPU."""
    try:
        return Examples(**{name: tensor.to(device) for name, tensor in examples.tensors().items()})
    except torch.OutOfMemoryError:
        size = examples.inputs.numel() * examples.inputs.element_size() / 1e9
        raise UserError(
            f"the dataset does not fit on the GPU: its {len(examples):,} inputs take {size:.1f} GB; "
            "use smaller images, for example landmarks(size=64), or engine.device=cpu, which reads them from the file"
        ) from None
