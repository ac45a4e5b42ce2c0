"""The registry of datasets: load, download and verify a dataset by name.

A text such as ``pacs(test_domain=sketch,size=64)`` names a dataset with parameters. User data is named the same way:
``images(path=FOLDER)``, ``domains(path=FOLDER)``, ``arrays(path=FILE)``, ``text(path=FILE)``, ``hub(path=NAME)``.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from fedflat.data.dataset import Dataset, Examples
from fedflat.data.files.download import Progress, download_source
from fedflat.data.sources import (
    array_files,
    camvid,
    cifar,
    cityscapes,
    corruptions,
    digit_masks,
    digits,
    domains,
    femnist,
    hub,
    idda,
    idx,
    image_folder,
    landmarks,
    shakespeare,
    text_files,
    tiny_imagenet,
)
from fedflat.data.sources.source import DatasetSource, FileReport
from fedflat.data.sources.source import data_dir as resolve_data_dir
from fedflat.errors import UserError, no_folder, one_of, similar_file
from fedflat.registry import Registry
from fedflat.text import parse_one, revise, write_value

DATASETS: Registry[DatasetSource] = Registry("dataset", see="fedflat data list")
"""Registry of all datasets by name: published datasets, and kinds of user data, which have an ``example``."""
for _module in (
    digits, idx, cifar, corruptions, femnist, shakespeare, tiny_imagenet, landmarks, domains, camvid, cityscapes, idda,
    digit_masks, image_folder, array_files, text_files, hub,
):  # fmt: skip
    for _source in _module.SOURCES:
        DATASETS.register(_source.name, _source)


def names() -> tuple[str, ...]:
    """Return the names of all published datasets."""
    return tuple(name for name, source in DATASETS.items() if not source.example)


def dataset_source(text: str) -> DatasetSource:
    """Look up a dataset by its text, e.g. ``pacs(size=32)``, and check its parameters.

    >>> dataset_source("pacs(size=32)").options.size
    32
    """
    spelling = spell_dataset(text)
    if spelling.partition("(")[0] not in DATASETS and _exists(text):
        if not Path(text).is_dir():
            suffixes = ", ".join(array_files.SUFFIXES + text_files.SUFFIXES)
            raise UserError(
                f"{text} has an unknown format; expected {suffixes}, or images(path=...) for a zip file of images"
            )
        raise UserError(
            f"{text} is a folder; use images(path={text}) for images, arrays(path={text}) for .npy files, or "
            f"text(path={text}) for texts"
        )
    if "(" not in spelling and any(separator in text for separator in "/\\"):
        path = Path(text.strip())
        hint = similar_file(path) if _exists(str(path.parent)) else ""
        raise UserError(
            f"{text} does not exist{hint}; expected a file of arrays or texts, a folder as in "
            "images(path=FOLDER), or the name of a dataset (list all: fedflat data list)"
        )
    call = parse_one(spelling)
    source = DATASETS.find(call.name)
    return dataclasses.replace(source, options=revise(source.options, call.values, source.name))


def _exists(text: str) -> bool:
    """Whether a text is the path of a file or folder; False also for texts that cannot be a path."""
    try:
        return bool(text.strip()) and Path(text).exists()
    except (OSError, ValueError):
        return False


def spell_dataset(text: str) -> str:
    """Convert the name in a dataset text to its registered spelling, and the path of a file to a dataset with a path.

    >>> spell_dataset("CIFAR-10"), spell_dataset("wine.npz"), spell_dataset("reviews.jsonl")
    ('cifar10', 'arrays(path=wine.npz)', 'text(path=reviews.jsonl)')
    """
    for name, suffixes in (("arrays", array_files.SUFFIXES), ("text", text_files.SUFFIXES)):
        if text.strip().lower().endswith(suffixes):
            return f"{name}(path={write_value(text.strip())})"
    name, parenthesis, rest = text.strip().partition("(")
    return (DATASETS.spelling(name.strip()) or name) + parenthesis + rest


def canonical_dataset(text: str) -> str:
    """Return the shortest text that names the same dataset.

    >>> canonical_dataset("pacs( size=64, test_domain = sketch )"), canonical_dataset("landmarks(fit=crop)")
    ('pacs(test_domain=sketch)', 'landmarks')
    """
    return dataset_source(text).text


def load(
    text: str | Path,
    data_dir: str | Path | None = None,
    download: bool = True,
    progress: Progress | None = None,
    numbers: bool = False,
) -> Dataset:
    """Load a dataset by name.

    Args:
        text: name and parameters, e.g. ``cifar10`` or ``pacs(test_domain=sketch)``, or the path of a file.
        data_dir: the data directory; see ``fedflat.data.data_dir``.
        download: whether to download missing files.
        progress: called while bytes arrive with the file name, the bytes received and the total size if known.
        numbers: whether integer targets are numbers to predict (regression) instead of classes.
    """
    source, directory = dataset_source(str(text)), resolve_data_dir(data_dir)
    _ensure_complete(source, directory, download, progress)
    return source.read_numbers(directory) if numbers else source.read(directory)


def load_corruptions(
    name: str, data_dir: str | Path | None = None, download: bool = True, progress: Progress | None = None
) -> dict[str, dict[int, Examples]]:
    """Load the corrupted test images of ``cifar10`` or ``cifar100`` (CIFAR-10-C, CIFAR-100-C).

    Args:
        name: the dataset.
        data_dir: the data directory; see ``fedflat.data.data_dir``.
        download: whether to download missing files.
        progress: called while bytes arrive with the file name, the bytes received and the total size if known.

    Returns:
        Examples by corruption and severity (1 to 5), mapped and read on access.
    """
    sources = [source for source in DATASETS.values() if isinstance(source, corruptions.CorruptedCifar)]
    by_name = {name: source for source in sources for name in (source.of, source.name)}  # e.g. cifar10 and cifar10_c
    name = spell_dataset(name)
    if name not in by_name:
        raise one_of("dataset with corruptions", name, by_name)
    directory = resolve_data_dir(data_dir)
    _ensure_complete(by_name[name], directory, download, progress)
    return by_name[name].examples(directory)


def fetch(text: str, data_dir: str | Path | None = None, progress: Progress | None = None) -> None:
    """Download the missing or damaged files of a dataset.

    Args:
        text: name and parameters, e.g. ``cifar10`` or ``pacs(test_domain=sketch)``.
        data_dir: the data directory; see ``fedflat.data.data_dir``.
        progress: called while bytes arrive with the file name, the bytes received and the total size if known.
    """
    directory = resolve_data_dir(data_dir)
    if directory.exists() and not directory.is_dir():
        raise no_folder(directory, "the data folder")
    download_source(dataset_source(text), directory, progress)


def verify(text: str, data_dir: str | Path | None = None) -> tuple[FileReport, ...]:
    """Hash every file of a dataset and compare it with the known hashes.

    Args:
        text: name and parameters, e.g. ``cifar10`` or ``pacs(test_domain=sketch)``.
        data_dir: the data directory; see ``fedflat.data.data_dir``.

    Returns:
        One report per file: its path, its hash, and whether the hash is the known one.
    """
    source, directory = dataset_source(text), resolve_data_dir(data_dir)
    _ensure_complete(source, directory, download=False, progress=None)
    return source.verify(directory)


def _ensure_complete(source: DatasetSource, directory: Path, download: bool, progress: Progress | None) -> None:
    """Download missing files, or raise a ``UserError`` that says how to obtain them.

    Args:
        source: the dataset.
        directory: the data directory.
        download: whether downloading is allowed.
        progress: called while bytes arrive with the file name, the bytes received and the total size if known.
    """
    if not source.missing(directory):
        return
    if directory.exists() and not directory.is_dir():
        raise no_folder(directory, "the data folder")
    if not download or not source.downloads:
        folder = "" if directory == resolve_data_dir(None) else f" --data-dir {shlex.quote(str(directory))}"
        command = f", or run 'fedflat data get {source.name}{folder}'" if source.downloads else ""
        problem = "incomplete" if directory.exists() else f"missing: there is no folder {directory}"
        raise UserError(f"{source.name} is {problem}; {source.file_instructions(directory)}{command}")
    download_source(source, directory, progress)
