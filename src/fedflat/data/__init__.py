"""Data sets by name, their division among clients, and their augmentation."""

from fedflat.data.arrays import from_arrays
from fedflat.data.augment import AUGMENTATIONS, Augmentation, augmentation, normalise
from fedflat.data.dataset import Dataset, Examples, describe
from fedflat.data.folder import data_folder
from fedflat.data.registry import DATASETS, fetch, load, names, verify
from fedflat.data.split import SPLIT_PARTS, SPLITS, Split, canonical_split, fixes_clients, full_split, partition

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "SPLITS",
    "SPLIT_PARTS",
    "Augmentation",
    "Dataset",
    "Examples",
    "Split",
    "augmentation",
    "canonical_split",
    "data_folder",
    "describe",
    "fetch",
    "fixes_clients",
    "from_arrays",
    "full_split",
    "load",
    "names",
    "normalise",
    "partition",
    "verify",
]
