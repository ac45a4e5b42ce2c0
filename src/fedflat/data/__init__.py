"""Data sets by name, their division among clients, and their augmentation."""

from fedflat.data.arrays import from_arrays
from fedflat.data.augment import AUGMENTATIONS, Augmentation, augmentation, normalise
from fedflat.data.dataset import Dataset, Examples, describe
from fedflat.data.folder import data_folder
from fedflat.data.registry import DATASETS, fetch, load, names, verify
from fedflat.data.split import SPLITS, Split, canonical_split, partition

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "SPLITS",
    "Augmentation",
    "Dataset",
    "Examples",
    "Split",
    "augmentation",
    "canonical_split",
    "data_folder",
    "describe",
    "fetch",
    "from_arrays",
    "load",
    "names",
    "normalise",
    "partition",
    "verify",
]
