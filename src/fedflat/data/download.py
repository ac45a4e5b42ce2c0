"""Fetching a dataset from its publisher: resumed after a cut, verified, and visible only when it is whole."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO

from fedflat.data.sources.source import Download, Source, md5_of
from fedflat.errors import UserError

Progress = Callable[[str, int, int | None], None]
"""Called as bytes arrive with the name of the file, how many there are by now, and how many there will be if the server says so."""

Member = Callable[[str], IO[bytes] | None]
"""The bytes of a file of an archive, by name."""

ATTEMPTS = 5
TIMEOUT_SECONDS = 30
BLOCK = 1 << 16


def fetch_source(source: Source, folder: Path, progress: Progress | None = None) -> None:
    """Fetch what is missing or damaged of a dataset; what is there and whole is left alone."""
    for download in source.downloads:
        if all(source.is_intact(folder, file) for file in download.files):
            continue
        try:
            _fetch(download, folder, progress or (lambda name, done, total: None))
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UserError(
                f"{source.name} could not be fetched from {download.url} ({reason}); {source.expected(folder)}"
            ) from error
    if source.missing(folder):
        raise UserError(
            f"{source.name} is not all there, and what is missing must be put there by hand; {source.expected(folder)}"
        )


def _fetch(download: Download, folder: Path, progress: Progress) -> None:
    part = download.part(folder)
    part.parent.mkdir(parents=True, exist_ok=True)
    _receive_all(download.url, part, progress)
    found = md5_of(part)
    if found != download.md5:
        part.unlink()
        raise UserError(
            f"what {download.url} sent has md5 {found} instead of {download.md5} and was thrown away; try again later"
        )
    if download.is_archive:
        _unpack(part, download, folder)
        part.unlink()
    else:
        part.replace(folder / download.files[0])


def _receive_all(url: str, part: Path, progress: Progress) -> None:
    for _ in range(ATTEMPTS - 1):
        try:
            if _receive(url, part, progress):
                return
        except (ConnectionError, TimeoutError, HTTPException):
            continue
    if not _receive(url, part, progress):
        raise ConnectionError(
            f"the connection broke off {ATTEMPTS} times; what has arrived is kept and the next attempt goes on from there"
        )


def _receive(url: str, part: Path, progress: Progress) -> bool:
    """Append to ``part`` what it lacks; False if the connection broke off before the end."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    have = part.stat().st_size if part.exists() else 0
    try:
        response = urlopen(Request(url, headers={"Range": f"bytes={have}-"} if have else {}), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        if (
            error.code == 416 and have
        ):  # nothing lies beyond what we have: whether that is the whole file, its checksum tells
            return True
        raise
    with response:
        continues = response.status == 206
        have = have if continues else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if continues else "wb") as out:
            while block := response.read1(BLOCK):
                out.write(block)
                have += len(block)
                progress(part.name.removesuffix(".part"), have, total)
    return total is None or have >= total


def _unpack(archive: Path, download: Download, folder: Path) -> None:
    """Unpack the wanted files to the side, then move each into place; no name in the archive ever decides where something is written."""
    opened = _open_zip if download.url.endswith(".zip") else _open_tar
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as side, opened(archive) as member:
        for number, file in enumerate(download.files):
            stream = member(file)
            if stream is None:
                raise UserError(f"{download.url} holds no file {file}; it is not the archive that was expected")
            with stream, (Path(side) / str(number)).open("wb") as out:
                shutil.copyfileobj(stream, out)
        for number, file in enumerate(download.files):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(side) / str(number)).replace(folder / file)


@contextmanager
def _open_tar(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as tar:
        files = {member.name: member for member in tar.getmembers() if member.isreg()}
        yield lambda name: tar.extractfile(files[name]) if name in files else None


@contextmanager
def _open_zip(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as zipped:
        files = {member.filename: member for member in zipped.infolist() if not member.is_dir()}
        yield lambda name: zipped.open(files[name]) if name in files else None
