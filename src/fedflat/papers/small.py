"""Small scale: the same structure, small everything, and a stand-in for data and models that are not at hand or too large."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedflat.data import DATASETS, Examples, canonical_partition, data_dir
from fedflat.experiment.config import Config, DataSettings
from fedflat.text import parse, show

CLIENTS, PER_ROUND, EXAMPLES = 10, 3, 200
SHORT = {"rounds": 4, "local_steps": 2, "batch_size": 8}
LONGER = {"rounds": 20, "local_steps": 10, "batch_size": 16}
"""For the embedded digits, on which a step takes no time: enough for most methods to learn something."""
DIGITS, ITS_MODEL, ITS_SPLIT = "digits", "mlp(hidden=32)", "dirichlet(alpha=0.1)"
ITS_CLASSES, ITS_SHARE = 10, 4
"""Their classes, and how many times their sides go into those of the images that they stand for."""
DENSE, MASKS, UNSEEN = "bisenetv2", "digit_masks", "night"
"""The model of dense tasks, the data that stand for theirs, and the domain of those that is left out of training."""
SMALLER = {"vgg11": "resnet20", "resnet18": "resnet20", "mobilenetv2": "resnet20"}
"""What stands for models that would take minutes."""


def at_hand(data: str, folder: Path | None) -> bool:
    """Whether a dataset's files are here."""
    source = DATASETS.get(parse(data)[0].name)
    return source is not None and not source.missing(data_dir(folder))


def small(config: Config, folder: Path | None = None) -> tuple[Config, tuple[str, ...]]:
    """A config at small scale, and what stands for what in it."""
    data, model, length = _stand_ins(config, folder)
    alone, everyone = (
        canonical_partition(data.partition) == "centralised",
        config.federation.clients_per_round == config.data.clients,
    )
    clients = 1 if alone else data.clients
    clients_per_round = (
        clients if clients is not None and (alone or everyone) else min(config.federation.clients_per_round, PER_ROUND)
    )
    made = config.model_copy(
        update={
            "model": model,
            "data": data.model_copy(update={"folder": folder, "clients": clients}),
            "federation": config.federation.model_copy(update={"clients_per_round": clients_per_round}),
            "training": config.training.model_copy(update={"epochs": 1, **length}),
            "evaluation": config.evaluation.model_copy(update={"every": 1, "final": 0, "examples": EXAMPLES}),
            "engine": config.engine.model_copy(update={"workers": 1}),
        }
    )
    names = ("name", "partition", "augmentation")
    pairs = [(model, config.model), *((getattr(data, name), getattr(config.data, name)) for name in names)]
    return made, tuple(f"{new} for {old}" for new, old in pairs if new != old)


def _stand_ins(config: Config, folder: Path | None) -> tuple[DataSettings, str, dict[str, int]]:
    """Data, model and length of a run: the data themselves where they are at hand, else what is embedded."""
    data, model = config.data, parse(config.model)[0].name
    if at_hand(data.dataset, folder):
        return data, SMALLER.get(model, config.model), SHORT
    if model == DENSE:
        name = f"{MASKS}(unseen={UNSEEN})" if "unseen" in parse(data.dataset)[0].values else MASKS
        made = {"name": name, "clients": None if data.clients is None else CLIENTS}
        return data.model_copy(update=made), f"{DENSE}(width=0.25,auxiliary=false)", SHORT
    made = {
        "name": DIGITS,
        "clients": CLIENTS,
        "partition": _partition_of_digits(data.partition),
        "augmentation": _augmentation_of_digits(data.augmentation),
    }
    return data.model_copy(update=made), ITS_MODEL, LONGER


def _augmentation_of_digits(text: str) -> str:
    """The same augmentation, with lengths as much smaller as the embedded images are.

    >>> _augmentation_of_digits("crop-flip+cutout(size=8)"), _augmentation_of_digits("none")
    ('crop-flip(padding=1)+cutout(size=2)', 'none')
    """
    if text == "none":
        return text
    made = []
    for call in parse(text):
        for name, usual in {"crop-flip": {"padding": 4}, "cutout": {"size": 16}}.get(call.name, {}).items():
            call.values[name] = max(1, int(str(call.values.get(name, usual))) // ITS_SHARE)
        made.append(show(call.name, call.values))
    return "+".join(made)


CORRUPTIONS = "noise, brightness and contrast changed here"
"""What stands for corrupted test images that were published."""


def corrupted(examples: Examples, severity: int) -> dict[str, Examples]:
    """Images as bytes under three corruptions that are made here, by the names of the published ones."""
    images = examples.inputs.float() / 255
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(severity))
    centre = images.mean(dim=(1, 2, 3), keepdim=True)
    changed = {
        "gaussian_noise": images + 0.06 * severity * noise,
        "brightness": images + 0.1 * severity,
        "contrast": centre + (images - centre) * (1 - 0.16 * severity),
    }
    bytes_of = {name: (255 * image).round().clamp(0, 255).to(torch.uint8) for name, image in changed.items()}
    return {name: replace(examples, inputs=image) for name, image in bytes_of.items()}


def _partition_of_digits(partition: str) -> str:
    """The same partition, where the embedded data can be divided by it; what it needs may be missing there."""
    first = parse(partition)[0]
    if first.name in ("natural", "pachinko"):
        return ITS_SPLIT
    if first.name == "pathological" and int(str(first.values.get("classes", 2))) > ITS_CLASSES // 2:
        return f"pathological(classes={ITS_CLASSES // 2})"
    return partition
