"""fedflat show: existing runs."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from fedflat.cli.shared.completion import complete_run
from fedflat.cli.shared.flags import JSON, TARGETS
from fedflat.cli.shared.one_run import print_run, run_document
from fedflat.cli.shared.screen import print_json
from fedflat.errors import UserError


def show(
    folder: Path = typer.Argument(
        metavar="FOLDER", help="a run folder, or a folder that contains runs", autocompletion=complete_run
    ),
    target: list[float] = TARGETS,
    as_json: bool = JSON,
) -> None:
    """Show a run with its settings and its partition or real sites, or compare all runs below a folder.

    Example: fedflat show runs
    """
    from fedflat.experiment.store.files import DamagedFile
    from fedflat.experiment.store.run_folder import RunFolder, load_record

    run_folder = RunFolder(folder)
    if not run_folder.exists:
        _show_comparison(folder, target, as_json)
    elif as_json:
        try:
            partition = None if run_folder.has_real_sites else run_folder.partition()
        except DamagedFile as error:
            print(f"fedflat: {error}", file=sys.stderr)
            partition = None
        print_json(run_document(load_record(folder)) | {"partition": partition})
    else:
        print_run(load_record(folder), settings=True)


def _show_comparison(folder: Path, targets: list[float], as_json: bool) -> None:
    """Compare all readable, distinct runs below a folder."""
    from fedflat.cli.shared.several_runs import comparison_document, print_comparison
    from fedflat.experiment.store.run_collection import count_missing_runs, runs_below
    from fedflat.experiment.store.run_folder import load_record
    from fedflat.reporting.comparison import Comparison
    from fedflat.reporting.distinct import drop_repeated

    records, unreadable = [], []
    for run in runs_below(folder):
        try:
            records.append(load_record(run))
        except UserError as error:
            unreadable.append((str(run), str(error)))
    distinct, repeated = drop_repeated(records)
    for run_folder, reason in unreadable:
        print(f"fedflat: {run_folder} skipped: {reason}", file=sys.stderr)
    for _, reason in repeated:
        print(f"fedflat: left out: {reason}", file=sys.stderr)
    if not records:
        raise UserError(f"no runs in {folder}; expected folders created by fedflat run")
    comparison, missing = Comparison(distinct), count_missing_runs(folder)
    if as_json:
        left_out = [{"folder": run, "why": reason} for run, reason in (*unreadable, *repeated)]
        print_json({"folder": folder, **comparison_document(comparison, targets, missing), "left_out": left_out})
    else:
        print_comparison(comparison, targets, missing)
