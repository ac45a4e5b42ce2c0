"""fedflat clean: free disk space used by finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import print_json, screen, shown_bytes, table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.experiment.store.cleanup import Removable

NAMES = {"checkpoint": "checkpoint and states", "snapshots": "models on the way"}


def clean(
    folders: list[Path] = typer.Argument(metavar="FOLDER", help="run folders, or folders that contain runs"),
    snapshots: bool = typer.Option(
        True, "--snapshots/--keep-snapshots", help="also remove models saved during training"
    ),
    yes: bool = typer.Option(False, "--yes", help="remove the files instead of only listing them"),
    as_json: bool = JSON,
) -> None:
    """List, and with --yes remove, checkpoints, client state and saved models of finished runs.

    Configs, metrics and final models stay; unfinished runs are not touched.

    Example: fedflat clean runs --yes
    """
    from fedflat.experiment.store.cleanup import CLEANED, find_runs, removable, remove
    from fedflat.experiment.store.files import LockedError

    parts = tuple(part for part in CLEANED if snapshots or part != "snapshots")
    runs = list(dict.fromkeys(find_runs(folders)))
    found = [one for run in runs if (one := removable(run, parts)) is not None]
    freed, held = 0, []
    for one in found if yes else ():
        try:
            freed += remove(one.run, parts)
        except LockedError:
            held.append(one.run)
    if as_json:
        listed = [{"folder": one.run, "bytes": one.parts} for one in found]
        print_json({"runs": len(runs), "removable": listed, "bytes": sum(one.bytes for one in found), "removed": freed})
    else:
        _print(found, len(runs), parts, freed if yes else None)
    if held:
        raise UserError(f"{held[0]} is in use by another process and was skipped; wait for it, then clean again")


def _print(found: list[Removable], runs: int, parts: tuple[str, ...], freed: int | None) -> None:
    console = screen()
    if not found:
        console.print(f"Nothing to remove in {runs} run{'s' * (runs != 1)}.")
        return
    columns = [NAMES[part] for part in parts]
    rows = [
        [one.run, *(shown_bytes(one.parts[part]) if part in one.parts else None for part in parts)] for one in found
    ]
    console.print(table(("run", *columns), rows, numbers=columns))
    console.print()
    of = f"of {len(found)} of {runs} runs"
    if freed is None:
        console.print(
            f"{shown_bytes(sum(one.bytes for one in found))} {of} can be removed; add --yes to remove them.",
            style="bold",
        )
    else:
        console.print(f"{shown_bytes(freed)} {of} removed.", style="bold")
