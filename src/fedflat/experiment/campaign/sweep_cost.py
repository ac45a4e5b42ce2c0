"""What a sweep takes on disk, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedflat import data as datasets
from fedflat.experiment.campaign.estimate import disk_use
from fedflat.experiment.config import Config
from fedflat.experiment.setup.network import network_of
from fedflat.experiment.store.cleanup import Keep


@dataclass(frozen=True)
class DiskUse:
    """Bytes of several runs."""

    most: int
    """While all that can run at the same time does, the others being over."""
    kept: int
    """Once all are over."""


def sweep_disk(configs: Sequence[Config], keep: Keep, at_once: int) -> DiskUse:
    """What runs write, and what of it stays."""
    sizes: dict[tuple[str, ...], tuple[int, int, int]] = {}
    kept, more = 0, []
    for config in configs:
        key = _kind(config)
        sizes[key] = sizes.get(key) or _sizes(config)
        found = disk_use(config, *sizes[key])
        parts = {"checkpoint": found.checkpoint, "snapshots": found.snapshots, "models": found.models}
        kept += sum(size for part, size in parts.items() if part not in keep.removed)
        more.append(sum(size for part, size in parts.items() if part in keep.removed))
    return DiskUse(kept + sum(sorted(more)[-at_once:]), kept)


def _kind(config: Config) -> tuple[str, ...]:
    """What sizes depend on."""
    d = config.data
    partition = (d.partition, str(d.partition_seed), str(config.seed)) if datasets.fixes_clients(d.partition) else ()
    return (config.model, config.training.train, d.dataset, str(d.dir), str(d.clients), *partition)


def _sizes(config: Config) -> tuple[int, int, int]:
    """Trained numbers, statistics, and clients."""
    data = datasets.load(config.data.dataset, config.data.dir)
    network = network_of(
        config.model_copy(update={"init": None, "init_head": "given"}), data.input_shape, data.num_classes
    )
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    statistics = sum(buffer.numel() for buffer in network.buffers() if buffer.is_floating_point())
    return trained, statistics, _clients(config, data)


def _clients(config: Config, data: datasets.Dataset) -> int:
    d = config.data
    if d.clients is not None and not datasets.fixes_clients(d.partition):
        return d.clients
    seed = config.seed if d.partition_seed is None else d.partition_seed
    train = data.train
    return len(
        datasets.make_partition(
            d.partition, train.targets, data.num_classes, None, seed, d.validation, train.groups, train.coarse
        ).clients
    )
