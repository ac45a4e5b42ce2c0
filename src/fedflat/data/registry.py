"""Datasets by name: load, fetch, verify.

A text such as ``pacs(test_domain=sketch,size=64)`` names a dataset with parameters. What has no publisher, a user's own files, is named
the same way: ``images(path=FOLDER)``, ``domains(path=FOLDER)``, ``arrays(path=FILE)``, ``hub(path=NAME)``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fedflat.data.data_dir import data_dir
from fedflat.data.dataset import Dataset, Examples
from fedflat.data.download import Progress, fetch_source
from fedflat.data.sources.array_files import ARRAYS
from fedflat.data.sources.camvid import CAMVID
from fedflat.data.sources.cifar import CIFAR10, CIFAR100
from fedflat.data.sources.cityscapes import CITYSCAPES
from fedflat.data.sources.corruptions import CIFAR10_C, CIFAR100_C, CorruptedCifar
from fedflat.data.sources.digit_masks import DIGIT_MASKS
from fedflat.data.sources.digits import DIGITS
from fedflat.data.sources.domains import OFFICE_HOME, OWN_DOMAINS, PACS
from fedflat.data.sources.femnist import FEMNIST
from fedflat.data.sources.hub import HUB
from fedflat.data.sources.idda import IDDA
from fedflat.data.sources.idx import FASHION_MNIST, MNIST
from fedflat.data.sources.image_folder import IMAGES
from fedflat.data.sources.landmarks import LANDMARKS
from fedflat.data.sources.shakespeare import SHAKESPEARE
from fedflat.data.sources.source import FileReport, Source
from fedflat.data.sources.tiny_imagenet import TINY_IMAGENET
from fedflat.errors import UserError, one_of
from fedflat.text import parse_one, revise, underscored

_PUBLISHED: tuple[Source, ...] = (
    DIGITS,
    MNIST,
    FASHION_MNIST,
    CIFAR10,
    CIFAR100,
    CIFAR10_C,
    CIFAR100_C,
    FEMNIST,
    SHAKESPEARE,
    TINY_IMAGENET,
    LANDMARKS,
    OFFICE_HOME,
    PACS,
    CAMVID,
    CITYSCAPES,
    IDDA,
    DIGIT_MASKS,
)
DATASETS: dict[str, Source] = {source.name: source for source in _PUBLISHED}
"""Published datasets, by name."""
OWN: dict[str, Source] = {source.name: source for source in (IMAGES, OWN_DOMAINS, ARRAYS, HUB)}
"""Kinds of files that a user brings."""


def names() -> tuple[str, ...]:
    """The names of all published datasets."""
    return tuple(DATASETS)


def dataset_source(text: str) -> Source:
    """The source that a text names, with its parameters checked; hyphens in the name are as good as underscores.

    >>> dataset_source("pacs(size=32)").options.size
    32
    """
    call = parse_one(underscored(text))
    known = DATASETS | OWN
    if call.name not in known:
        raise one_of("dataset", call.name, known, "fedflat data")
    source = known[call.name]
    return dataclasses.replace(source, options=revise(source.options, call.values, f"dataset {call.name}"))


def canonical_dataset(text: str) -> str:
    """The shortest text of a dataset.

    >>> canonical_dataset("pacs( size=64, test_domain = sketch )"), canonical_dataset("landmarks(fit=crop)")
    ('pacs(test_domain=sketch)', 'landmarks')
    """
    return dataset_source(text).text


def load(
    text: str, folder: str | Path | None = None, download: bool = True, progress: Progress | None = None
) -> Dataset:
    """A dataset by name, read from the data folder and verified; what is missing is fetched first, unless ``download`` is off."""
    source, where = dataset_source(text), data_dir(folder)
    _complete(source, where, download, progress)
    return source.read(where)


def load_corruptions(
    name: str, folder: str | Path | None = None, download: bool = True, progress: Progress | None = None
) -> dict[str, dict[int, Examples]]:
    """The corrupted test images of ``cifar10`` or ``cifar100``, by corruption and severity (1 to 5), mapped and not yet read."""
    known = {
        of: source
        for source in DATASETS.values()
        if isinstance(source, CorruptedCifar)
        for of in (source.of, source.name)
    }
    if name not in known:
        raise one_of("dataset with corruptions", name, known)
    _complete(known[name], data_dir(folder), download, progress)
    return known[name].examples(data_dir(folder))


def fetch(text: str, folder: str | Path | None = None, progress: Progress | None = None) -> None:
    """Fetch what is missing or damaged of a dataset."""
    fetch_source(dataset_source(text), data_dir(folder), progress)


def verify(text: str, folder: str | Path | None = None) -> tuple[FileReport, ...]:
    """Check every file of a dataset against the hashes that its publisher or we know."""
    return dataset_source(text).verify(data_dir(folder))


def _complete(source: Source, where: Path, download: bool, progress: Progress | None) -> None:
    if not source.missing(where):
        return
    if not download or not source.downloads:
        by_command = f", or by 'fedflat data get {source.name}'" if source.downloads else ""
        raise UserError(f"{source.name} is not all there; {source.expected(where)}{by_command}")
    fetch_source(source, where, progress)
