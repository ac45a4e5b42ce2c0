"""Shakespeare: the next character of what a role says, a client per role (LEAF)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedflat.data.dataset import Dataset, Examples
from fedflat.data.sources.leaf import Kept, Leaf
from fedflat.text import param

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
UNKNOWN = 255


@dataclass(frozen=True)
class ShakespeareOptions:
    """What is to be predicted."""

    targets: Literal["all", "last"] = param(
        "all", "the next character at each of the 80 positions, or the one after the last"
    )


@dataclass(frozen=True)
class Shakespeare(Leaf):
    """Sequences of 80 characters out of LEAF's 80.

    A sequence and the character after it are kept as one row of 81: the inputs are its first 80 and the targets its last 80, two views
    of the same file.
    """

    options: ShakespeareOptions = field(default=ShakespeareOptions(), kw_only=True)

    def convert(self, x: list[Any], y: list[Any]) -> dict[str, np.ndarray]:
        """The rows of one role."""
        if {len(line) for line in x} != {LENGTH} or {len(character) for character in y} != {1}:
            raise ValueError(f"an input is {LENGTH} characters and a label is one")
        text = "".join(line + character for line, character in zip(x, y, strict=True))
        strange = sorted(set(text) - set(CHARACTERS))
        if strange:
            raise ValueError(f"{strange[0]!r} is not one of LEAF's {len(CHARACTERS)} characters")
        numbers = np.full(256, UNKNOWN, dtype=np.int64)
        numbers[np.frombuffer(CHARACTERS.encode("ascii"), dtype=np.uint8)] = np.arange(len(CHARACTERS))
        return {"rows": numbers[np.frombuffer(text.encode("ascii"), dtype=np.uint8)].reshape(-1, LENGTH + 1)}

    def assemble(self, kept: Kept) -> Dataset:
        """The dataset, with targets [n, 80] or [n]."""
        parts = []
        for test in (False, True):
            rows = kept.part("rows", test)
            inputs, targets = rows.part(0, LENGTH, dim=1), rows.part(1, LENGTH, dim=1)
            last = targets[:, -1].clone() if self.options.targets == "last" else targets
            parts.append(Examples(inputs, last, kept.groups_of(test)))
        return Dataset(self.text, parts[0], parts[1], tuple(CHARACTERS), kind="text", group_names=kept.users)


SHAKESPEARE = Shakespeare(
    "shakespeare",
    "the next character in Shakespeare's plays by role, sequences of 80 (LEAF)",
    instructions=(
        "made by LEAF (https://github.com/TalwalkarLab/leaf): in data/shakespeare run ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample "
        "-tf 0.8 and copy data/train and data/test to shakespeare/data here"
    ),
)
