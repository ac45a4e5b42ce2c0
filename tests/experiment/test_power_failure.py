"""A power failure may lose writes that were not synced; the run must still resume to the same bytes.

All file operations of a run are recorded. At points of this recording, a random suffix of the unsynced operations on
every file and every folder is dropped, and the run is resumed from what is left.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fedflat
from fedflat.experiment.store.files import LOCK_FILE
from fedflat.experiment.store.run_folder import RunFolder

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "clients": 6,
    "clients_per_round": 3,
    "local_steps": 1,
    "workers": 1,
    "model": "mlp(hidden=2)",
    "progress": False,
}
FAILURES = int(os.environ.get("FEDFLAT_POWER_FAILURES", "4"))
"""Power failures per algorithm, both during the run and after its end."""
Content = bytearray | dict[str, "Node"]


@dataclass(eq=False)
class Node:
    """A file or a folder: its synced content, and the changes since it was last synced."""

    synced: Content
    changes: list[Callable[[Any], None]] = field(default_factory=list)

    def content(self, kept: int | None = None) -> Any:
        """The synced content with the first ``kept`` changes; all by default."""
        result = self.synced.copy()
        for change in self.changes[:kept]:
            change(result)
        return result

    def sync(self) -> None:
        self.synced, self.changes = self.content(), []

    def survivor(self, draw: random.Random) -> Any:
        """What a power failure leaves: folders as nested dictionaries, files as bytes."""
        content = self.content(draw.choice((0, len(self.changes), draw.randint(0, len(self.changes)))))
        if isinstance(content, dict):
            return {name: node.survivor(draw) for name, node in content.items()}
        return bytes(content)


class Disk:
    """A model of the disk below one folder, which records what a run does through the functions of ``os``."""

    def __init__(self, root: Path) -> None:
        self._root, self.top = root, Node({})
        self._open: dict[int, Node] = {}
        self._appending: dict[int, int] = {}
        self.on_change: Callable[[], None] = lambda: None

    def _find(self, path: Any) -> tuple[Node, str] | None:
        """The parent folder and the name of a path; None outside the recorded folder."""
        path = Path(os.fspath(path)).absolute()
        if not path.is_relative_to(self._root) or path.name == LOCK_FILE:
            return None
        node = self.top
        for name in path.relative_to(self._root).parts[:-1]:
            node = node.content()[name]
        return node, path.name

    def _change(self, node: Node, change: Callable[[Any], None]) -> None:
        node.changes.append(change)
        self.on_change()

    def mkdir(self, path: Any, *_: Any) -> None:
        self._add(path, Node({}))

    def _add(self, path: Any, node: Node) -> None:
        place = self._find(path)
        if place is not None:
            self._change(place[0], lambda entries: entries.update({place[1]: node}))

    def open(self, descriptor: int, path: Any, flags: int, *_: Any, is_new: bool) -> None:
        place = self._find(path) if Path(os.fspath(path)).absolute() != self._root else None
        if place is None:
            if Path(os.fspath(path)).absolute() == self._root:
                self._open[descriptor] = self.top
            return
        if is_new:
            self._add(path, Node(bytearray()))
        node = self._open[descriptor] = place[0].content()[place[1]]
        if flags & os.O_TRUNC:
            self._change(node, bytearray.clear)

    def write(self, descriptor: int, data: Any) -> None:
        """Both writers of the package either fill a new file or append."""
        node, copy = self._open.get(descriptor), bytes(data)
        if node is not None:
            self._change(node, lambda content: content.extend(copy))

    def pwrite(self, descriptor: int, data: Any, offset: int) -> None:
        node, copy = self._open.get(descriptor), bytes(data)
        if node is not None:
            self._change(node, lambda content: _write_at(content, copy, offset))

    def ftruncate(self, descriptor: int, length: int) -> None:
        if descriptor in self._open:
            self._change(self._open[descriptor], lambda content: _resize(content, length))

    def fsync(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open[descriptor].sync()
            self.on_change()

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def replace(self, source: Any, target: Any) -> None:
        """A rename within one folder, which is one change of this folder."""
        place, new = self._find(source), self._find(target)
        if place is not None and new is not None:
            assert place[0] is new[0]
            self._change(place[0], lambda entries: entries.update({new[1]: entries.pop(place[1])}))

    def unlink(self, path: Any) -> None:
        place = self._find(path)
        if place is not None:
            self._change(place[0], lambda entries: entries.pop(place[1]))


def _resize(content: bytearray, length: int) -> None:
    del content[length:]
    content.extend(bytes(length - len(content)))


def _write_at(content: bytearray, data: bytes, offset: int) -> None:
    if len(content) < offset + len(data):
        _resize(content, offset + len(data))
    content[offset : offset + len(data)] = data


@contextmanager
def recorded(disk: Disk) -> Iterator[None]:
    """Call the real functions of ``os`` and repeat every call on the modelled disk."""
    real_open = os.open

    def open_both(path: Any, flags: int, *more: Any, **keywords: Any) -> int:
        is_new = not Path(os.fspath(path)).exists()
        descriptor = real_open(path, flags, *more, **keywords)
        disk.open(descriptor, path, flags, is_new=is_new)
        return descriptor

    def both(name: str) -> Callable[..., Any]:
        real, modelled = getattr(os, name), getattr(disk, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = real(*arguments, **keywords)
            modelled(*arguments)
            return result

        return call

    names = ("mkdir", "write", "pwrite", "ftruncate", "fsync", "close", "replace", "unlink")
    with mock.patch.multiple(os, open=open_both, **{name: both(name) for name in names}):
        yield


def write_tree(folder: Path, tree: dict[str, Any]) -> None:
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            write_tree(folder / name, content)
        else:
            (folder / name).write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("timing.jsonl", LOCK_FILE))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("scaffold+wima(window=2)", {"engine__checkpoint_every": 1}),
        ("fedavg", {"engine__checkpoint_every": 1, "save_every": 2}),
        ("fedavg", {"stop__target": 0.01}),
    ],
)
def test_a_power_failure_at_any_point_does_not_change_the_result(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    draw, states = random.Random(0), {}
    disk = Disk(tmp_path / "disk")
    disk.on_change = lambda: states.update({repr(state := disk.top.survivor(draw)): state})
    (tmp_path / "disk").mkdir()
    with recorded(disk):
        fedflat.run(algorithm, out=tmp_path / "disk" / "run", **SETTINGS, **settings)
    undisturbed = contents(tmp_path / "disk")
    metrics = disk.top.content()["run"].content()["metrics.jsonl"].content()
    assert metrics == undisturbed["run/metrics.jsonl"], "the recording is complete"
    after_the_end = [disk.top.survivor(draw) for _ in range(FAILURES)]
    sample = draw.sample(list(states.values()), min(FAILURES, len(states)))
    for number, state in enumerate(after_the_end + sample):
        folder = tmp_path / str(number)
        write_tree(folder, state)
        if RunFolder(folder / "run").exists:
            fedflat.resume(folder / "run", progress=False)
        else:
            fedflat.run(algorithm, out=folder / "run", **SETTINGS, **settings)
        assert contents(folder) == undisturbed
        shutil.rmtree(folder)
