"""fedflat branch: continue a run with several algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedflat.cli.experiments.sweep import FILE_JOBS, run_plan
from fedflat.cli.shared.completion import complete_algorithm, complete_run
from fedflat.cli.shared.flags import DRY_RUN, JSON, QUIET, SET, optional
from fedflat.cli.shared.screen import show_loading


def branch(
    origin: str = typer.Argument(
        metavar="RUN@ROUND",
        help="run folder and saved round; RUN alone means its last round",
        autocompletion=complete_run,
    ),
    algorithms: list[str] = typer.Argument(
        metavar="ALGORITHM...",
        help="algorithms to continue with, e.g. fedavg fedsam",
        autocompletion=complete_algorithm,
    ),
    rounds: int | None = optional("--rounds", "total number of rounds", "the run's", min=1, metavar="N"),
    assignments: list[str] = SET,
    out: Path | None = optional("--out", "folder for the runs", "beside the run", metavar="FOLDER"),
    jobs: int | None = FILE_JOBS,
    dry_run: bool = DRY_RUN,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Continue from a model of a run with several algorithms, sharing settings, partition, cohorts and batches.

    Server and client state is not carried over: every algorithm starts with fresh state.

    Example: fedflat branch runs/fedavg-digits-seed0@50 fedavg fedsam scaffold
    """
    show_loading(quiet or as_json)
    from fedflat.experiment.campaign.branch import branch_point
    from fedflat.experiment.campaign.sweep import plan_sweep
    from fedflat.experiment.campaign.sweep_file import read_sweep
    from fedflat.experiment.make_config import assign

    start = branch_point(origin)
    base: dict[str, Any] = {}
    for assignment in assignments:
        assign(base, assignment)
    if rounds is not None:
        base["rounds"] = rounds
    values = {"base": base, "branch": f"{start.run}@{start.rounds}", "grid": {"algorithm": list(algorithms)}}
    folder = out or start.run.with_name(f"{start.run.name}-at-{start.rounds}")
    plan = plan_sweep(read_sweep(values), folder)
    run_plan(plan, jobs, dry_run=dry_run, probe=True, as_json=as_json, quiet=quiet)
