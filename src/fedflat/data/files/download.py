"""Downloading a dataset: resumed after a broken connection, verified, and visible only when complete."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import IO

from filelock import FileLock

from fedflat.data.sources.source import DatasetSource, Download, md5_of
from fedflat.errors import MachineFailed, UserError

Progress = Callable[[str, int, int | None], None]
"""Called while bytes arrive with the file name, the bytes received, and the total size if the server reports it."""

OpenMember = Callable[[str], IO[bytes] | None]
"""Opens a file of an archive by name; returns None if there is no such file."""

ATTEMPTS = 5
TIMEOUT_SECONDS = 30
BLOCK_BYTES = 1 << 16


def download_source(source: DatasetSource, data_dir: Path, progress: Progress | None = None) -> None:
    """Download the missing or damaged files of a dataset; intact files are left alone.

    Args:
        source: the dataset.
        data_dir: where its files belong.
        progress: called while bytes arrive with the file name, the bytes received and the total size if known.
    """

    def is_complete(download: Download) -> bool:
        return all(source.is_intact(data_dir, file) for file in download.files)

    for download in source.downloads:
        if is_complete(download):
            continue
        try:
            with _locked(download.part(data_dir)):
                if not is_complete(download):  # another process may have downloaded it in the meantime
                    _install(download, data_dir, progress or (lambda name, received, total: None))
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise MachineFailed(
                f"cannot download {source.name} from {download.url} ({reason}); {source.file_instructions(data_dir)}"
            ) from error
    if source.missing(data_dir):
        raise MachineFailed(
            f"{source.name} is incomplete, and the rest cannot be downloaded automatically; "
            f"{source.file_instructions(data_dir)}"
        )


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Wait until no other process downloads to ``part``.

    The lock file stays if the download fails: processes that wait for a deleted file would not exclude those that
    create a new one.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{part}.lock")
    with suppress(NotImplementedError):  # some file systems have no locks
        lock.acquire()
    is_complete = False
    try:
        yield
        is_complete = True
    finally:
        lock.release()
        if is_complete:
            Path(lock.lock_file).unlink(missing_ok=True)


def _install(download: Download, data_dir: Path, progress: Progress) -> None:
    """Download a file, verify its md5, and move it or its unpacked content into ``data_dir``.

    The bytes are received in a ``.part`` file, so that an interrupted download can be resumed.
    """
    part = download.part(data_dir)
    _receive_with_retries(download.url, part, progress)
    md5 = md5_of(part)
    if md5 != download.md5:
        part.unlink()
        raise UserError(
            f"the file from {download.url} has md5 {md5}; expected {download.md5}; it was deleted: try again later"
        )
    if download.is_archive:
        _unpack(part, download, data_dir)
        part.unlink()
    else:
        part.replace(data_dir / download.files[0])


def _receive_with_retries(url: str, part: Path, progress: Progress) -> None:
    """Receive ``url`` into the file ``part``, resuming after broken connections; raises errors of the last attempt."""
    for _ in range(ATTEMPTS - 1):
        try:
            if _receive(url, part, progress):
                return
        except (ConnectionError, TimeoutError, HTTPException):
            continue
    if not _receive(url, part, progress):
        raise ConnectionError(f"the connection broke {ATTEMPTS} times; run the command again to resume the download")


def _receive(url: str, part: Path, progress: Progress) -> bool:
    """Append the missing bytes of ``url`` to the file ``part``; return False if the connection broke before the end."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    received = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={received}-"} if received else {}
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        # Range not satisfiable: no bytes follow ours. The checksum tells whether the file is complete.
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and received:
            return True
        raise
    with response:
        resumed = response.status == HTTPStatus.PARTIAL_CONTENT
        received = received if resumed else 0  # a server without ranges sends the whole file again
        length = response.headers.get("Content-Length")
        total = received + int(length) if length else None
        with part.open("ab" if resumed else "wb") as out:
            while block := response.read1(BLOCK_BYTES):
                out.write(block)
                received += len(block)
                progress(part.name.removesuffix(".part"), received, total)
    return total is None or received >= total


def _unpack(archive: Path, download: Download, data_dir: Path) -> None:
    """Unpack ``download.files`` from a downloaded archive into ``data_dir``; other files of the archive are ignored.

    All files are first written to a temporary folder under their number, so an error leaves ``data_dir`` unchanged.
    """
    open_archive = _open_zip if download.url.endswith(".zip") else _open_tar
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=data_dir) as folder:
        unpacked = {file: Path(folder) / str(number) for number, file in enumerate(download.files)}
        with open_archive(archive) as open_member:
            for file, temporary in unpacked.items():
                stream = open_member(file)
                if stream is None:
                    raise UserError(f"{download.url} contains no file {file}; it is not the expected archive")
                with stream, temporary.open("wb") as out:
                    shutil.copyfileobj(stream, out)
        for file, temporary in unpacked.items():
            (data_dir / file).parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(data_dir / file)


@contextmanager
def _open_tar(archive: Path) -> Iterator[OpenMember]:
    """Open a tar archive; yields a function that opens a regular file by name, or returns None if there is none."""
    with tarfile.open(archive) as tar:
        files = {member.name: member for member in tar.getmembers() if member.isreg()}
        yield lambda name: tar.extractfile(files[name]) if name in files else None


@contextmanager
def _open_zip(archive: Path) -> Iterator[OpenMember]:
    """Open a zip archive; yields a function that opens a file by name, or returns None if there is none."""
    with zipfile.ZipFile(archive) as zipped:
        files = {member.filename: member for member in zipped.infolist() if not member.is_dir()}
        yield lambda name: zipped.open(files[name]) if name in files else None
