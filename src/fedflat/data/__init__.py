"""Datasets, their partition over clients, and augmentation.

``registry`` maps a name to a ``sources`` module, which reads files with ``files`` and returns a ``dataset.Dataset``;
``partition`` distributes it over clients; ``batches`` turns rows into batches. Imports no other package of fedflat.
"""

from fedflat.data.arrays import from_arrays, from_clients
from fedflat.data.augmentations import AUGMENTATIONS
from fedflat.data.batches import Augmentation, augmentation, normalise
from fedflat.data.dataset import IGNORED, IGNORED_TOKEN, Dataset, Examples
from fedflat.data.description import describe
from fedflat.data.files.mapped import MappedTensor, open_mapped
from fedflat.data.flower import from_flower
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
from fedflat.data.registry import (
    DATASETS,
    canonical_dataset,
    dataset_source,
    fetch,
    load,
    load_corruptions,
    names,
    spell_dataset,
    verify,
)
from fedflat.data.scaling import standardise
from fedflat.data.sources.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, SEVERITIES
from fedflat.data.sources.source import data_dir
from fedflat.data.texts import from_texts
from fedflat.data.torch_dataset import from_torch

__all__ = [
    "AUGMENTATIONS",
    "CORRUPTIONS",
    "DATASETS",
    "EXTRA_CORRUPTIONS",
    "IGNORED",
    "IGNORED_TOKEN",
    "PARTITIONERS",
    "PARTITION_MODIFIERS",
    "SEVERITIES",
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
    "from_texts",
    "from_torch",
    "full_partition",
    "listed",
    "load",
    "load_corruptions",
    "make_partition",
    "names",
    "normalise",
    "open_mapped",
    "spell_dataset",
    "standardise",
    "verify",
]
