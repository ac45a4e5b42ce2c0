"""A tree of files: a folder, or a zip archive read in place."""

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

from fedflat.errors import UserError, missing_file


class Tree(ABC):
    """The files in a folder or archive ``path``, named by their path relative to it, with ``/`` as the separator."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def files(self) -> dict[str, str]:
        """Every file name in sorted order, with the file's version: a short text that changes when the file does."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading; safe to call from several threads."""

    @abstractmethod
    def subfolders(self, folder: str) -> list[str]:
        """Return the names of the folders directly in ``folder``, including empty ones."""

    def read_text(self, name: str) -> str:
        """Read a text file."""
        if name not in self.files:
            raise UserError(f"{self.path}/{name} is missing; unpack the dataset again")
        with self.open(name) as stream:
            return stream.read().decode("utf-8", "replace")

    @cached_property
    def _names(self) -> list[str]:
        return list(self.files)

    def files_below(self, folder: str) -> list[str]:
        """Return the names of all files below ``folder``, at any depth."""
        # In sorted order these names are consecutive: from "folder/" to before "folder0", as "0" follows "/" in ASCII.
        first = bisect_left(self._names, f"{folder}/")
        last = bisect_left(self._names, f"{folder}0")
        return self._names[first:last]

    def digest(self, folder: str) -> str:
        """Hash (sha256) the names and contents of all files below ``folder``."""
        digest = hashlib.sha256()
        for name in self.files_below(folder):
            with self.open(name) as stream:
                digest.update(f"{name}\n{hashlib.sha256(stream.read()).hexdigest()}\n".encode())
        return digest.hexdigest()


class FolderTree(Tree):
    """The files of a folder, without hidden ones; their versions are size and modification time."""

    @cached_property
    def files(self) -> dict[str, str]:
        return dict(sorted(_list_files(self.path, "")))

    def subfolders(self, folder: str) -> list[str]:
        children = (self.path / folder).iterdir()
        return sorted(child.name for child in children if child.is_dir() and not child.name.startswith("."))

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb")


class ZipTree(Tree):
    """The files of a zip archive, relative to its top-level folder if it has only one.

    The version of a file is its size and checksum (CRC).
    """

    def __init__(self, path: Path) -> None:
        """Open the archive and list its files, without those that macOS adds."""
        super().__init__(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} is not a complete zip archive ({error}); download it again") from error
        members = (info for info in self._zip.infolist() if not info.is_dir() and "__MACOSX" not in info.filename)
        self._members = {info.filename: info for info in members}
        top_level = {name.partition("/")[0] for name in self._members}
        has_single_folder = len(top_level) == 1 and all("/" in name for name in self._members)
        self._root = f"{top_level.pop()}/" if has_single_folder else ""

    @cached_property
    def files(self) -> dict[str, str]:
        """Every file name in sorted order, with the file's version: its size and checksum."""
        members = self._members.items()
        versions = {name.removeprefix(self._root): f"{info.file_size} {info.CRC}" for name, info in members}
        return dict(sorted(versions.items()))

    def subfolders(self, folder: str) -> list[str]:
        """Return the names of the folders directly in ``folder`` (empty: the top level), including empty folders."""
        prefix = f"{self._root}{folder}/" if folder else self._root
        # namelist() also contains folders, as names that end in a slash.
        inside = (name.removeprefix(prefix) for name in self._zip.namelist() if name.startswith(prefix))
        return sorted({name.partition("/")[0] for name in inside if "/" in name})

    def open(self, name: str) -> IO[bytes]:
        return self._zip.open(self._members[f"{self._root}{name}"])


def _list_files(folder: Path, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the version (size and modification time) of every file below a folder, without hidden ones.

    Names are relative to ``folder`` and preceded by ``prefix``, the path of ``folder`` itself in the tree.
    """
    with os.scandir(folder) as children:
        for child in children:
            if child.name.startswith("."):
                continue
            if child.is_dir():
                yield from _list_files(Path(child.path), f"{prefix}{child.name}/")
            else:
                status = child.stat()
                yield f"{prefix}{child.name}", f"{status.st_size} {status.st_mtime_ns}"


def open_tree(path: Path) -> Tree:
    """Open a folder or a zip archive."""
    if path.is_dir():
        return FolderTree(path)
    if path.exists():
        return ZipTree(path)
    raise missing_file(path, "a folder or a zip archive of images")
