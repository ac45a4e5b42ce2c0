"""Free disk space: delete checkpoints, client states and saved models of finished runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from fedflat.errors import UserError, no_folder
from fedflat.experiment.settings_group import SettingsGroup
from fedflat.experiment.store.files import LOCK_FILE, explain_os_error, locked
from fedflat.experiment.store.final_models import has_restorable_models
from fedflat.experiment.store.run_collection import runs_below
from fedflat.experiment.store.run_folder import RunFolder

PARTS = {
    "checkpoint": ("checkpoint/*", "state/*"),
    "snapshots": ("models/*",),
    "models": ("model.safetensors", "model.*.safetensors"),
}
"""The removable parts of a run folder, with the glob patterns of their files."""
DEFAULT_PARTS = ("checkpoint", "snapshots")
"""The parts removed by default; the final models stay."""
MODELS_REMOVED = "models_removed"
"""Key in status.json of a run whose final models were removed on request, so that they do not count as lost."""


class Keep(SettingsGroup):
    """Parts of a finished run to keep on disk; config and metrics are always kept."""

    checkpoint: bool = Field(True, description="keep the checkpoint, with server and client states")
    snapshots: bool = Field(True, description="keep the models saved during training (evaluation.save_every)")
    models: bool = Field(True, description="keep the final models, which evaluation and flatness need")

    @property
    def removed(self) -> tuple[str, ...]:
        """The parts to remove."""
        return tuple(part for part in PARTS if not getattr(self, part))


@dataclass(frozen=True)
class Removable:
    """The removable parts of a finished run."""

    run: Path
    parts: dict[str, int]
    """Size of each part in bytes."""
    restores_models: bool
    """Whether a final model is lost and the checkpoint can restore it, which is therefore not among the parts."""

    @property
    def bytes(self) -> int:
        """Total size of the parts in bytes."""
        return sum(self.parts.values())


def find_runs(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield every run folder at or below the given folders, without links; each of them must contain a run."""
    for path in paths:
        if not path.is_dir():
            raise no_folder(path, "a folder of runs, for example runs")
        runs = [run for run in runs_below(path) if RunFolder(run).exists and (run == path or not run.is_symlink())]
        if not runs:
            raise UserError(f"there are no runs in {path}; expected a folder of runs, for example runs")
        yield from runs


def removable(run: Path, parts: Iterable[str] = DEFAULT_PARTS, thorough: bool = False) -> Removable | None:
    """The requested ``parts`` (checkpoint, snapshots, models) that a finished run still has, with their sizes.

    None if the run has not ended. A checkpoint that can restore a lost model is not removable. With ``thorough``,
    models are also read, so that damaged ones are noticed.
    """
    folder, requested = RunFolder(run), set(parts)
    if not folder.has_ended:
        return None
    restores_models = (
        "checkpoint" in requested
        and "models" not in requested
        and MODELS_REMOVED not in folder.status()
        and has_restorable_models(folder, thorough)
    )
    sizes = {part: sum(map(_size, _paths(run, part))) for part in PARTS if part in requested}
    if restores_models:
        del sizes["checkpoint"]
    return Removable(run, {part: size for part, size in sizes.items() if size}, restores_models)


def remove(run: Path, parts: Iterable[str] = DEFAULT_PARTS) -> Removable | None:
    """Remove parts of a finished run; returns what was removed, or raises ``LockedError`` if the run is in use."""
    with locked(run):
        return remove_locked(run, parts)


def remove_locked(run: Path, parts: Iterable[str]) -> Removable | None:
    """Like ``remove``, for a folder that this process has already locked.

    A sweep locks a run's folder to decide which process executes the run. While a run is in progress, it holds a second
    lock. This function acquires the second lock, so it never removes files of a run in progress.
    """
    folder = RunFolder(run)
    try:
        folder.acquire_lock()
        existing = removable(run, parts, thorough=True)
        if existing is not None:
            if "models" in existing.parts:  # written first, so that an interruption does not look like a lost model
                folder.write_status(**(folder.status() | {MODELS_REMOVED: True}))
            delete_parts(run, existing.parts)
        return existing
    finally:
        folder.release_lock()


def delete_parts(run: Path, parts: Iterable[str]) -> None:
    """Delete parts of a run whose folder this process has locked, even if the run has not ended."""
    for part in parts:
        for path in _paths(run, part):
            _delete(path)


def _paths(run: Path, part: str) -> list[Path]:
    """The files and folders that make up a part, without locks."""
    return [path for pattern in PARTS[part] for path in sorted(run.glob(pattern)) if path.name != LOCK_FILE]


def _size(path: Path) -> int:
    """Size of a file, or of all files in a folder, in bytes."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _delete(path: Path) -> None:
    """Delete a file, a link or a folder."""
    with explain_os_error(path, "remove"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
