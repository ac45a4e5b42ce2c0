"""fedflat clean: free the disk of what finished runs no longer need."""

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
    folders: list[Path] = typer.Argument(metavar="FOLDER", help="runs, or folders with runs in them"),
    snapshots: bool = typer.Option(True, "--snapshots/--keep-snapshots", help="also the models kept on the way"),
    yes: bool = typer.Option(False, "--yes", help="remove them; without it they are only shown"),
    as_json: bool = JSON,
) -> None:
    """Show, and with --yes remove, the checkpoints, states and kept models of runs that are over.

    Configs, metrics and the last models stay, and so does everything of a run that is not over.

    Example: fedflat clean runs --yes
    """
    from fedflat.experiment.store.cleanup import CLEANED, find_runs, removable, remove
    from fedflat.experiment.store.lock import LockedError

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
        raise UserError(
            f"another process is working on {held[0]}, so that it was left as it is; wait for it, then clean again"
        )


def _print(found: list[Removable], runs: int, parts: tuple[str, ...], freed: int | None) -> None:
    console = screen()
    if not found:
        console.print(
            f"Nothing can be removed of {runs} run{'s' * (runs != 1)}: what is there is needed, or the runs are not over."
        )
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
            f"{shown_bytes(sum(one.bytes for one in found))} {of} can be removed; add --yes to do it.", style="bold"
        )
    else:
        console.print(f"{shown_bytes(freed)} {of} removed.", style="bold")
