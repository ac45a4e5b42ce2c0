"""What every published dataset has in common: files that can be fetched, found, verified and read."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

from fedflat.data.dataset import Dataset
from fedflat.errors import UserError
from fedflat.text import changed, show

Content = TypeVar("Content")


@dataclass(frozen=True)
class Download:
    """One file on the publisher's server, and the files of the data folder that it holds (itself, unless it is an archive)."""

    url: str
    md5: str
    files: tuple[str, ...]

    @property
    def is_archive(self) -> bool:
        """Whether the files have to be unpacked."""
        return len(self.files) > 1 or PurePosixPath(self.url).name != PurePosixPath(self.files[0]).name

    def part(self, folder: Path) -> Path:
        """Where the bytes lie while they arrive: beside the files, under a name that no reader looks for."""
        return (folder / self.files[0]).with_name(PurePosixPath(self.url).name + ".part")


@dataclass(frozen=True)
class FileReport:
    """What ``verify`` found out about one file."""

    file: str
    sha256: str
    """Of what the file holds, not of how it is packed."""
    as_published: bool | None
    """Whether a published hash confirms it; None where there is no hash of the content and the file was packed anew."""


@dataclass(frozen=True)
class NoOptions:
    """What can be said of a dataset that has no parameters."""


@dataclass(frozen=True)
class Source(ABC):
    """A dataset that can be fetched, found and read."""

    name: str
    title: str
    downloads: tuple[Download, ...] = ()
    options: object = field(default=NoOptions(), kw_only=True)
    """What the text in parentheses may change: a frozen dataclass."""
    instructions: str = field(default="", kw_only=True)
    """How to get what is not fetched by itself."""

    @abstractmethod
    def read(self, folder: Path) -> Dataset:
        """The dataset from its files, every one of them verified."""

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The content hash of every file, and whether it is the published one."""
        return ()

    @property
    def text(self) -> str:
        """The shortest text that names the dataset with its parameters."""
        return show(self.name, changed(self.options))

    @property
    def files(self) -> tuple[str, ...]:
        """Every file or folder that is needed, relative to the data folder."""
        return tuple(file for download in self.downloads for file in download.files)

    @property
    def remedy(self) -> str:
        """What to do about a file that cannot be used."""
        return f"get it again with 'fedflat data get {self.name}'"

    def find(self, folder: Path, file: str) -> Path | None:
        """Where a file or folder lies, if it is there."""
        return folder / file if (folder / file).exists() else None

    def missing(self, folder: Path) -> tuple[str, ...]:
        """The files that are not there."""
        return tuple(file for file in self.files if self.find(folder, file) is None)

    def is_intact(self, folder: Path, file: str) -> bool:
        """Whether a file is there and can be used."""
        return self.find(folder, file) is not None

    def expected(self, folder: Path) -> str:
        """One clause on the files that are needed, where, and where they come from."""
        urls = " and ".join(sorted({download.url.rpartition("/")[0] + "/" for download in self.downloads}))
        origin = "; ".join(filter(None, (f"from {urls}" if urls else "", self.instructions)))
        return f"expected {', '.join(self.files)} in {folder}, {origin}"


@dataclass(frozen=True)
class FileSource(Source, Generic[Content]):
    """A dataset in a few files, each of which is verified as a whole; tests make small ones by replacing ``digests`` and ``downloads``."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the content of each file: a file that differs is refused."""
    file_md5s: Mapping[str, str] = field(default_factory=dict)
    """md5 of the files themselves, where no content hash is known: reported but not required, since a faithful copy may be packed anew."""

    @abstractmethod
    def parse(self, path: Path) -> tuple[Content, str]:
        """What a file holds, and the sha256 of it."""

    def find(self, folder: Path, file: str) -> Path | None:
        """Where a file lies, if it is there."""
        return folder / file if (folder / file).is_file() else None

    def open(self, folder: Path, file: str) -> Content:
        """What a file holds, verified."""
        return self._verified(folder, file)[0]

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The content hash of every file, and whether it is the published one."""
        return tuple(self._report(folder, file) for file in self.files)

    def is_intact(self, folder: Path, file: str) -> bool:
        """Whether a file is there and can be used."""
        try:
            self.open(folder, file)
        except UserError:
            return False
        return True

    def _verified(self, folder: Path, file: str) -> tuple[Content, str]:
        path = self.find(folder, file)
        if path is None:
            raise UserError(f"{folder / file} is missing; {self.remedy}")
        content, digest = self.parse(path)
        if self.digests.get(file, digest) != digest:
            raise UserError(
                f"{path} does not hold what was published (expected sha256 {self.digests[file]}, found {digest}); {self.remedy}"
            )
        return content, digest

    def _report(self, folder: Path, file: str) -> FileReport:
        digest = self._verified(folder, file)[1]
        if file in self.digests:
            return FileReport(file, digest, True)
        same_file = file in self.file_md5s and md5_of(folder / file) == self.file_md5s[file]
        return FileReport(file, digest, True if same_file else None)


def md5_of(path: Path) -> str:
    """The md5 of a file, which is what publishers of datasets print."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
