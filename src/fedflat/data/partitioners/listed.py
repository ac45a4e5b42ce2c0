"""A division that somebody else made, kept in a file."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedflat.data.data_dir import data_dir
from fedflat.data.partitioners.partitioner import IntArray, Partitioner, Pool
from fedflat.errors import UserError
from fedflat.text import param, show

UNWRITABLE = ",()"
"""What no parameter of a text can hold."""
EXPECTED = 'expected JSON of whole numbers such as {"examples": 4, "clients": [[0, 2], [1, 3]]}'


@dataclass(frozen=True)
class Listed(Partitioner):
    """Each client has the training examples that a file lists for it, less those that are held out for validation."""

    by_label: ClassVar[bool] = False
    path: str | None = param(
        None,
        "a JSON file with the number of training examples and, for each client, a list of positions",
        path=True,
    )
    hash: str | None = param(None, "what the file must have, as sha256- and the first 16 digits; none is not checked")

    @property
    def fixes_clients(self) -> bool:
        """There is one client for each list."""
        return True

    def divide(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """The listed examples, as far as they are in the pool."""
        lists = self._lists(pool.total)
        if clients not in (None, len(lists)):
            raise UserError(
                f"{self.path} lists {len(lists)} clients, but {clients} were asked for; set clients to null"
            )
        assert pool.positions is not None
        place = np.full(pool.total, -1)
        place[pool.positions] = np.arange(len(pool.targets))
        there = [places[places >= 0] for places in (np.sort(place[positions]) for positions in lists)]
        empty = next((number for number, positions in enumerate(there) if not len(positions)), None)
        if empty is not None:
            raise UserError(
                f"client {empty} of {self.path} has all its examples in the validation set or beyond the long tail; take less away"
            )
        return there

    def _lists(self, examples: int) -> list[IntArray]:
        if self.path is None:
            raise UserError("listed needs to know the file of the partition; write listed(path=FILE.json)")
        content = self._content(Path(self.path).expanduser())
        try:
            document = json.loads(content)
            meant, lists = (
                index(document["examples"]),
                [np.array([*map(index, some)], dtype=np.int64) for some in document["clients"]],
            )
        except (ValueError, TypeError, KeyError, OverflowError):
            raise UserError(f"{self.path} is not the file of a partition; {EXPECTED}") from None
        if meant != examples:
            raise UserError(
                f"{self.path} divides {meant} training examples, but this dataset has {examples}; it was made for another one"
            )
        return _checked(lists, examples, self.path)

    def _content(self, path: Path) -> bytes:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"the partition in {path} cannot be read: {(error.strerror or str(error)).lower()}; make it again there"
            ) from None
        if self.hash not in (None, content_hash(content)):
            raise UserError(
                f"{path} has changed: its hash is {content_hash(content)}, expected {self.hash}; make the same partition again"
            )
        return content


def listed(
    clients: Sequence[IntArray],
    examples: int,
    name: str,
    folder: str | Path | None = None,
    made_by: dict[str, Any] | None = None,
) -> str:
    """The text of a partition that is given as positions for each client; they are kept in a file called by its name and content."""
    document = {
        "made_by": made_by or {"name": name},
        "examples": examples,
        "clients": [np.sort(some).tolist() for some in clients],
    }
    content = (json.dumps(document) + "\n").encode()
    where = (data_dir(None) / "partitions" if folder is None else Path(folder)).expanduser().absolute()
    path = where / f"{name}-{content_hash(content).removeprefix('sha256-')}.json"
    if any(sign in str(path) for sign in UNWRITABLE):
        raise UserError(
            f"{path} has a comma or a bracket in it, which the text of a partition cannot hold; choose another folder="
        )
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        where.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(content)
        aside.replace(path)
    except OSError as error:
        raise UserError(
            f"the partition cannot be written to {path}: {(error.strerror or str(error)).lower()}; choose another folder="
        ) from None
    return show("listed", {"path": str(path), "hash": content_hash(content)})


def content_hash(content: bytes) -> str:
    """The hash of a partition's file, written as a word."""
    return f"sha256-{hashlib.sha256(content).hexdigest()[:16]}"


def _checked(lists: list[IntArray], examples: int, where: str) -> list[IntArray]:
    if not lists or not all(map(len, lists)):
        raise UserError(
            f"{where} has a client without examples; expected at least one client, and one example for each"
        )
    every = np.concatenate(lists)
    if every.min() < 0 or every.max() >= examples:
        raise UserError(
            f"{where} names example {every.min() if every.min() < 0 else every.max()}; expected positions from 0 to {examples - 1}"
        )
    often = np.bincount(every)
    if often.max() > 1:
        raise UserError(
            f"{where} names example {often.argmax()} {often.max()} times; expected every example at most once"
        )
    return lists
