"""Folders that contain several runs: which runs, and in which order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedflat.experiment.store.files import LOCK_FILE, create_folder, locked, write_atomically

COMPARISON, SWEEP = "comparison.json", "sweep.json"
"""Files of a comparison and of a sweep; ``runs`` lists the folders of their runs in order."""


def save_order(folder: Path, runs: Sequence[Path]) -> None:
    """Store the order of a comparison's ``runs``; existing runs of earlier comparisons in ``folder`` come last."""
    names = [run.relative_to(folder).as_posix() for run in runs]
    create_folder(folder)
    with locked(folder, wait=True):
        earlier = [name for name in _listed_runs(folder / COMPARISON) if (folder / name / "config.yaml").is_file()]
        names += [name for name in earlier if name not in names]
        _write_order(folder, names)


def forget_order(folder: Path, runs: Sequence[Path]) -> None:
    """Remove a comparison's ``runs`` from the stored order, unless one of them has begun.

    If no other runs are listed, the file is deleted, and its folder if nothing else is in it.
    """
    if any((run / "config.yaml").is_file() for run in runs):
        return
    names = {run.relative_to(folder).as_posix() for run in runs}
    with locked(folder, wait=True):
        others = [name for name in _listed_runs(folder / COMPARISON) if name not in names]
        if others:
            _write_order(folder, others)
            return
        for name in (COMPARISON, LOCK_FILE):
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        folder.rmdir()


def runs_below(folder: Path) -> list[Path]:
    """Return all run folders at or below ``folder``: in the order of their comparison or sweep, otherwise by name."""
    orders = {file.parent: _listed_runs(file) for name in (COMPARISON, SWEEP) for file in folder.rglob(name)}

    def sort_key(run: Path) -> tuple[Path, int, Path]:
        """Sort by the folder of the comparison or sweep, then by the position in it; unlisted runs come last."""
        collection = next((parent for parent in run.parents if parent in orders), None)
        if collection is None:
            return run, 0, run
        names, name = orders[collection], run.relative_to(collection).as_posix()
        return collection, names.index(name) if name in names else len(names), run

    # Folders that are links match only the star, so links to runs are found, but no folder is searched twice.
    configs = {*folder.glob("config.yaml"), *folder.glob("**/*/config.yaml")}
    return sorted((file.parent for file in configs), key=sort_key)


def run_glob(folder: Path) -> str:
    """Return a shell pattern that matches exactly runs in ``folder``, e.g. ``runs/first/*/seed-*``, or empty."""
    for pattern in ("*/seed-*", "*seed*", "*"):
        matches = list(folder.glob(pattern))
        if matches and all((match / "config.yaml").is_file() for match in matches):
            return str(folder / pattern)
    return ""


def count_missing_runs(folder: Path) -> int:
    """Return how many runs of the comparison in ``folder`` have not begun; 0 if there is no comparison.

    Runs that the comparison does not list count as missing ones whose folders were renamed.
    """
    listed, existing = _listed_runs(folder / COMPARISON), runs_below(folder)
    names = {run.relative_to(folder).as_posix() for run in existing}
    return max(0, len(set(listed) - names) - len(names - set(listed)))


def _write_order(folder: Path, names: Sequence[str]) -> None:
    write_atomically(folder / COMPARISON, json.dumps({"format": 1, "runs": names}, indent=1) + "\n")


def _listed_runs(file: Path) -> list[str]:
    """Return the names of the runs in a comparison's or sweep's file; empty if it is missing or damaged."""
    try:
        return list(json.loads(file.read_text())["runs"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
