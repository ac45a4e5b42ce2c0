"""Base classes of datasets: where their files come from, how they are verified, and how they are read."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar

from fedflat.data.dataset import Dataset
from fedflat.data.files.tree import Tree, open_tree
from fedflat.errors import UserError
from fedflat.text import changed, expand_home, show

Content = TypeVar("Content")

DATA_DIR_VARIABLE = "FEDFLAT_DATA"


@dataclass(frozen=True)
class Download:
    """A file on the publisher's server.

    Attributes:
        url: its address.
        md5: its published md5.
        files: the files it provides, relative to the data directory; itself, unless it is an archive.
    """

    url: str
    md5: str
    files: tuple[str, ...]

    @property
    def is_archive(self) -> bool:
        """Whether the files have to be unpacked."""
        return len(self.files) > 1 or PurePosixPath(self.url).name != PurePosixPath(self.files[0]).name

    def part(self, data_dir: Path) -> Path:
        """Return the path of the incomplete file during the download."""
        return (data_dir / self.files[0]).with_name(PurePosixPath(self.url).name + ".part")


@dataclass(frozen=True)
class FileReport:
    """Result of verifying one file.

    Attributes:
        file: its name, relative to the data directory.
        sha256: hash of its content, independent of compression.
        as_published: whether a published hash confirms it; None if no hash is known.
    """

    file: str
    sha256: str
    as_published: bool | None


@dataclass(frozen=True)
class DatasetCard:
    """Facts about a dataset for its documentation page; every field may be left empty.

    Attributes:
        examples: number of training / test examples.
        shape: shape of one example.
        classes: number of classes.
        clients: natural clients; if any, the example command uses the partition natural.
        citation: publication.
        licence: licence.
        size: size of the download.
        checks: what fedflat verifies.
        model: model for the example command.
    """

    examples: str = ""
    shape: str = ""
    classes: str = ""
    clients: str = ""
    citation: str = ""
    licence: str = ""
    size: str = ""
    checks: str = ""
    model: str = "cnn"


@dataclass(frozen=True)
class NoOptions:
    """Options of a dataset without parameters."""


@dataclass(frozen=True)
class DatasetSource(ABC):
    """A named dataset: which files it needs, how to obtain them, and how to read them.

    Attributes:
        name: its registered name.
        title: one line for lists.
        downloads: files that can be downloaded.
        options: frozen dataclass of the parameters in ``name(parameter=value)``.
        instructions: how to obtain files that cannot be downloaded automatically.
        example: for user data, an example such as ``images(path=pets)``; empty for published datasets.
        card: facts for the documentation.
    """

    name: str
    title: str
    downloads: tuple[Download, ...] = ()
    options: Any = field(default=NoOptions(), kw_only=True)
    instructions: str = field(default="", kw_only=True)
    example: str = field(default="", kw_only=True)
    card: DatasetCard = field(default=DatasetCard(), kw_only=True)

    @abstractmethod
    def read(self, data_dir: Path) -> Dataset:
        """Read and verify the files, and build the dataset."""

    def read_numbers(self, data_dir: Path) -> Dataset:
        """Read the dataset for regression: class numbers become numbers to predict."""
        dataset = self.read(data_dir)
        return dataset.as_numbers() if dataset.target_type == "classes" else dataset

    def verify(self, data_dir: Path) -> tuple[FileReport, ...]:
        """Hash every file and compare it with the published hash."""
        return ()

    @property
    def text(self) -> str:
        """Canonical text: the name with the parameters that differ from their defaults."""
        return show(self.name, changed(self.options))

    @property
    def files(self) -> tuple[str, ...]:
        """Required files or folders, relative to the data directory."""
        return tuple(file for download in self.downloads for file in download.files)

    @property
    def remedy(self) -> str:
        """Advice in messages about damaged files."""
        return f"download it again with 'fedflat data get {self.name}'"

    @property
    def path(self) -> str:
        """The parameter ``path`` of a dataset of the user's own files; raises a ``UserError`` if it is not given."""
        if not self.options.path:
            raise UserError(f"{self.name} needs a path; write for example {self.example}")
        return str(self.options.path)

    def find(self, data_dir: Path, file: str) -> Path | None:
        """Return the path of a required file or folder, or None if it is missing."""
        return data_dir / file if (data_dir / file).exists() else None

    def missing(self, data_dir: Path) -> tuple[str, ...]:
        """Return the required files that are missing."""
        return tuple(file for file in self.files if self.find(data_dir, file) is None)

    def is_local(self, data_dir: Path) -> bool:
        """Whether the dataset can be read without a download."""
        return not self.missing(data_dir)

    def is_intact(self, data_dir: Path, file: str) -> bool:
        """Whether a file exists and is valid."""
        return self.find(data_dir, file) is not None

    def file_instructions(self, data_dir: Path) -> str:
        """Say, as part of a message, which files are expected where and how to get them."""
        message = f"expected {', '.join(self.files)} in {data_dir}"
        if self.downloads:
            folders = sorted({download.url.rpartition("/")[0] + "/" for download in self.downloads})
            message += f", from {' and '.join(folders)}"
        return f"{message}; {self.instructions}" if self.instructions else message


