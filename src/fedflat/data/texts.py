"""Datasets of texts: tokenised once, and stored as memory-mapped arrays.

Language models predict each token from those before it. A row of ``length + 1`` tokens is stored once; its first
``length`` are the inputs, its last ``length`` the targets. Classifiers predict the class of a text.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.data.arrays import from_arrays
from fedflat.data.dataset import IGNORED_TOKEN, TEST_EVERY, Dataset
from fedflat.data.files.cache import open_cached
from fedflat.data.files.mapped import ArrayWriter
from fedflat.data.files.tokeniser import BYTES, Tokeniser, load_tokeniser
from fedflat.errors import UserError

CHUNK = 1000
"""Texts that are tokenised at once."""
Row = Mapping[str, Any] | str
"""One text: with columns by name, or alone."""


@dataclass(frozen=True)
class TextFormat:
    """How to read and tokenise texts.

    Attributes:
        text: column of the text.
        target: column of classes; None for language models.
        group: column of natural clients; None if there is none.
        length: largest number of tokens of an example.
        pack: whether to join the texts of a client and divide them into examples of equal length.
    """

    text: str = "text"
    target: str | None = None
    group: str | None = None
    length: int = 128
    pack: bool = True

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"length={self.length} is out of range; expected a number at least 1")


def from_texts(
    train: Iterable[Row],
    test: Iterable[Row] | None = None,
    *,
    text: str = "text",
    target: str | None = None,
    group: str | None = None,
    tokeniser: Any = BYTES,
    length: int = 128,
    pack: bool = True,
    name: str = "texts",
    classes: Sequence[str] | None = None,
    folder: str | Path | None = None,
) -> Dataset:
    """Build a dataset from texts.

    Args:
        train: texts, or dictionaries with a text and other columns, such as a Hugging Face dataset.
        test: as ``train``; by default every fifth text (of each class) is a test example.
        text: column of the text.
        target: column of classes, as integers from 0 or words; None for language models, which predict every token
            from those before it.
        group: column of natural clients, such as authors or topics; the partition ``natural`` makes each a client.
        tokeniser: ``bytes``, a folder or name of a Hugging Face tokeniser, or the tokeniser itself.
        length: largest number of tokens of an example; longer texts are truncated, or divided if ``pack``.
        pack: for language models, join the texts of a client and divide them into examples of equal length.
        name: name of the dataset.
        classes: class names in the order of their numbers; by default those that occur.
        folder: write the tokens to this new folder and map them, for texts larger than memory.

    Example:
        >>> data = from_texts(["to be or not to be"] * 10, length=8)
        >>> data.input_shape, data.num_classes
        ((8,), 257)
    """
    for argument, value in (("train", train), ("test", test)):
        # Iterating over these gives characters, keys or column names.
        if isinstance(value, str | Mapping) or hasattr(value, "iterrows"):
            raise UserError(
                f"{argument} is a {type(value).__name__}; expected a list of texts or of dictionaries: read files with "
                "fedflat.data.load('text(path=FILE)'), convert tables with table.to_dict('records')"
            )
    texts = [*train] if test is None and not isinstance(train, Sequence) else train  # read twice, unlike an iterator
    splits: dict[str, Callable[[], Iterable[Row]]] = {"train": lambda: texts}
    if test is not None:
        splits["test"] = lambda: test
    layout = TextFormat(text, target, group, length, pack)
    encoder = load_tokeniser(tokeniser)
    target_folder = None if folder is None else Path(folder)
    if target_folder is not None:
        if target_folder.exists():
            raise UserError(f"the folder {target_folder} exists; name a new one, or remove it")
        target_folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target_folder and target_folder.parent) as directory:
        content = Path(directory) / "texts"
        content.mkdir()
        write_texts(content, splits, layout, encoder, name, classes)
        if target_folder is None:
            return read_texts(content, name, in_memory=True)
        content.rename(target_folder)
    return read_texts(target_folder, name)


def write_texts(
    folder: Path,
    splits: Mapping[str, Callable[[], Iterable[Row]]],
    layout: TextFormat,
    tokeniser: Tokeniser,
    name: str,
    classes: Sequence[str] | None = None,
) -> None:
    """Tokenise texts and write them as arrays, which ``read_texts`` reads.

    Args:
        folder: an empty folder.
        splits: functions that return the texts of ``train`` and ``test``; without ``test``, every fifth text of each
            class in ``train`` is a test example.
        layout: names of the columns, and how to divide texts.
        tokeniser: the tokeniser.
        name: name of the dataset, for messages.
        classes: class names; None for those that occur.
    """
    longest = 0
    for split in ("train", "test"):
        split_name = f"the {'training' if split == 'train' else 'test'} set of {name}"
        rows = _checked_rows(splits.get(split, splits["train"])(), split_name, layout)
        if "test" not in splits:
            rows = _every_fifth(rows, split == "test")
        labels, groups = [], []
        with ArrayWriter(folder / f"{split}_rows.npy", (layout.length + (layout.target is None),), np.int64) as writer:
            examples = _sequences if layout.target is None else _classified
            for tokens, label, group in examples(rows, layout, tokeniser):
                longest = max(longest, len(tokens))
                writer.append(
                    np.pad(tokens, (0, writer.row_shape[0] - len(tokens)), constant_values=IGNORED_TOKEN)[None]
                )
                labels.append(label)
                groups.append(group)
        if not groups:
            raise UserError(
                f"{split_name} is empty; expected at least one text"
                + ("" if "test" in splits else "; without a test set, every fifth text is for testing")
            )
        for what, column, values in (("targets", layout.target, labels), ("groups", layout.group, groups)):
            if column is not None:
                np.save(folder / f"{split}_{what}.npy", _as_column(values, column, split_name))
    vocabulary = tokeniser.vocabulary if layout.target is None else classes
    about = {"longest": longest, "classes": None if vocabulary is None else list(vocabulary)}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def read_texts(folder: Path, name: str, in_memory: bool = False) -> Dataset:
    """Build a dataset from the arrays that ``write_texts`` wrote.

    Args:
        folder: the folder.
        name: name of the dataset.
        in_memory: whether to read the tokens into memory instead of mapping them.
    """
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    arrays: dict[str, Any] = {}
    for split in ("train", "test"):
        rows, targets = open_cached(folder, f"{split}_rows"), folder / f"{split}_targets.npy"
        if targets.exists():
            parts = [rows.part(0, about["longest"], dim=1), np.load(targets)]
        else:
            parts = [rows.part(start, about["longest"] - 1, dim=1) for start in (0, 1)]
        groups = folder / f"{split}_groups.npy"
        arrays[f"{split}_groups"] = np.load(groups) if groups.exists() else None
        arrays[f"{split}_inputs"], arrays[f"{split}_targets"] = (
            part.clone() if in_memory and not isinstance(part, np.ndarray) else part for part in parts
        )
    return from_arrays(**arrays, name=name, classes=about["classes"])


def _checked_rows(rows: Iterable[Row], split_name: str, layout: TextFormat) -> Iterator[tuple[str, Any, Any]]:
    """Yield (text, class, client) of each row; class and client are None without such columns."""
    columns = {"text": layout.text, "target": layout.target, "group": layout.group}
    for number, row in enumerate(rows):
        fields = {layout.text: row} if isinstance(row, str) else row
        if not isinstance(fields, Mapping):
            raise UserError(f"row {number} of {split_name} is a {type(row).__name__}; expected a text or a dictionary")
        for option, column in columns.items():
            if column is not None and column not in fields:
                raise UserError(
                    f"row {number} of {split_name} has no column '{column}'; name another with {option}= "
                    f"(columns: {', '.join(map(str, fields))})"
                )
            if column is not None and fields[column] in (None, ""):
                missing = "is empty" if option == "text" else "is missing"
                raise UserError(f"the {option} of row {number} of {split_name} {missing}; remove the row or fill it in")
        if not isinstance(fields[layout.text], str):
            raise UserError(
                f"column '{layout.text}' of row {number} of {split_name} is a {type(fields[layout.text]).__name__}; "
                "expected a text; name another column with text="
            )
        for column in (layout.target, layout.group):
            if column is not None and isinstance(fields[column], list | tuple | dict | set | np.ndarray):
                raise UserError(
                    f"column '{column}' of row {number} of {split_name} is a {type(fields[column]).__name__}; "
                    "expected a word or a number"
                )
        label, group = (None if column is None else fields[column] for column in (layout.target, layout.group))
        yield fields[layout.text], label, group


def _every_fifth(rows: Iterator[tuple[str, Any, Any]], test: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield every fifth row of each class if ``test``, else the other rows."""
    seen: Counter[Any] = Counter()
    for row in rows:
        seen[row[1]] += 1
        if (seen[row[1]] % TEST_EVERY == 0) == test:
            yield row


