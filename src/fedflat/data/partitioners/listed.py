"""A partition read from a file."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as as_integer
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray, LabelledExamples, Partitioner
from fedflat.data.sources.source import data_dir
from fedflat.errors import UserError, system_reason
from fedflat.text import absolute_path, param, show

EXPECTED = 'expected JSON such as {"examples": 4, "clients": [[0, 2], [1, 3]]}'


@dataclass(frozen=True)
class Listed(Partitioner):
    """Each client has the training examples that a file lists for it, except those used for validation."""

    by_label = False
    fixes_clients = True
    sizes = "as listed"
    citation = "a Flower partitioner, or your own ([interoperability](../interop.md))"
    path: str | None = param(
        None,
        "JSON file with the number of training examples and a list of positions per client",
        path=True,
        positional=True,
    )
    hash: str | None = param(
        None, "required hash of the file: sha256- and its first 16 hexadecimal digits; none skips the check"
    )

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """Convert the listed positions in the training set to indices in ``data``.

        Listed examples that are not in ``data`` are left out: those used for validation or dropped by ``longtail``.

        Args:
            data: the examples to distribute.
            clients: None, or the number of clients, which must agree with the file.
            rng: unused; the file determines everything.
        """
        lists = self._read_lists(data.total)
        if clients not in (None, len(lists)):
            raise UserError(
                f"{self.path} lists {len(lists)} clients, not {clients}; leave clients out, or set it to null"
            )
        assert data.positions is not None
        index_of_position = np.full(data.total, -1)
        index_of_position[data.positions] = np.arange(len(data.targets))
        divided = []
        for client, positions in enumerate(lists):
            indices = np.sort(index_of_position[positions])
            indices = indices[indices >= 0]  # -1: not in data
            if not len(indices):
                raise UserError(
                    f"client {client} of {self.path} has no examples left after validation and longtail; "
                    "choose a smaller validation share or factor"
                )
            divided.append(indices)
        return divided

    def _read_lists(self, examples: int) -> list[IntArray]:
        """Read the positions of each client's examples, in a training set with ``examples`` examples."""
        if self.path is None:
            raise UserError("listed needs the file of the partition; write listed(path=FILE.json)")
        content = self._read_verified(absolute_path(self.path))
        try:
            document = json.loads(content)
            listed_examples = as_integer(document["examples"])
            lists = [np.array([*map(as_integer, positions)], dtype=np.int64) for positions in document["clients"]]
        except (ValueError, TypeError, KeyError, OverflowError):
            raise UserError(f"{self.path} is not a partition file; {EXPECTED}") from None
        if listed_examples != examples:
            raise UserError(
                f"{self.path} partitions {listed_examples} training examples, but this dataset has {examples}; "
                "use the dataset it was made for"
            )
        _check_lists(lists, examples, self.path)
        return lists

    def _read_verified(self, path: Path) -> bytes:
        """Return the content of the file; raises a ``UserError`` if the parameter ``hash`` is given and differs."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read the partition {path}: {system_reason(error)}; create it again") from None
        if self.hash not in (None, content_hash(content)):
            raise UserError(
                f"{path} has changed: its hash is {content_hash(content)}; expected {self.hash}; "
                "restore the original file"
            )
        return content


def listed(
    clients: Sequence[IntArray],
    examples: int,
    name: str,
    folder: str | Path | None = None,
    made_by: dict[str, Any] | None = None,
) -> str:
    """Write a partition to a JSON file, and return the text with which ``data.partition`` selects it.

    The file name ends in a hash of the content, so that another partition with the same name gets another file.

    Args:
        clients: for each client, the positions of its examples in the training set.
        examples: size of the training set; the file can only be used with a training set of this size.
        name: beginning of the file name.
        folder: where to write; ``partitions`` in the data directory by default.
        made_by: JSON-compatible values that document how the partition was made; default: its name.

    Returns:
        The text of the partition, ``listed(path=...,hash=...)``.
    """
    lists = [np.sort(positions) for positions in clients]
    _check_lists(lists, examples, f"the partition {name!r}")
    document = {
        "made_by": made_by or {"name": name},
        "examples": examples,
        "clients": [positions.tolist() for positions in lists],
    }
    content = (json.dumps(document) + "\n").encode()
    directory = absolute_path(data_dir(None) / "partitions" if folder is None else folder)
    path = directory / f"{name}-{content_hash(content).removeprefix('sha256-')}.json"
    # Written under another name first, so that no other process reads half a file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        reason = system_reason(error)
        raise UserError(f"cannot write the partition to {path}: {reason}; choose another folder=") from None
    return show("listed", {"path": str(path), "hash": content_hash(content)})


def content_hash(content: bytes) -> str:
    """Return the hash of a partition file, as in the parameter ``hash``."""
    return f"sha256-{hashlib.sha256(content).hexdigest()[:16]}"


def _check_lists(lists: list[IntArray], examples: int, path: str) -> None:
    """Raise a ``UserError`` unless the clients have disjoint, non-empty lists of valid positions.

    Args:
        lists: positions of each client's examples.
        examples: size of the training set.
        path: the file they come from, or what they are, for messages.
    """
    if not lists or not all(map(len, lists)):
        raise UserError(f"{path} has a client without examples; expected at least one client, with one example each")
    positions = np.concatenate(lists)
    if positions.min() < 0 or positions.max() >= examples:
        wrong = positions.min() if positions.min() < 0 else positions.max()
        raise UserError(f"{path} lists example {wrong}; expected positions from 0 to {examples - 1}")
    counts = np.bincount(positions)
    if counts.max() > 1:
        raise UserError(
            f"{path} lists example {counts.argmax()} {counts.max()} times; expected every example at most once"
        )
