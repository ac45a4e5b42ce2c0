"""LEAF's JSON (Caldas et al. 2018): ``data/train/*.json`` and ``data/test/*.json``, in each of them users and what is theirs.

A file is an object with ``users``, a list of names; ``num_samples``, how many examples each has; and ``user_data``, for each user lists
``x`` and ``y``. What is read is kept as arrays, users in alphabetical order, so that neither the order of the files nor that of the
users in them plays a role.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.data.cache import entry, fingerprint, open_kept
from fedflat.data.dataset import Dataset
from fedflat.data.mapped import ArrayWriter, MappedTensor
from fedflat.data.sources.source import FileReport, Source
from fedflat.errors import UserError

PARTS = ("train", "test")


@dataclass(frozen=True)
class Kept:
    """The arrays of a LEAF dataset: those of the source by name, training examples first."""

    arrays: dict[str, MappedTensor]
    groups: torch.Tensor
    train: int
    users: tuple[str, ...]
    facts: dict[str, Any]

    def part(self, array: str, test: bool) -> MappedTensor:
        """The training or the test examples of an array."""
        whole = self.arrays[array]
        return whole.part(self.train, len(whole) - self.train) if test else whole.part(0, self.train)

    def groups_of(self, test: bool) -> torch.Tensor:
        """The user of each training or test example."""
        return self.groups[self.train :] if test else self.groups[: self.train]


@dataclass(frozen=True)
class Leaf(Source):
    """A dataset in LEAF's format."""

    @abstractmethod
    def convert(self, x: list[Any], y: list[Any]) -> dict[str, np.ndarray]:
        """The examples of one user as arrays of equal length; a ValueError says what is wrong with them."""

    @abstractmethod
    def assemble(self, kept: Kept) -> Dataset:
        """The dataset from its arrays."""

    def facts(self, train: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        """What is worth keeping of the arrays of all training users, as plain values."""
        return {}

    @property
    def files(self) -> tuple[str, ...]:
        """The two folders of JSON files."""
        return tuple(f"{self.name}/data/{part}" for part in PARTS)

    @property
    def remedy(self) -> str:
        """What to do about a file that cannot be used."""
        return "make it again with LEAF's preprocess.sh"

    def find(self, folder: Path, file: str) -> Path | None:
        """A folder that holds a JSON file."""
        return folder / file if any((folder / file).glob("*.json")) else None

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The hash of every file; LEAF makes them anew on every machine, so that none is published."""
        return tuple(
            FileReport(f"{file}/{path.name}", hashlib.sha256(path.read_bytes()).hexdigest(), None)
            for file in self.files
            for path in sorted((folder / file).glob("*.json"))
        )

    def read(self, folder: Path) -> Dataset:
        """The dataset; JSON is parsed the first time only."""
        paths = {part: sorted((folder / file).glob("*.json")) for part, file in zip(PARTS, self.files, strict=True)}
        stamps = [
            f"{part}/{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}"
            for part, found in paths.items()
            for path in found
        ]
        kept = entry(folder, self.name, fingerprint(stamps), lambda side: self._write(paths, side))
        about = json.loads((kept / "about.json").read_text(encoding="utf-8"))
        arrays = {name: open_kept(kept, name) for name in about["arrays"]}
        groups = open_kept(kept, "groups").clone()
        return self.assemble(Kept(arrays, groups, about["train"], tuple(about["users"]), about["facts"]))

    def _write(self, paths: dict[str, list[Path]], side: Path) -> None:
        parts = {part: self._users(found, allow_empty=part == "test") for part, found in paths.items()}
        users = sorted({user for part in parts.values() for user in part})
        number = {user: place for place, user in enumerate(users)}
        ordered = [(number[user], parts[part][user]) for part in PARTS for user in sorted(parts[part])]
        if not parts["train"] or not parts["test"]:
            raise UserError(
                f"{self.name} has no examples for {'testing' if parts['train'] else 'training'}; {self.remedy}"
            )
        names = list(ordered[0][1])
        for name in names:
            first = ordered[0][1][name]
            with ArrayWriter(side / f"{name}.npy", first.shape[1:], first.dtype) as writer:
                for _, arrays in ordered:
                    writer.append(arrays[name])
        lengths = [len(arrays[names[0]]) for _, arrays in ordered]
        np.save(side / "groups.npy", np.repeat([group for group, _ in ordered], lengths))
        train = list(parts["train"].values())
        about = {"arrays": names, "users": users, "train": sum(lengths[: len(train)]), "facts": self.facts(train)}
        (side / "about.json").write_text(json.dumps(about), encoding="utf-8")

    def _users(self, paths: list[Path], allow_empty: bool) -> dict[str, dict[str, np.ndarray]]:
        found: dict[str, list[dict[str, np.ndarray]]] = {}
        for path in paths:
            for user, x, y in _examples(path, self.remedy):
                if not x:
                    if allow_empty:
                        continue
                    raise UserError(
                        f"user {user} in {path} has no examples; {self.remedy}, with -k to leave out users with too few"
                    )
                try:
                    found.setdefault(user, []).append(self.convert(x, y))
                except (ValueError, TypeError) as error:
                    raise UserError(
                        f"the examples of user {user} in {path} cannot be used: {error}; {self.remedy}"
                    ) from error
        return {
            user: {name: np.concatenate([one[name] for one in some]) for name in some[0]}
            for user, some in found.items()
        }


def _examples(path: Path, remedy: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """The users of a file, and the inputs and labels of each."""
    try:
        body = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not whole JSON ({error}); {remedy}") from error
    if not isinstance(body, dict) or not {"users", "num_samples", "user_data"} <= body.keys():
        raise UserError(f"{path} is not in LEAF's format, an object with users, num_samples and user_data; {remedy}")
    if len(body["users"]) != len(body["num_samples"]):
        raise UserError(
            f"{path} names {len(body['users'])} users but {len(body['num_samples'])} numbers of samples; {remedy}"
        )
    for user, count in zip(body["users"], body["num_samples"], strict=True):
        data = body["user_data"].get(user)
        if not isinstance(data, dict) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
            raise UserError(f"user {user} in {path} has no lists x and y under user_data; {remedy}")
        if not len(data["x"]) == len(data["y"]) == count:
            raise UserError(
                f"user {user} in {path} has {len(data['x'])} inputs and {len(data['y'])} labels instead of {count}; {remedy}"
            )
        yield user, data["x"], data["y"]
