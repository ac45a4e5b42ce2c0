"""What can be removed of runs that are over: their checkpoints with all states, and models kept on the way."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from fedflat.errors import UserError
from fedflat.experiment.config import Section
from fedflat.experiment.store.atomic_files import explain_os_error
from fedflat.experiment.store.lock import claimed
from fedflat.experiment.store.run_folder import RunFolder

PARTS = {
    "checkpoint": ("checkpoint/*", "state/*"),
    "snapshots": ("models/*",),
    "models": ("model.safetensors", "model.*.safetensors"),
}
"""What can be removed, and where it lies in a run's folder."""
CLEANED = ("checkpoint", "snapshots")
"""What is removed where nothing else is asked for: the last models stay."""


class Keep(Section):
    """What stays on disk of a run that is over; its config and metrics always do."""

    checkpoint: bool = Field(True, description="the checkpoint, with the states of server and clients")
    snapshots: bool = Field(True, description="models kept on the way (evaluation.save_every)")
    models: bool = Field(
        True, description="the models at the end, without which a run can only be looked at in tables and curves"
    )

    @property
    def removed(self) -> tuple[str, ...]:
        """The parts that do not stay."""
        return tuple(part for part in PARTS if not getattr(self, part))


@dataclass(frozen=True)
class Removable:
    """A run that is over, and the bytes of each part of it that can go."""

    run: Path
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        """All of them together."""
        return sum(self.parts.values())


def find_runs(paths: Iterable[Path]) -> Iterator[Path]:
    """Every run in some folders, at any depth, in order."""
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}; expected one with runs, for example runs")
        found = [file.parent for file in sorted(path.rglob("config.yaml")) if RunFolder(file.parent).exists]
        if not found:
            raise UserError(f"there are no runs in {path}; expected a folder with runs, for example runs")
        yield from found


def removable(run: Path, parts: Iterable[str] = CLEANED) -> Removable | None:
    """What can be removed of a run; None where it is not over, or where nothing is left to remove."""
    if not RunFolder(run).is_over:
        return None
    sizes = {part: sum(_bytes(path) for path in _paths(run, part)) for part in parts}
    found = Removable(run, {part: size for part, size in sizes.items() if size})
    return found if found.bytes else None


def remove(run: Path, parts: Iterable[str] = CLEANED) -> int:
    """Remove parts of a run that is over, while no other process works on it; returns the bytes that are free by it."""
    with claimed(run):
        return remove_claimed(run, parts)


def remove_claimed(run: Path, parts: Iterable[str]) -> int:
    """The same, where this process has claimed the run already."""
    folder = RunFolder(run)
    try:
        folder.hold()
        found = removable(run, parts)
        for part in found.parts if found else ():
            for path in _paths(run, part):
                _remove(path)
    finally:
        folder.release()
    return found.bytes if found else 0


def _paths(run: Path, part: str) -> list[Path]:
    return [path for pattern in PARTS[part] for path in sorted(run.glob(pattern))]


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())


def _remove(path: Path) -> None:
    with explain_os_error(path, "remove"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