def _chunks(rows: Iterator[tuple[str, Any, Any]]) -> Iterator[tuple[list[str], list[Any], list[Any]]]:
    """Yield up to ``CHUNK`` texts, classes and clients at a time."""
    while chunk := list(itertools.islice(rows, CHUNK)):
        texts, labels, groups = zip(*chunk, strict=True)
        yield list(texts), list(labels), list(groups)


def _classified(
    rows: Iterator[tuple[str, Any, Any]], layout: TextFormat, tokeniser: Tokeniser
) -> Iterator[tuple[list[int], Any, Any]]:
    """Yield the tokens, class and client of each text."""
    for texts, labels, groups in _chunks(rows):
        yield from zip(tokeniser.classified(texts, layout.length), labels, groups, strict=True)


def _sequences(
    rows: Iterator[tuple[str, Any, Any]], layout: TextFormat, tokeniser: Tokeniser
) -> Iterator[tuple[list[int], None, Any]]:
    """Yield the rows for language models, with at least two tokens, and their clients.

    Packed rows overlap by one token, so that every token except a client's first is predicted once.
    """
    size = layout.length + 1
    remaining: dict[Any, list[int]] = {}  # tokens of each client that do not fill a row yet
    for texts, _, groups in _chunks(rows):
        for tokens, group in zip(tokeniser.sequences(texts), groups, strict=True):
            if not layout.pack:
                if len(tokens) > 1:
                    yield tokens[:size], None, group
                continue
            joined, start = remaining.get(group, []) + tokens, 0
            while len(joined) - start >= size:
                yield joined[start : start + size], None, group
                start += layout.length
            remaining[group] = joined[start:]
    yield from ((tokens, None, group) for group, tokens in remaining.items() if len(tokens) > 1)


def _as_column(values: list[Any], column: str, split_name: str) -> np.ndarray:
    """Convert classes or clients to integers if all of them are, else to words."""
    words = [str(value) for value in values]
    if any(isinstance(value, float) and not value.is_integer() for value in values):
        raise UserError(f"column '{column}' of {split_name} contains fractions; expected classes or clients")
    if all(isinstance(value, int | float) or word.isdecimal() for value, word in zip(values, words, strict=True)):
        return np.array([int(value) for value in values], dtype=np.int64)
    return np.array(words)
