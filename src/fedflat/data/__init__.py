"""Datasets by name, their division among clients, and their augmentation."""

from fedflat.data.arrays import from_arrays
from fedflat.data.augment import AUGMENTATIONS, Augmentation, augmentation, normalise
from fedflat.data.data_dir import data_dir
from fedflat.data.dataset import IGNORED, Dataset, Examples, describe
from fedflat.data.flower import from_flower
from fedflat.data.mapped import MappedTensor, open_mapped
from fedflat.data.partition import (
    PARTITION_MODIFIERS,
    PARTITIONERS,
    Partition,
    canonical_partition,
    fixes_clients,
    full_partition,
    make_partition,
)
from fedflat.data.partitioners.listed import listed
from fedflat.data.per_client import from_clients
from fedflat.data.registry import (
    DATASETS,
    OWN,
    canonical_dataset,
    dataset_source,
    fetch,
    load,
    load_corruptions,
    names,
    verify,
)
from fedflat.data.sources.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, SEVERITIES
from fedflat.data.torch_dataset import from_torch

__all__ = [
    "AUGMENTATIONS",
    "CORRUPTIONS",
    "DATASETS",
    "EXTRA_CORRUPTIONS",
    "IGNORED",
    "OWN",
    "SEVERITIES",
    "PARTITIONERS",
    "PARTITION_MODIFIERS",
    "Augmentation",
    "Dataset",
    "Examples",
    "MappedTensor",
    "Partition",
    "augmentation",
    "canonical_dataset",
    "canonical_partition",
    "data_dir",
    "dataset_source",
    "describe",
    "fetch",
    "fixes_clients",
    "from_arrays",
    "from_clients",
    "from_flower",
    "from_torch",
    "full_partition",
    "listed",
    "load",
    "load_corruptions",
    "names",
    "normalise",
    "open_mapped",
    "make_partition",
    "verify",
]
