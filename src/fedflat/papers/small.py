"""Small scale: experiments of the same structure with fewer clients and rounds, and smaller data and models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedflat.data import Examples, canonical_partition
from fedflat.experiment.campaign.estimate import is_available
from fedflat.experiment.config import Config, DataSettings
from fedflat.text import parse, show

CLIENTS, CLIENTS_PER_ROUND, EXAMPLES = 10, 3, 200
SHORT = {"rounds": 4, "local_steps": 2, "batch_size": 8}
LONGER = {"rounds": 20, "local_steps": 10, "batch_size": 16}
"""Lengths of small runs. On digits, where steps are fast, runs are longer, so that most methods learn something."""
DIGITS, DIGITS_MODEL, DIGITS_PARTITION = "digits", "mlp(hidden=32)", "dirichlet(alpha=0.1)"
DIGITS_CLASSES, DIGITS_REDUCTION = 10, 4
"""Number of classes, and the factor by which the images are smaller than those of CIFAR."""
DENSE, MASKS, UNSEEN = "bisenetv2", "digit_masks", "night"
"""The segmentation model, the stand-in for its datasets, and the domain of the stand-in that is unseen in training."""
SMALLER = {"vgg11": "resnet20", "resnet18": "resnet20", "mobilenetv2": "resnet20"}
"""Stand-ins for models with which a run would take minutes."""
CORRUPTIONS = "generated noise, brightness and contrast"
"""The stand-in for published corrupted test images."""


def small(config: Config, folder: Path | None = None) -> tuple[Config, tuple[str, ...]]:
    """Shrink an experiment of a paper so that it runs in seconds with the same structure.

    Args:
        config: the experiment of the paper.
        folder: folder of the datasets; a dataset that is available there is not replaced. None is the default folder.

    Returns:
        The small config, and a description of each stand-in, such as ``digits for cifar10``.
    """
    data, model, schedule = _shrink(config, folder)
    is_central = canonical_partition(data.partition) == "centralised"
    full_participation = config.federation.clients_per_round == config.data.clients
    clients = 1 if is_central else data.clients
    clients_per_round = min(config.federation.clients_per_round, CLIENTS_PER_ROUND)
    # The number of clients is None if the dataset fixes it.
    if clients is not None and (is_central or full_participation):
        clients_per_round = clients
    # Save four models if the paper's run saves any.
    save_every = None if config.evaluation.save_every is None else max(1, schedule["rounds"] // 4)
    scaled = config.changed(
        model=model,
        data=data.changed(dir=folder, clients=clients),
        federation={"clients_per_round": clients_per_round},
        training={"local_epochs": 1, **schedule},
        evaluation={"every": 1, "final": 0, "examples": EXAMPLES, "save_every": save_every},
        engine={"workers": 1},
    )
    replacements = (
        (model, config.model),
        (data.dataset, config.data.dataset),
        (data.partition, config.data.partition),
        (data.augmentation, config.data.augmentation),
    )
    return scaled, tuple(f"{new} for {old}" for new, old in replacements if new != old)


def _shrink(config: Config, folder: Path | None) -> tuple[DataSettings, str, dict[str, int]]:
    """Choose the dataset, the model and the training schedule of a small run.

    Returns:
        data: settings with the paper's dataset if it is available, otherwise with an embedded one.
        model: a model that is small enough for the dataset.
        schedule: rounds, local steps and batch size.
    """
    data, model = config.data, parse(config.model)[0].name
    if is_available(data.dataset, folder):
        return data, SMALLER.get(model, config.model), SHORT
    if model == DENSE:  # segmentation
        dataset = f"{MASKS}(unseen={UNSEEN})" if "unseen" in parse(data.dataset)[0].values else MASKS
        clients = None if data.clients is None else CLIENTS
        replaced = {"dataset": dataset, "clients": clients, "augmentation": _masks_augmentation(data.augmentation)}
        if parse(data.partition)[0].name == "natural":
            replaced["partition"] = "natural"
        return data.changed(**replaced), f"{DENSE}(width=0.25,auxiliary=false)", SHORT
    digits = data.changed(
        dataset=DIGITS,
        clients=CLIENTS,
        partition=_digits_partition(data.partition),
        augmentation=_digits_augmentation(data.augmentation),
    )
    return digits, DIGITS_MODEL, LONGER


def _masks_augmentation(text: str) -> str:
    """Return an augmentation for ``digit_masks``: without the window size, so that windows are as large as the images.

    >>> _masks_augmentation("scale-crop(low=0.5,height=512,width=1024)")
    'scale-crop(low=0.5)'
    """
    calls = [
        (call.name, {k: v for k, v in call.values.items() if k not in ("height", "width")}) for call in parse(text)
    ]
    return "+".join(show(*call) for call in calls)


def _digits_augmentation(text: str) -> str:
    """Return an augmentation for digits: its lengths in pixels are divided by 4, as digits are smaller than CIFAR.

    >>> _digits_augmentation("crop-flip+cutout(size=8)"), _digits_augmentation("none")
    ('crop-flip(padding=1)+cutout(size=2)', 'none')
    """
    if text == "none":
        return text
    lengths = {"crop-flip": ("padding", 4), "cutout": ("size", 16)}  # the parameter in pixels, and its default
    calls = []
    for call in parse(text):
        if call.name in lengths:
            name, default = lengths[call.name]
            call.values[name] = max(1, int(str(call.values.get(name, default))) // DIGITS_REDUCTION)
        calls.append(show(call.name, call.values))
    return "+".join(calls)


def _digits_partition(partition: str) -> str:
    """Return the paper's partition if it is possible on digits, otherwise a similar one.

    Digits have no natural clients and no coarse classes, and only ten classes.
    """
    first = parse(partition)[0]
    if first.name in ("natural", "pachinko"):
        return DIGITS_PARTITION
    if first.name == "pathological" and int(str(first.values.get("classes", 2))) > DIGITS_CLASSES // 2:
        return f"pathological(classes={DIGITS_CLASSES // 2})"
    return partition


def corrupted(examples: Examples, severity: int) -> dict[str, Examples]:
    """Generate three corruptions of uint8 images; return the images by the name of the CIFAR-10-C corruption.

    Args:
        examples: images with pixels from 0 to 255.
        severity: from 1 to 5.
    """
    images = examples.inputs.float() / 255
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(severity))
    centre = images.mean(dim=(1, 2, 3), keepdim=True)
    corruptions = {
        "gaussian_noise": images + 0.06 * severity * noise,
        "brightness": images + 0.1 * severity,
        "contrast": centre + (images - centre) * (1 - 0.16 * severity),
    }
    return {
        name: replace(examples, inputs=(255 * images).round().clamp(0, 255).to(torch.uint8))
        for name, images in corruptions.items()
    }
