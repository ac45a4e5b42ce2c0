"""Batches: from positions in the training set to augmented, normalised inputs and targets.

All random numbers of a client's round are drawn in advance on the host (``draw``) and applied step by step on the
device of the batch (``inputs``). A step therefore has no randomness of its own: every engine sees the same images, a
step can be captured in a graph or vectorised by ``torch.func.vmap``, and the two passes of SAM share one draw.

Each augmentation has its own random stream and consumes it step by step: crops stay the same when mixup is added, and
the first steps stay the same when more follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedflat.data.augmentations import AUGMENTATIONS, AugmentationStep, Draws, permutation
from fedflat.data.dataset import Dataset, Examples
from fedflat.data.files.mapped import MappedTensor
from fedflat.errors import UserError
from fedflat.text import changed, make, parse, show

Statistics = torch.Tensor | Sequence[float]
STATISTICS_BLOCK = 1 << 21
"""Number of values that ``channel_statistics`` reads at once."""
CACHE_BYTES = 64 * 2**20
"""Normalise the training images once and keep them if they take at most this many bytes."""


def channel_statistics(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the mean and standard deviation per channel, on the scale from 0 to 1.

    A constant channel gets standard deviation 1.

    Args:
        images: uint8 images [n, channels, height, width]; read in blocks, since they may exceed memory.
    """
    sums = np.zeros((2, images.shape[1]), dtype=np.int64)
    block_rows = max(1, STATISTICS_BLOCK // max(1, images[:1].numel()))
    for start in range(0, len(images), block_rows):
        values = images[start : start + block_rows].numpy().astype(np.int64)
        sums += np.stack([values.sum((0, 2, 3)), np.square(values).sum((0, 2, 3))])
    return statistics_of_sums(sums, images.numel() // images.shape[1])


def statistics_of_sums(sums: npt.NDArray[np.int64], count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the mean and standard deviation per channel, on the scale from 0 to 1, from sums over uint8 pixels.

    Args:
        sums: sum and sum of squares per channel, [2, channels]; integers, so the order of summation does not matter.
        count: number of values per channel.
    """
    mean = sums[0] / max(count, 1)
    std = np.sqrt(np.maximum(sums[1] / max(count, 1) - mean**2, 0))
    std[std == 0] = 255.0  # a constant channel gets 1 on the scale from 0 to 1
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def normalise(raw: torch.Tensor, mean: Statistics, std: Statistics, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normalise a batch of inputs.

    Args:
        raw: uint8 images become (x / 255 - mean) / std; floats are only converted to ``dtype``; tokens are unchanged.
        mean: mean per channel or pixel, on the scale from 0 to 1.
        std: standard deviation per channel or pixel.
        dtype: floating-point type of the result.
    """
    if raw.is_floating_point():
        return raw.to(dtype)
    if raw.dtype != torch.uint8:
        return raw
    # Compute in at least float32, so that only the result is rounded to ``dtype``.
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    shift, scale = (_to_image(torch.as_tensor(values, dtype=precise, device=raw.device)) for values in (mean, std))
    return raw.to(precise).div_(255).sub_(shift).div_(scale).to(dtype)


def _to_image(statistics: torch.Tensor) -> torch.Tensor:
    """Reshape statistics per channel to [channels, 1, 1]; return statistics per pixel unchanged."""
    return statistics if statistics.ndim == 3 else statistics.reshape(-1, 1, 1)


@dataclass(frozen=True)
class Augmentation:
    """Augmentation steps, in order of application; ``Augmentation()`` only normalises."""

    steps: tuple[AugmentationStep, ...] = ()
    """The steps, in order of application."""

    @property
    def text(self) -> str:
        """Canonical text, e.g. ``crop-flip+mixup``; ``none`` without steps."""
        return "+".join(show(_name_of(step), changed(step)) for step in self.steps) or "none"

    def check(self, dataset: Dataset) -> None:
        """Raise a ``UserError`` if a step does not apply to ``dataset``."""
        for step in self.steps:
            name = _name_of(step)
            if dataset.kind == "segmentation" and not step.moves_masks:
                usable = ", ".join(other for other, step_class in AUGMENTATIONS.items() if step_class.moves_masks)
                raise UserError(
                    f"{name} does not transform masks, and {dataset.name} has masks; use {usable} or 'none'"
                )
            if step.needs_masks and dataset.kind == "image":
                raise UserError(f"{name} is for segmentation, and {dataset.name} has no masks; use random-resized-crop")
            if dataset.kind == "text" or (step.needs_images and dataset.kind == "vector"):
                raise UserError(f"{name} does not apply to {dataset.kind} inputs such as {dataset.name}; use 'none'")
            step.check(dataset.input_shape)

    def draw(self, rng: np.random.Generator, training_steps: int, batch_size: int, shape: tuple[int, ...]) -> Draws:
        """Draw all random quantities that the augmentation of a client's round needs, such as corners of crops.

        Args:
            rng: source of randomness.
            training_steps: number of the client's training steps.
            batch_size: number of examples per training step.
            shape: shape of one example.

        Returns:
            Tensors [training_steps, ...] by the names that the augmentation steps give them.
        """
        draws: Draws = {}
        if not self.steps:
            return draws
        # One stream per registered augmentation, used or not, so that adding one does not change the draws of others.
        streams = dict(zip(AUGMENTATIONS, rng.spawn(len(AUGMENTATIONS)), strict=True))
        for step in self.steps:
            name = _name_of(step)
            if step.needs_images and len(shape) != 3:
                raise UserError(f"{name} needs images, but these inputs have shape {shape}; use 'none'")
            # One row per training step, so that the first ones get the same numbers however many follow.
            uniforms = streams[name].random((training_steps, step.per_step + batch_size * step.per_example))
            per_step, per_example = np.split(uniforms, [step.per_step], axis=1)
            draws |= step.draws(per_step, per_example.reshape(training_steps, batch_size, step.per_example), shape)
        return draws

    def inputs(
        self, raw: torch.Tensor, draws: Draws, mean: Statistics, std: Statistics, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Augment and normalise the inputs of a batch; some steps change pixels, others normalised values.

        Args:
            raw: inputs [n, ...], not normalised; n may be smaller than the batch size given to ``draw``.
            draws: random quantities of one training step, from ``draw``.
            mean: mean per channel, on the scale from 0 to 1.
            std: standard deviation per channel.
            dtype: type of the result.
        """
        for step in self.steps:
            raw = step.on_pixels(raw, draws)
        values = normalise(raw, mean, std, dtype)
        for step in self.steps:
            values = step.on_values(values, draws)
        return values

    def targets(self, raw: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Transform masks like their images; return all other targets unchanged.

        Args:
            raw: targets of a batch [n, ...]; masks have shape [n, height, width].
            draws: random quantities of one training step, from ``draw``.
        """
        if raw.ndim == 3:  # masks
            for step in self.steps:
                raw = step.on_masks(raw, draws)
        return raw

    def mix(self, draws: Draws, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the blending weights lam and the permutation pi of mixup for a batch; None without mixup.

        Example i is blended with example pi[i]. With outputs f and targets Y, the loss is
        lam CE(f, Y) + (1 - lam) CE(f, Y[pi]), where CE is the cross-entropy.

        Args:
            draws: random quantities of one training step, from ``draw``.
            size: number of examples in the batch; None for a full batch.
        """
        return (draws["lam"], permutation(draws, size)) if "lam" in draws else None


def augmentation(text: str) -> Augmentation:
    """Parse an augmentation such as ``crop-flip(padding=4)+mixup``, or ``none``.

    >>> augmentation("mixup+crop-flip(padding=4)").text
    'crop-flip+mixup'
    """
    if text.strip().lower() == "none":
        return Augmentation()
    steps: dict[str, AugmentationStep] = {}
    for call in parse(text):
        if call.name.lower() == "none":
            raise UserError(f"'{text}' combines 'none' with other augmentations; expected 'none' alone")
        name = AUGMENTATIONS.spelling(call.name)
        if name is None:
            raise AUGMENTATIONS.unknown(call.name, also=["none"])
        if name in steps:
            raise UserError(f"'{text}' contains {name} more than once; expected each augmentation once")
        steps[name] = make(AUGMENTATIONS[name], call, "augmentation")
    # Applied in the registry's order, whatever the order in the text.
    return Augmentation(tuple(steps[name] for name in AUGMENTATIONS if name in steps))


def _name_of(step: AugmentationStep) -> str:
    """Return the registered name of a step."""
    name = AUGMENTATIONS.name_of(type(step))
    assert name is not None, f"{type(step).__name__} is not registered"
    return name


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one training step.

    With mixup, each input is a blend of two examples: ``targets`` belong to the first and ``mixed_targets`` to the
    second, and ``share`` is the weight of the first.
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
        """Choose how to store the examples: their memory layout, and whether they are normalised in advance."""
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


def move_examples(examples: Examples, device: torch.device, dtype: torch.dtype) -> Examples:
    """Move examples to ``device``, and convert targets that are numbers to ``dtype``.

    Inputs are converted batch by batch. Raises ``UserError`` if the examples do not fit on the GPU.
    """
    try:
        moved = Examples(**{name: tensor.to(device) for name, tensor in examples.tensors().items()})
        return replace(moved, targets=moved.targets.to(dtype)) if moved.targets.is_floating_point() else moved
    except torch.OutOfMemoryError:
        size = examples.inputs.numel() * examples.inputs.element_size() / 1e9
        raise UserError(
            f"the dataset does not fit on the GPU: its {len(examples):,} inputs take {size:.1f} GB; "
            "use smaller images, for example landmarks(size=64), or engine.device=cpu, which reads them from the file"
        ) from None
