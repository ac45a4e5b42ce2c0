"""Data sets by name: load, fetch, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedflat.data.dataset import Dataset
from fedflat.data.download import Progress, fetch_source
from fedflat.data.folder import data_folder
from fedflat.data.sources.cifar import CIFAR10, CIFAR100
from fedflat.data.sources.digits import DIGITS
from fedflat.data.sources.idx import FASHION_MNIST, MNIST
from fedflat.data.sources.source import FileReport, Source
from fedflat.errors import UserError, one_of

DATASETS: dict[str, Source[Any]] = {source.name: source for source in (DIGITS, MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}


def names() -> tuple[str, ...]:
    """The names of all data sets."""
    return tuple(DATASETS)


def load(name: str, folder: Path | None = None, download: bool = True, progress: Progress | None = None) -> Dataset:
    """A data set by name, read from the data folder and verified; what is missing is fetched first, unless ``download`` is off."""
    source, where = _source(name), data_folder(folder)
    if source.missing(where):
        if not download:
            raise UserError(f"{name} is not all there; {source.expected(where)}, or by 'fedflat data get {name}'")
        fetch_source(source, where, progress)
    return source.read(where)


def fetch(name: str, folder: Path | None = None, progress: Progress | None = None) -> None:
    """Fetch what is missing or damaged of a data set."""
    fetch_source(_source(name), data_folder(folder), progress)


def verify(name: str, folder: Path | None = None) -> tuple[FileReport, ...]:
    """Check every file of a data set against the hashes that its publisher or we know."""
    return _source(name).verify(data_folder(folder))


def _source(name: str) -> Source[Any]:
    if name not in DATASETS:
        raise one_of("data set", name, DATASETS, "fedflat data")
    return DATASETS[name]
