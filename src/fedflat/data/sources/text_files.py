"""Texts in ``.jsonl``, ``.csv`` and ``.txt`` files, and Hugging Face datasets of texts, tokenised once and cached."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedflat.data.dataset import Dataset
from fedflat.data.files.cache import cache_entry, fingerprint
from fedflat.data.files.tokeniser import BYTES, TOKENISER_VALUES, file_version, load_tokeniser, tokeniser_versions
from fedflat.data.sources.source import DatasetSource
from fedflat.data.texts import Row, TextFormat, read_texts, write_texts
from fedflat.errors import UserError, missing_file
from fedflat.registry import require_package
from fedflat.text import absolute_path, param

SUFFIXES = (".jsonl", ".txt")
"""A dataset text with one of these suffixes is the path of a file of texts."""
READABLE = (*SUFFIXES, ".csv")
MAX_CSV_FIELD = 2**31 - 1
"""Largest number of characters in a CSV field; Python's limit is 131,072 by default."""


@dataclass(frozen=True)
class TextFileOptions:
    """Location of the texts, their columns and their tokeniser."""

    path: str = param(
        "",
        "a .jsonl, .csv or .txt file (one text per line), a folder with train and test files of that kind, or a folder "
        "written by save_to_disk of a Hugging Face dataset",
        path=True,
        positional=True,
    )
    hub: str | None = param(None, "name of a dataset on the Hugging Face Hub, instead of path")
    subset: str | None = param(None, "with hub: configuration, if the dataset has several")
    text: str = param("text", "column of the text")
    target: str | None = param(None, "column of classes; none trains a language model, which predicts every token")
    group: str | None = param(None, "column of natural clients, such as authors or topics")
    tokeniser: str = param(BYTES, TOKENISER_VALUES, path="if_exists")
    length: int = param(128, "largest number of tokens of an example", low=1)
    pack: bool = param(True, "for language models: join texts of a client, then divide them into equal lengths")


@dataclass(frozen=True)
class TextFiles(DatasetSource):
    """Texts are tokenised when they are first read; the tokens are cached and memory-mapped."""

    options: TextFileOptions = field(default=TextFileOptions(), kw_only=True)

    def read(self, data_dir: Path) -> Dataset:
        """Tokenise the texts unless they are cached, and build the dataset."""
        options = self.options
        splits, versions = self._hub_splits() if options.hub else self._local_splits(absolute_path(self.path))
        content_key = fingerprint([self.text, *versions, *tokeniser_versions(options.tokeniser)])
        layout = TextFormat(options.text, options.target, options.group, options.length, options.pack)

        def write(folder: Path) -> None:
            """Tokenise all texts."""
            tokeniser = load_tokeniser(options.tokeniser)
            rows = {name: split if callable(split) else partial(iter, split) for name, split in splits.items()}
            features = getattr(splits["train"], "features", None) or {}
            classes = getattr(features.get(options.target), "names", None)
            write_texts(folder, rows, layout, tokeniser, self.text, classes)

        return read_texts(cache_entry(data_dir, "text", content_key, write), self.text)

    def is_local(self, data_dir: Path) -> bool:
        """Whether the texts are in files."""
        return self.options.hub is None

    def _local_splits(self, path: Path) -> tuple[dict[str, Any], list[str]]:
        """Return the texts of each split, and the versions of the files they come from."""
        if path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            loaded = require_package("datasets", self.text, extra="hub").load_from_disk(str(path))
            return self._choose_splits(loaded), [file_version(file) for file in sorted(path.rglob("*.*"))]
        files = {"train": path}
        if path.is_dir():
            found = {split: [path / f"{split}{suffix}" for suffix in READABLE] for split in ("train", "test")}
            files = {split: file for split, paths in found.items() for file in paths if file.is_file()}
        if "train" not in files or not files["train"].is_file() or files["train"].suffix.lower() not in READABLE:
            expected = (
                f"a {', '.join(READABLE)} file, a folder with such files named train and test, or a folder written by "
                "save_to_disk of a Hugging Face dataset"
            )
            if not path.exists():
                raise missing_file(path, expected)
            raise UserError(f"{path} has no texts; expected {expected}")
        return {split: partial(_read_file, file) for split, file in files.items()}, [*map(file_version, files.values())]

    def _hub_splits(self) -> tuple[dict[str, Any], list[str]]:
        """Download a dataset from the Hub, unless it is in the cache of ``datasets``."""
        names = [name for name in (self.options.hub, self.options.subset) if name is not None]
        datasets = require_package("datasets", self.text, extra="hub")
        try:
            loaded = datasets.load_dataset(*names)
        except Exception as error:  # the Hub's client has many exception types
            reason = " ".join(str(error).split())
            script = f"import datasets; datasets.load_dataset({', '.join(map(repr, names))}).save_to_disk('DIR')"
            raise UserError(
                f"cannot load {self.options.hub} from the Hugging Face Hub ({reason}); check its name; to use it "
                f'offline, first run this while online: python -c "{script}", then use text(path=DIR)'
            ) from error
        splits = self._choose_splits(loaded)
        return splits, [str(getattr(split, "_fingerprint", "")) for split in splits.values()]

    def _choose_splits(self, loaded: Any) -> dict[str, Any]:
        """Return the splits ``train`` and ``test`` of a Hugging Face dataset; one without splits is ``train``."""
        splits: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        if "train" not in splits:
            raise UserError(f"{self.text} has the splits {', '.join(splits)}; expected a split train")
        return {name: splits[name] for name in ("train", "test") if name in splits}


def _read_file(file: Path) -> Iterator[Row]:
    """Yield the rows of a file, one at a time."""
    suffix = file.suffix.lower()
    try:
        # Excel begins UTF-8 files with a byte order mark, which utf-8-sig drops.
        with file.open(encoding="utf-8-sig", newline="" if suffix == ".csv" else None) as stream:
            if suffix == ".csv":
                csv.field_size_limit(MAX_CSV_FIELD)
                yield from csv.DictReader(stream)
                return
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                yield line.rstrip("\n") if suffix == ".txt" else _parse_line(line, f"line {number} of {file}")
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} cannot be read ({error}); expected text in UTF-8") from error


def _parse_line(line: str, place: str) -> Row:
    """Parse a line of a ``.jsonl`` file; ``place`` names it in messages."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is not valid JSON ({error}); expected an object with a text") from error
    if not isinstance(row, dict):
        raise UserError(
            f'{place} is a {type(row).__name__}; expected a JSON object with a text, such as {{"text": "..."}}'
        )
    return row


TEXT = TextFiles(
    "text", "your texts in .jsonl, .csv or .txt files, or a Hugging Face dataset", example="text(path=reviews.jsonl)"
)
SOURCES = (TEXT,)
