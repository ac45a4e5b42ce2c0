"""Datasets in the JSON format of LEAF (Caldas et al. 2018): ``data/train/*.json`` and ``data/test/*.json``.

A file is an object with ``users`` (names), ``num_samples`` (examples per user) and ``user_data`` (lists ``x`` and ``y``
for each user). Examples are converted to arrays once, with users in alphabetical order, so neither the order of the
files nor that of the users matters.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedflat.data.dataset import Dataset, Examples, Kind
from fedflat.data.files.cache import cache_entry, fingerprint, open_cached
from fedflat.data.files.mapped import ArrayWriter, MappedTensor
from fedflat.data.sources.source import DatasetSource, FileReport
from fedflat.errors import UserError

SPLITS = ("train", "test")
ArraysByName = dict[str, np.ndarray]


@dataclass(frozen=True)
class Leaf(DatasetSource):
    """A dataset in LEAF's format: JSON files with the examples of each user, converted once to cached arrays.

    Attributes:
        classes: names of the classes.
        kind: kind of the examples.
    """

    classes: ClassVar[tuple[str, ...]]
    kind: ClassVar[Kind] = "image"
    remedy = "generate it again with LEAF's preprocess.sh"

    @abstractmethod
    def convert(self, x: list[Any], y: list[Any]) -> ArraysByName:
        """Convert one user's inputs ``x`` and labels ``y`` to arrays of equal length, by name.

        Raises a ``ValueError`` for invalid examples.
        """

    @abstractmethod
    def examples(self, arrays: dict[str, MappedTensor], groups: torch.Tensor) -> Examples:
        """Return the examples of one split, given its arrays [n, ...] by name and the user of each example [n]."""

    def statistics(self, train: list[ArraysByName]) -> dict[str, Any]:
        """Return the dataset's ``mean`` and ``std``, if it has them, given the arrays of each training user."""
        return {}

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(f"{self.name}/data/{split}" for split in SPLITS)

    def find(self, data_dir: Path, file: str) -> Path | None:
        return data_dir / file if any((data_dir / file).glob("*.json")) else None

    def verify(self, data_dir: Path) -> tuple[FileReport, ...]:
        """Hash every file; no hashes are published, since LEAF generates the files on each machine."""
        return tuple(
            FileReport(f"{file}/{path.name}", hashlib.sha256(path.read_bytes()).hexdigest(), as_published=None)
            for file in self.files
            for path in sorted((data_dir / file).glob("*.json"))
        )

    def read(self, data_dir: Path) -> Dataset:
        """Convert the JSON files to arrays unless they are cached, and build the dataset."""
        paths, file_versions = {}, []
        for split, folder in zip(SPLITS, self.files, strict=True):
            paths[split] = sorted((data_dir / folder).glob("*.json"))
            for path in paths[split]:
                # Changed files get another fingerprint, and are converted again.
                file_versions.append(f"{split}/{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}")
        entry = cache_entry(data_dir, self.name, fingerprint(file_versions), partial(self._write_arrays, paths))
        about = json.loads((entry / "about.json").read_text(encoding="utf-8"))
        arrays = {name: open_cached(entry, name) for name in about["arrays"]}
        groups = open_cached(entry, "groups").clone()

        def examples_between(start: int, stop: int) -> Examples:
            rows = {name: array.part(start, stop - start) for name, array in arrays.items()}
            return self.examples(rows, groups[start:stop])

        return Dataset(
            self.text,
            train=examples_between(0, about["train"]),
            test=examples_between(about["train"], len(groups)),
            classes=self.classes,
            **{name: tuple(values) for name, values in about["statistics"].items()},
            kind=self.kind,
            group_names=tuple(about["users"]),
        )

    def _write_arrays(self, paths: dict[str, list[Path]], folder: Path) -> None:
        """Convert JSON files to arrays in ``folder``: training users in alphabetical order, then test users.

        Args:
            paths: the files of ``train`` and ``test``.
            folder: an empty folder of the cache. It gets one ``.npy`` file per array, ``groups.npy`` with the user of
                each example, and ``about.json`` with user names and statistics.
        """
        train = self._read_users(paths["train"], allow_empty=False)
        test = self._read_users(paths["test"], allow_empty=True)
        if not train or not test:
            raise UserError(f"{self.name} has no {'test' if train else 'training'} examples; {self.remedy}")
        users = sorted(train.keys() | test.keys())
        ordered = [train[user] for user in sorted(train)] + [test[user] for user in sorted(test)]
        names = list(ordered[0])
        for name, first in ordered[0].items():
            with ArrayWriter(folder / f"{name}.npy", first.shape[1:], first.dtype) as writer:
                for arrays in ordered:
                    writer.append(arrays[name])
        lengths = [len(arrays[names[0]]) for arrays in ordered]
        group_of_user = {user: group for group, user in enumerate(users)}
        groups = [group_of_user[user] for user in (*sorted(train), *sorted(test))]
        np.save(folder / "groups.npy", np.repeat(groups, lengths))
        about = {
            "arrays": names,
            "users": users,
            "train": sum(lengths[: len(train)]),
            "statistics": self.statistics(list(train.values())),
        }
        (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")

    def _read_users(self, paths: list[Path], allow_empty: bool) -> dict[str, ArraysByName]:
        """Read the arrays of each user, by user name; a user's examples in several files are joined.

        Args:
            paths: LEAF's JSON files.
            allow_empty: whether to skip users without examples instead of raising a ``UserError``.
        """
        by_user: dict[str, list[ArraysByName]] = {}
        for path in paths:
            for user, x, y in _read_examples(path, self.remedy):
                if not x:
                    if allow_empty:
                        continue
                    raise UserError(
                        f"user {user} in {path} has no examples; {self.remedy} -k N to drop users with fewer than N"
                    )
                try:
                    by_user.setdefault(user, []).append(self.convert(x, y))
                except (ValueError, TypeError) as error:
                    raise UserError(f"user {user} in {path} has invalid examples: {error}; {self.remedy}") from error
        joined = {}
        for user, parts in by_user.items():
            joined[user] = {name: np.concatenate([arrays[name] for arrays in parts]) for name in parts[0]}
        return joined


def _read_examples(path: Path, remedy: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield (user, inputs, labels) for every user of a LEAF file, after checking its format.

    ``remedy`` is the advice in error messages.
    """
    try:
        body = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not complete JSON ({error}); {remedy}") from error
    if not isinstance(body, dict) or not {"users", "num_samples", "user_data"} <= body.keys():
        raise UserError(f"{path} is not in LEAF's format; expected users, num_samples and user_data; {remedy}")
    users, counts = body["users"], body["num_samples"]
    if len(users) != len(counts):
        raise UserError(f"{path} has {len(users)} users but {len(counts)} entries in num_samples; {remedy}")
    for user, count in zip(users, counts, strict=True):
        data = body["user_data"].get(user)
        if not isinstance(data, dict) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
            raise UserError(f"user {user} in {path} has no lists x and y under user_data; {remedy}")
        if not len(data["x"]) == len(data["y"]) == count:
            raise UserError(
                f"user {user} in {path} has {len(data['x'])} inputs and {len(data['y'])} labels; expected {count}; "
                f"{remedy}"
            )
        yield user, data["x"], data["y"]
