"""fedflat clean: free disk space used by finished runs."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
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

    Configs, metrics and final models are kept. Unfinished runs are skipped, and so are runs with a final model that
    cannot be read.

    Example: fedflat clean runs --yes
    """
    from fedflat.experiment.store.cleanup import DEFAULT_PARTS, find_runs, removable, remove
    from fedflat.experiment.store.files import LockedError
    from fedflat.experiment.store.final_models import has_restorable_models
    from fedflat.experiment.store.run_folder import RunFolder

    parts = tuple(part for part in DEFAULT_PARTS if snapshots or part != "snapshots")
    runs = list(dict.fromkeys(find_runs(folders)))
    # ``removable`` returns None for runs that are unfinished or have nothing to remove.
    cleanable = [files for files in (removable(run, parts, thorough=yes) for run in runs) if files is not None]
    for run in sorted({*runs} - {files.run for files in cleanable}):
        if has_restorable_models(RunFolder(run), thorough=yes):
            print(
                f"fedflat: {run} is skipped, because a final model is missing or damaged; write it again from the "
                f"checkpoint: fedflat resume {quote(str(run))}",
                file=sys.stderr,
            )
    freed, locked = 0, []
    if yes:
        for files in cleanable:
            try:
                freed += remove(files.run, parts)
            except LockedError:
                locked.append(files.run)
    if as_json:
        listed = [{"folder": files.run, "bytes": files.parts} for files in cleanable]
        total = sum(files.bytes for files in cleanable)
        print_json({"runs": len(runs), "removable": listed, "bytes": total, "removed": freed})
    else:
        _print_removable(cleanable, len(runs), parts, freed if yes else None)
    if locked:
        raise UserError(f"{locked[0]} is in use by another process and was skipped; wait for it, then clean again")


def _print_removable(cleanable: list[Removable], runs: int, parts: tuple[str, ...], freed: int | None) -> None:
    """Print the size of every removable part of each run, and the total.

    Args:
        cleanable: the runs with something to remove.
        runs: number of all runs.
        parts: the parts that may be removed, e.g. ``checkpoint``.
        freed: bytes that were removed; None if nothing was removed yet.
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
    which = f"of {len(cleanable)} of {runs} runs"
    if freed is None:
        total = shown_bytes(sum(files.bytes for files in cleanable))
        console.print(f"{total} {which} can be removed; add --yes to remove them.", style="bold")
    else:
        console.print(f"{shown_bytes(freed)} {which} removed.", style="bold")
