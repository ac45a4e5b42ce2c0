"""A tree of files: a folder, or a zip archive that need not be unpacked."""

from __future__ import annotations

import hashlib
import os
import zipfile
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO

from fedflat.errors import UserError


class Tree(ABC):
    """Files by name, relative to a root, with / between the parts."""

    def __init__(self, where: Path) -> None:
        self.where = where

    @property
    @abstractmethod
    def stamps(self) -> dict[str, str]:
        """Every file in the order of names, and something short that changes when the file does."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """The bytes of a file."""

    def text(self, name: str) -> str:
        """What a text file says."""
        if name not in self.stamps:
            raise UserError(f"{self.where}/{name} is missing; unpack the dataset anew")
        with self.open(name) as stream:
            return stream.read().decode("utf-8", "replace")

    @cached_property
    def _names(self) -> list[str]:
        return list(self.stamps)

    def below(self, prefix: str) -> list[str]:
        """The names of all files below a folder."""
        first, last = (bisect_left(self._names, end) for end in (f"{prefix}/", f"{prefix}0"))  # 0 comes right after /
        return self._names[first:last]

    @abstractmethod
    def folders(self, prefix: str) -> list[str]:
        """The names of the folders in a folder, also of those without files."""

    def hash(self, prefix: str) -> str:
        """sha256 over the names and bytes of all files below a folder."""
        digest = hashlib.sha256()
        for name in self.below(prefix):
            with self.open(name) as stream:
                digest.update(f"{name}\n{hashlib.sha256(stream.read()).hexdigest()}\n".encode())
        return digest.hexdigest()


class FolderTree(Tree):
    """The files of a folder; hidden ones are passed over."""

    @cached_property
    def stamps(self) -> dict[str, str]:
        """Size and time of change of every file."""
        return dict(sorted(_stamps(self.where, "")))

    def folders(self, prefix: str) -> list[str]:
        """The folders, without hidden ones."""
        return sorted(
            found.name for found in (self.where / prefix).iterdir() if found.is_dir() and not found.name.startswith(".")
        )

    def open(self, name: str) -> IO[bytes]:
        """The file itself."""
        return (self.where / name).open("rb")


class ZipTree(Tree):
    """The files of a zip archive, below the one folder that such archives hold."""

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        try:
            self._zip = zipfile.ZipFile(where)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{where} is not a whole zip archive ({error}); get it again") from error
        self._files = {
            info.filename: info
            for info in self._zip.infolist()
            if not info.is_dir() and "__MACOSX" not in info.filename
        }
        first = {name.partition("/")[0] for name in self._files}
        self._root = f"{first.pop()}/" if len(first) == 1 and all("/" in name for name in self._files) else ""

    @cached_property
    def stamps(self) -> dict[str, str]:
        """Size and checksum of every file."""
        return dict(
            sorted(
                (name.removeprefix(self._root), f"{info.file_size} {info.CRC}") for name, info in self._files.items()
            )
        )

    def folders(self, prefix: str) -> list[str]:
        """The folders that the archive lists or that files lie in."""
        start = f"{self._root}{prefix}/" if prefix else self._root
        inside = (name.removeprefix(start) for name in self._zip.namelist() if name.startswith(start))
        return sorted({name.partition("/")[0] for name in inside if "/" in name})

    def open(self, name: str) -> IO[bytes]:
        """The file, unpacked as it is read; several threads may do so."""
        return self._zip.open(self._files[f"{self._root}{name}"])


def _stamps(folder: Path, prefix: str) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as entries:
        for found in entries:
            if found.name.startswith("."):
                continue
            if found.is_dir():
                yield from _stamps(Path(found.path), f"{prefix}{found.name}/")
            else:
                status = found.stat()
                yield f"{prefix}{found.name}", f"{status.st_size} {status.st_mtime_ns}"


def open_tree(path: Path) -> Tree:
    """A folder or a zip archive as a tree."""
    if path.is_dir():
        return FolderTree(path)
    if path.is_file():
        return ZipTree(path)
    raise UserError(f"{path} is neither a folder nor a zip archive; expected one with the images in it")
