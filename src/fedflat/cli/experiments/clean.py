"""fedflat clean: free disk space used by finished runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedflat.cli.shared.flags import JSON, RUNS_BELOW
from fedflat.cli.shared.screen import counted, print_json, screen, shown_bytes, table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.experiment.store.cleanup import Removable

COLUMNS = {"checkpoint": "checkpoint and states", "snapshots": "intermediate models"}
"""Column titles of the removable parts of a run."""


def clean(
    folders: list[Path] = RUNS_BELOW,
    snapshots: bool = typer.Option(
        True, "--snapshots/--keep-snapshots", help="also remove models saved during training"
    ),
    yes: bool = typer.Option(False, "--yes", help="remove the files instead of only listing them"),
    as_json: bool = JSON,
) -> None:
    """List the checkpoints, client state and intermediate models of finished runs; with --yes, delete them.

    Configs, metrics and final models are kept. Unfinished runs are skipped. If a final model is missing or damaged, the
    checkpoint that can restore it is kept.

    Example: fedflat clean runs --yes
    """
    from fedflat.experiment.analysis.reopen import resume_command
    from fedflat.experiment.store.cleanup import DEFAULT_PARTS, find_runs, removable, remove
    from fedflat.experiment.store.files import LockedError
    from fedflat.experiment.store.run_folder import RunFolder

    parts = tuple(part for part in DEFAULT_PARTS if snapshots or part != "snapshots")
    runs = list(dict.fromkeys(find_runs(folders)))
    cleanable, locked = [], []
    for run in runs:
        files = removable(run, parts)
        if yes and files is not None and (files.parts or files.restores_models):
            try:
                files = remove(run, parts)
            except LockedError:
                locked.append(run)
                continue
        if files is not None and files.restores_models:
            command = resume_command(RunFolder(run))
            print(
                f"fedflat: the checkpoint of {run} is kept, because a final model is missing or damaged; restore the "
                f"model from it: {command}",
                file=sys.stderr,
            )
        if files is not None and files.parts:
            cleanable.append(files)
    total = sum(files.bytes for files in cleanable)
    if as_json:
        listed = [{"folder": files.run, "bytes": files.parts} for files in cleanable]
        print_json({"runs": len(runs), "removable": listed, "bytes": total, "removed": total if yes else 0})
    else:
        _print_removable(cleanable, len(runs), parts, yes)
    if locked:
        raise UserError(f"{locked[0]} is in use by another process and was skipped; wait for it, then clean again")


def _print_removable(cleanable: list[Removable], runs: int, parts: tuple[str, ...], removed: bool) -> None:
    """Print the size of every removable part of each run, and the total.

    Args:
        cleanable: the runs with something to remove.
        runs: number of all runs.
        parts: the parts that may be removed, e.g. ``checkpoint``.
        removed: whether they have been removed.
    """
    console = screen()
    if not cleanable:
        console.print(f"Nothing to remove in {counted(runs, 'run')}.")
        return
    rows = []
    for files in cleanable:
        sizes = [shown_bytes(files.parts[part]) if part in files.parts else None for part in parts]
        rows.append([files.run, *sizes])
    columns = [COLUMNS[part] for part in parts]
    console.print(table(("run", *columns), rows, numeric=columns))
    console.print()
    total = f"{shown_bytes(sum(files.bytes for files in cleanable))} of {len(cleanable)} of {runs} runs"
    verdict = "removed." if removed else "can be removed; add --yes to remove them."
    console.print(f"{total} {verdict}", style="bold")
