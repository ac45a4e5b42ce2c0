"""Downloading datasets from a real local server that supports ranges and can be told to fail."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedflat.data import registry
from fedflat.data.files.download import ATTEMPTS, download_source
from fedflat.data.sources.source import Download
from fedflat.errors import UserError


class Publisher(ThreadingHTTPServer):
    """Serves bytes by name; ``cuts`` lists after how many bytes the next answers break off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.ranges: list[str | None] = []
        self.knows_ranges = True
        self.pause = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Publisher

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        body = self.server.files.get(self.path.lstrip("/"))
        if body is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.knows_ranges else 0
        if wanted and start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if wanted and self.server.knows_ranges else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:][: self.server.cuts.pop(0) if self.server.cuts else None]
        for position in range(0, len(rest), 5000):
            self.wfile.write(rest[position : position + 5000])
            time.sleep(self.server.pause)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cifar(publisher: Publisher, small_cifar10: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    """A server of the small CIFAR-10, whose archive also has a readme and a file with a path outside the archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(small_cifar10.folder / "cifar-10-batches-py", "cifar-10-batches-py")
        for name in ("cifar-10-batches-py/readme.html", "../escaped"):
            tar.addfile(tarfile.TarInfo(name))
    archive = buffer.getvalue()
    publisher.files["cifar.tar.gz"] = archive
    download = Download(f"{publisher.url}/cifar.tar.gz", hashlib.md5(archive).hexdigest(), small_cifar10.source.files)
    source = dataclasses.replace(small_cifar10.source, downloads=(download,))
    return SimpleNamespace(
        source=source, folder=tmp_path / "fetched" / "here", archive=archive, original=small_cifar10.folder
    )


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_an_archive_is_fetched_and_unpacked_and_leaves_nothing_else(cifar: SimpleNamespace) -> None:
    seen = []
    download_source(cifar.source, cifar.folder, lambda *step: seen.append(step))
    assert files_below(cifar.folder.parent) == {f"here/{file}" for file in cifar.source.files}
    assert cifar.source.read(cifar.folder).content == cifar.source.read(cifar.original).content
    assert seen[-1] == ("cifar.tar.gz", len(cifar.archive), len(cifar.archive))


def test_a_broken_download_resumes_where_it_stopped(cifar: SimpleNamespace, publisher: Publisher) -> None:
    publisher.cuts = [1000, 500]
    download_source(cifar.source, cifar.folder)
    assert publisher.ranges == [None, "bytes=1000-", "bytes=1500-"]
    assert not cifar.source.missing(cifar.folder)


def test_an_interrupted_fetch_is_resumed_by_the_next(cifar: SimpleNamespace, publisher: Publisher) -> None:
    publisher.cuts = [100] * ATTEMPTS
    with pytest.raises(UserError, match=r"connection .* 5 times"):
        download_source(cifar.source, cifar.folder)
    part = "cifar-10-batches-py/cifar.tar.gz.part"
    assert files_below(cifar.folder) == {part, f"{part}.lock"}
    assert len(cifar.source.missing(cifar.folder)) == 6
    publisher.ranges.clear()
    download_source(cifar.source, cifar.folder)
    assert publisher.ranges == [f"bytes={100 * ATTEMPTS}-"]
    assert files_below(cifar.folder) == set(cifar.source.files)


def test_processes_that_need_the_same_file_download_it_once(cifar: SimpleNamespace, publisher: Publisher) -> None:
    publisher.pause = 0.01
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(download_source, cifar.source, cifar.folder) for _ in range(3)]:
            done.result()
    assert publisher.ranges == [None] and files_below(cifar.folder) == set(cifar.source.files)


def test_a_server_without_ranges_starts_over(cifar: SimpleNamespace, publisher: Publisher) -> None:
    publisher.knows_ranges = False
    publisher.cuts = [1000]
    seen = []
    download_source(cifar.source, cifar.folder, lambda *step: seen.append(step))
    assert cifar.source.read(cifar.folder).num_classes == 10
    assert seen[-1] == ("cifar.tar.gz", len(cifar.archive), len(cifar.archive))


def test_a_complete_partial_file_is_used(cifar: SimpleNamespace, publisher: Publisher) -> None:
    part = cifar.source.downloads[0].part(cifar.folder)
    part.parent.mkdir(parents=True)
    part.write_bytes(cifar.archive)
    download_source(cifar.source, cifar.folder)
    assert publisher.ranges == [f"bytes={len(cifar.archive)}-"]
    assert files_below(cifar.folder) == set(cifar.source.files)


def test_wrong_bytes_leave_only_a_lock_file(cifar: SimpleNamespace, publisher: Publisher) -> None:
    publisher.files["cifar.tar.gz"] = cifar.archive[:-1] + b"x"
    with pytest.raises(UserError, match=r"cifar\.tar\.gz .*md5 \w{32}.* \w{32}"):
        download_source(cifar.source, cifar.folder)
    assert files_below(cifar.folder) == {"cifar-10-batches-py/cifar.tar.gz.part.lock"}


def test_intact_files_are_kept_and_damaged_ones_downloaded_again(
    publisher: Publisher, small_mnist: SimpleNamespace
) -> None:
    downloads = []
    for file in small_mnist.source.files:
        publisher.files[file] = (small_mnist.folder / file).read_bytes()
        downloads.append(Download(f"{publisher.url}/{file}", hashlib.md5(publisher.files[file]).hexdigest(), (file,)))
    source = dataclasses.replace(small_mnist.source, downloads=tuple(downloads))
    before = source.read(small_mnist.folder).content
    download_source(source, small_mnist.folder)
    assert publisher.ranges == []
    (small_mnist.folder / source.files[0]).write_bytes(gzip.compress(b"nonsense"))
    (small_mnist.folder / source.files[3]).unlink()
    download_source(source, small_mnist.folder)
    assert len(publisher.ranges) == 2
    assert source.read(small_mnist.folder).content == before


def test_an_archive_without_the_required_files_is_rejected(cifar: SimpleNamespace) -> None:
    download = dataclasses.replace(cifar.source.downloads[0], files=(*cifar.source.files, "cifar-10-batches-py/more"))
    with pytest.raises(UserError, match=r"cifar\.tar\.gz .*cifar-10-batches-py/more"):
        download_source(dataclasses.replace(cifar.source, downloads=(download,)), cifar.folder)
    assert not files_below(cifar.folder) & set(cifar.source.files)


def test_without_a_server_the_error_names_files_and_folder(
    cifar: SimpleNamespace, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    del publisher.files["cifar.tar.gz"]
    monkeypatch.setitem(registry.DATASETS._components, "cifar10", cifar.source)
    with pytest.raises(UserError) as raised:
        registry.load("cifar10", cifar.folder)
    message = str(raised.value)
    for part in ("404", "cifar-10-batches-py/data_batch_1", str(cifar.folder), publisher.url):
        assert part in message
    with pytest.raises(UserError, match="refused"):
        unreachable = dataclasses.replace(cifar.source.downloads[0], url="http://127.0.0.1:9/cifar.tar.gz")
        download_source(dataclasses.replace(cifar.source, downloads=(unreachable,)), cifar.folder)


def test_loading_downloads_missing_files(cifar: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.DATASETS._components, "cifar10", cifar.source)
    assert registry.load("cifar10", cifar.folder).content == cifar.source.read(cifar.original).content
    registry.fetch("cifar10", cifar.folder)
    assert len(registry.verify("cifar10", cifar.folder)) == 6