@dataclass(frozen=True)
class FileSource(DatasetSource, Generic[Content]):
    """A dataset in a few files, each read and verified as a whole.

    Attributes:
        digests: sha256 of each file's content; a file that differs is rejected.
        file_md5s: md5 of the files themselves, for files without a known content hash; only reported by ``verify``,
            because a valid copy may be compressed differently.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    file_md5s: Mapping[str, str] = field(default_factory=dict)

    @abstractmethod
    def parse(self, path: Path) -> tuple[Content, str]:
        """Read a file, and return its content and the sha256 of the content."""

    def find(self, data_dir: Path, file: str) -> Path | None:
        return data_dir / file if (data_dir / file).is_file() else None

    def read_file(self, data_dir: Path, file: str) -> Content:
        """Read the content of a file, and compare its hash with the published one."""
        return self._read_verified(data_dir, file)[0]

    def verify(self, data_dir: Path) -> tuple[FileReport, ...]:
        return tuple(self._verify_file(data_dir, file) for file in self.files)

    def is_intact(self, data_dir: Path, file: str) -> bool:
        """Whether a file can be read and has the published hash, if there is one."""
        try:
            self.read_file(data_dir, file)
        except UserError:
            return False
        return True

    def _read_verified(self, data_dir: Path, file: str) -> tuple[Content, str]:
        """Read a file and return its content and the content's sha256.

        Raises a ``UserError`` if the sha256 differs from the published one. A file without a published sha256 is
        accepted unverified.
        """
        path = self.find(data_dir, file)
        if path is None:
            raise UserError(f"{data_dir / file} is missing; {self.remedy}")
        content, digest = self.parse(path)
        if self.digests.get(file, digest) != digest:
            raise UserError(
                f"{path} differs from the published file (sha256 {digest}; expected {self.digests[file]}); "
                f"{self.remedy}"
            )
        return content, digest

    def _verify_file(self, data_dir: Path, file: str) -> FileReport:
        """Report whether a file is as published, by its content hash or else by its md5.

        A different md5 proves nothing, since the file may be compressed differently; it is reported as unknown (None).
        """
        _, digest = self._read_verified(data_dir, file)
        if file in self.digests:  # a different hash has raised an error
            return FileReport(file, digest, as_published=True)
        has_published_md5 = file in self.file_md5s and md5_of(data_dir / file) == self.file_md5s[file]
        return FileReport(file, digest, as_published=True if has_published_md5 else None)


@dataclass(frozen=True)
class FolderSource(DatasetSource):
    """A dataset in a folder of many files, obtained by hand.

    Attributes:
        roots: accepted names of the folder; the first is recommended.
        parts: required subfolders; empty if only the folder itself is required.
        files: path of each required subfolder (or of the folder), with the recommended name of the folder.
    """

    roots: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def parts(self) -> tuple[str, ...]:
        """Required subfolders."""
        return ()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(f"{self.roots[0]}/{part}" for part in self.parts) or self.roots[:1]

    @property
    def remedy(self) -> str:
        return "unpack the dataset again"

    def find(self, data_dir: Path, file: str) -> Path | None:
        """Return the path of a required subfolder, whichever accepted name the dataset's folder has; None if missing.

        Args:
            data_dir: the data directory.
            file: an entry of ``files``, e.g. ``<root>/<subfolder>``.
        """
        part = file.partition("/")[2]  # the subfolder; empty for the folder itself
        for root in self.roots:
            path = data_dir / root / part
            if path.is_dir():
                return path
        return None

    def verify(self, data_dir: Path) -> tuple[FileReport, ...]:
        """Hash the names and contents of all files, per subfolder; no hashes are published to compare with."""
        tree = self.tree(data_dir)
        parts = self.parts or tree.subfolders("")
        return tuple(FileReport(f"{tree.path.name}/{part}", tree.digest(part), as_published=None) for part in parts)

    def tree(self, data_dir: Path) -> Tree:
        """Open the folder of the dataset, under the first of its accepted names that exists."""
        path = self.find(data_dir, self.files[0])
        if path is None:
            raise UserError(f"{self.name} is missing; {self.file_instructions(data_dir)}")
        root = next(data_dir / root for root in self.roots if path.is_relative_to(data_dir / root))
        return open_tree(root)


def md5_of(path: Path) -> str:
    """Compute the md5 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def data_dir(explicit: str | Path | None = None) -> Path:
    """Return ``explicit`` if given, else ``$FEDFLAT_DATA``, else ``fedflat/data`` under the user's cache directory."""
    chosen = explicit if explicit is not None else os.environ.get(DATA_DIR_VARIABLE)
    return expand_home(chosen) if chosen else user_cache() / "data"


def user_cache() -> Path:
    """Return the ``fedflat`` folder in the user's cache (``$XDG_CACHE_HOME``, else ``~/.cache``).

    Without a home directory, as in some containers, it is a path that cannot be created.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "fedflat"
    except RuntimeError:
        return Path("/nonexistent/.cache/fedflat")
