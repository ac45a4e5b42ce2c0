"""Shakespeare (LEAF): prediction of the next character or subword; natural clients are roles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedflat.data.dataset import Dataset, Examples
from fedflat.data.files.cache import cache_entry, fingerprint
from fedflat.data.files.mapped import MappedTensor
from fedflat.data.files.tokeniser import TOKENISER_VALUES, load_tokeniser, tokeniser_versions
from fedflat.data.sources.leaf import ArraysByName, Leaf
from fedflat.data.sources.source import DatasetCard
from fedflat.data.texts import Row, TextFormat, read_texts, write_texts
from fedflat.errors import UserError
from fedflat.text import param

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
UNKNOWN = 255
"""Stands for bytes outside the alphabet; ``convert`` rejects them, so this number never occurs in the data."""


@dataclass(frozen=True)
class ShakespeareOptions:
    """Which characters or subwords to predict."""

    targets: Literal["all", "last"] = param(
        "all",
        "characters to predict: the next one at each of the 80 positions (all), or the one after the sequence (last)",
    )
    tokeniser: str | None = param(None, f"predict tokens instead of characters: {TOKENISER_VALUES}", path="if_exists")
    length: int = param(80, "with tokeniser: tokens per example", low=1)


@dataclass(frozen=True)
class Shakespeare(Leaf):
    """An example is a sequence of 80 characters from LEAF's alphabet; each character's target is the next one.

    A sequence and its next character are stored as one row of 81; inputs are its first 80 and targets its last 80
    characters, two views of the same file.
    """

    classes = tuple(CHARACTERS)
    kind = "text"
    options: ShakespeareOptions = field(default=ShakespeareOptions(), kw_only=True)

    def read(self, data_dir: Path) -> Dataset:
        """Read characters; with ``tokeniser``, join them to texts and tokenise these, unless they are cached."""
        tokeniser = self.options.tokeniser
        if tokeniser is None:
            return super().read(data_dir)
        if self.options.targets == "last":
            raise UserError(f"{self.text}: targets=last predicts characters; remove it, or remove tokeniser")
        characters = super().read(data_dir)
        assert isinstance(characters.train.inputs, MappedTensor)
        folder_name = characters.train.inputs.path.parent.name  # contains a fingerprint of the files
        content_key = fingerprint([folder_name, tokeniser, self.options.length, *tokeniser_versions(tokeniser)])

        def write(folder: Path) -> None:
            """Tokenise all texts."""
            splits = {name: partial(_texts, characters, name == "test") for name in ("train", "test")}
            layout = TextFormat(group="role", length=self.options.length)
            write_texts(folder, splits, layout, load_tokeniser(tokeniser), self.text)

        return read_texts(cache_entry(data_dir, f"{self.name}-tokens", content_key, write), self.text)

    def convert(self, x: list[Any], y: list[Any]) -> ArraysByName:
        """Convert one role's examples to arrays; raises a ``ValueError`` for invalid ones.

        Args:
            x: texts of 80 characters.
            y: the character that follows each text.

        Returns:
            ``rows`` [n, 81] int64, the numbers of the 80 characters and of the next one.
        """
        if {len(line) for line in x} != {LENGTH} or {len(character) for character in y} != {1}:
            raise ValueError(f"expected inputs of {LENGTH} characters and labels of one")
        text = "".join(line + character for line, character in zip(x, y, strict=True))
        unknown = sorted(set(text) - set(CHARACTERS))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not one of LEAF's {len(CHARACTERS)} characters")
        # A lookup table from the byte of a character to its position in the alphabet.
        number_of_byte = np.full(256, UNKNOWN, dtype=np.int64)
        number_of_byte[np.frombuffer(CHARACTERS.encode("ascii"), dtype=np.uint8)] = np.arange(len(CHARACTERS))
        numbers = number_of_byte[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]
        return {"rows": numbers.reshape(-1, LENGTH + 1)}

    def examples(self, arrays: dict[str, MappedTensor], groups: torch.Tensor) -> Examples:
        """Return inputs [n, 80] and targets [n, 80], or [n] for ``targets=last``."""
        inputs, next_characters = (arrays["rows"].part(start, LENGTH, dim=1) for start in (0, 1))
        targets = next_characters[:, -1].clone() if self.options.targets == "last" else next_characters
        return Examples(inputs, targets, groups)


def _texts(data: Dataset, test: bool) -> Iterator[Row]:
    """Join sequences of characters that overlap in all but one, and yield each text with its role.

    A test text starts after its first sequence, which may be the end of the role's training text.
    """
    examples = data.test if test else data.train
    assert examples.groups is not None
    characters, groups = np.array(list(CHARACTERS)), examples.groups.numpy()
    for group in np.unique(groups):
        first, end = np.searchsorted(groups, (group, group + 1))  # examples are sorted by role
        inputs, targets = examples.inputs[first:end].numpy(), examples.targets[first:end].numpy()
        continues = (inputs[1:] == targets[:-1]).all(1)
        for rows in np.split(np.arange(len(inputs)), np.flatnonzero(~continues) + 1):
            numbers = np.concatenate([inputs[rows[0]][LENGTH * test :], targets[rows, -1]])
            yield {"text": "".join(characters[numbers]), "role": data.group_names[group]}


SHAKESPEARE = Shakespeare(
    "shakespeare",
    "next-character prediction in Shakespeare's plays, by speaking role (LEAF)",
    instructions=(
        "generate the files with LEAF: clone https://github.com/TalwalkarLab/leaf, run "
        "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample -tf 0.8 in the folder data/shakespeare of the clone, and copy "
        "the resulting folders data/train and data/test to shakespeare/data in fedflat's data directory"
    ),
    card=DatasetCard(
        examples="as generated by LEAF: up to 4,226,158 in total",
        shape="80 characters",
        classes="80",
        clients="roles, up to 1,129",
        citation="LEAF, Caldas et al. 2018",
        licence="generated by LEAF (BSD-2-Clause) from the works of Shakespeare, which are in the public domain",
        checks="every file is complete and every user has the declared number of examples",
        model="char-lstm",
    ),
)
SOURCES = (SHAKESPEARE,)
