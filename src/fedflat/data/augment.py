"""Augmentation and normalisation of batches.

All random numbers of a client's round are drawn in advance on the host (``draw``) and applied step by step on the
device of the batch (``inputs``). A step therefore has no randomness of its own: every engine sees the same images, a
step can be captured in a graph or vectorised by ``torch.func.vmap``, and the two passes of SAM share one draw.

Each augmentation has its own random stream and consumes it step by step: crops stay the same when mixup is added, and
the first steps stay the same when more follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedflat.data.augmentations import AUGMENTATIONS, AugmentationStep, Draws, permutation
from fedflat.data.dataset import Dataset
from fedflat.errors import UserError
from fedflat.text import changed, make, parse, show

Statistics = torch.Tensor | Sequence[float]


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
            raw: inputs [n, ...] as in ``Examples``; n may be smaller than the batch size given to ``draw``.
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
            raw: targets of a batch, as in ``Examples``; masks have shape [n, height, width].
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


def _name_of(step: AugmentationStep) -> str:
    """Return the registered name of a step."""
    name = AUGMENTATIONS.name_of(type(step))
    assert name is not None, f"{type(step).__name__} is not registered"
    return name
