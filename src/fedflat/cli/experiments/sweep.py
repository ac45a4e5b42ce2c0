"""fedflat sweep: a grid of experiments, each run once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.experiments.run import RUNS
from fedflat.cli.shared.downloads import fetch_if_missing
from fedflat.cli.shared.error_reporting import Interrupted
from fedflat.cli.shared.flags import JSON, QUIET, optional
from fedflat.cli.shared.progress import progress
from fedflat.cli.shared.screen import (
    facts,
    print_json,
    screen,
    shown_bytes,
    shown_count,
    shown_metric,
    shown_seconds,
    table,
    with_unit,
)
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.experiment.campaign.ranking import Ranking
    from fedflat.experiment.campaign.sweep import Sweep, SweepResult

MOST_ROWS = 40
"""Maximum number of combinations in a table."""
OUT = optional("--out", "where the runs go", "runs/ and the file's name", metavar="FOLDER")
JOBS = optional("--jobs", "runs at the same time", "what the file says", metavar="N", min=1)
DRY_RUN = typer.Option(False, "--dry-run", help="show the plan and its cost, then stop")


def sweep(
    file: Path = typer.Argument(
        metavar="FILE.yaml", help="base, grid, list, exclude, keep, jobs, devices, ray_address, branch"
    ),
    out: Path | None = OUT,
    jobs: int | None = JOBS,
    ray_address: str | None = typer.Option(
        None,
        "--ray-address",
        metavar="ADDRESS",
        help="HOST:PORT of a Ray cluster, or auto; distributes runs over its nodes",
    ),
    dry_run: bool = DRY_RUN,
    probe: bool = typer.Option(True, "--probe/--no-probe", help="measure a few local steps to estimate the duration"),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Run every combination of a file once; repeat the command, or start it on several machines, to continue.

    Example: fedflat sweep learning-rates.yaml --jobs 4
    """
    from fedflat.experiment.campaign.sweep import plan_sweep, slug
    from fedflat.experiment.campaign.sweep_file import read_sweep

    read = read_sweep(file)
    if ray_address is not None:
        read = read.model_copy(update={"ray_address": ray_address})
    if read.tune is not None:
        raise UserError(f"{file} contains a tune section; use fedflat tune {file}")
    do(plan_sweep(read, out or RUNS / slug(file)), jobs, dry_run, probe, as_json, quiet)


def do(plan: Sweep, jobs: int | None, dry_run: bool, probe: bool, as_json: bool, quiet: bool) -> None:
    """Show the plan, run it, and show the results."""
    if dry_run:
        _show(plan, jobs, probe, as_json)
        return
    silent = quiet or as_json
    for data in {run.config.data.dataset: run.config for run in plan.runs}.values():
        fetch_if_missing(data, silent)
    if not silent:
        screen(stderr=True).print(facts(_cost(plan, jobs, probe)))
    done = _run(plan, jobs, silent)
    failed = [result for result in done if result.error is not None]
    if len(failed) < len(done):
        print_json(_document(plan, done)) if as_json else _print(plan, done)
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise UserError(f"{failed[0].run.name} failed: {failed[0].error}{more}")


def _run(plan: Sweep, jobs: int | None, silent: bool) -> list[SweepResult]:
    from fedflat.experiment.campaign.sweep import run_sweep

    def waiting(runs: int) -> None:
        if not silent:
            print(
                f"waiting for {runs} run{'s' * (runs != 1)} of another process",
                file=sys.stderr,
                flush=True,
            )

    results: dict[str, SweepResult] = {}
    try:
        with progress(silent, len(plan.runs)) as display:
            for result in run_sweep(plan, (display,), jobs, waiting):
                results[result.run.name] = result
                display.run_over()
    except KeyboardInterrupt:
        raise Interrupted(f"{len(results)} of {len(plan.runs)} runs finished; repeat the command to continue") from None
    return [results[run.name] for run in plan.runs if run.name in results]


def _cost(plan: Sweep, jobs: int | None, probe: bool) -> dict[str, object]:
    """The plan as text."""
    from fedflat.experiment.campaign.estimate import remaining_work
    from fedflat.experiment.campaign.sweep import at_once

    on_cluster = plan.file.ray_address is not None
    probe_here = probe and not on_cluster
    work = remaining_work(plan.runs, at_once(plan, jobs) if probe_here else 1, probe_here)
    lines: dict[str, object] = {
        "runs": f"{work.runs}, {work.done} finished",
        "rounds": f"{shown_count(work.rounds)} remaining",
        "disk": _disk(plan, jobs)[1],
    }
    if probe and work.rounds:
        reason = "cluster nodes cannot be probed" if on_cluster else work.reason
        lines["time"] = (
            f"unknown ({reason})"
            if work.seconds is None
            else f"about {shown_seconds(work.seconds)} on this machine (estimated)"
        )
    return lines | {"folder": plan.out}


def _disk(plan: Sweep, jobs: int | None) -> tuple[dict[str, int] | None, str]:
    from fedflat.experiment.campaign.estimate import is_available, sweep_disk
    from fedflat.experiment.campaign.sweep import at_once

    missing = sorted(
        {run.config.data.dataset for run in plan.runs if not is_available(run.config.data.dataset, run.config.data.dir)}
    )
    if missing:
        return None, f"unknown ({missing[0]} is not downloaded)"
    found = sweep_disk([run.config for run in plan.runs], plan.file.keep, at_once(plan, jobs))
    words = f"up to {shown_bytes(found.most)}, excluding logs"
    return vars(found), words + (f"; {shown_bytes(found.kept)} remain" if found.kept < found.most else "")


def _show(plan: Sweep, jobs: int | None, probe: bool, as_json: bool) -> None:
    if as_json:
        runs = [
            {"name": run.name, "varied": run.varied, "done": run.done, "rounds_left": run.rounds_left}
            for run in plan.runs
        ]
        print_json({"folder": plan.out, "runs": runs, "disk": _disk(plan, jobs)[0]})
        return
    console = screen()
    console.print(facts(_cost(plan, jobs, probe)))
    console.print()
    rows = [[run.name, "finished" if run.done else f"{run.rounds_left} rounds remaining"] for run in plan.runs]
    console.print(table(("run", "state"), rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        console.print(f"... and {len(rows) - MOST_ROWS} more", style="dim")


def _document(plan: Sweep, done: list[SweepResult]) -> dict[str, Any]:
    from fedflat.experiment.campaign.ranking import last_score, mean_and_spread, ranking

    ranked = ranking((one.run.varied, one.record) for one in done if one.record is not None)
    lines = [
        {
            "varied": line.varied,
            "seeds": line.seeds,
            "diverged": line.diverged,
            **{
                part: dict(zip(("mean", "std"), mean_and_spread(line.scores(part)), strict=True))
                for part in ("validation", "test")
            },
        }
        for line in ranked.lines
    ]
    runs = [
        {
            "name": one.run.name,
            "folder": one.run.folder,
            "varied": one.run.varied,
            "by": one.by,
            "status": "failed" if one.record is None else one.record.status,
            "reason": str(one.error or (one.record.reason if one.record else "")),
            "validation": None if one.record is None else last_score(one.record, "validation"),
            "test": None if one.record is None else last_score(one.record, "test"),
        }
        for one in done
    ]
    return {"folder": plan.out, "metric": ranked.metric, "best_by": ranked.by, "lines": lines, "runs": runs}


def _print(plan: Sweep, done: list[SweepResult]) -> None:
    from fedflat.experiment.campaign.ranking import ranking

    ranked = ranking((one.run.varied, one.record) for one in done if one.record is not None)
    console = screen()
    console.print()
    console.print(
        f"{with_unit(ranked.metric)} in the last evaluation, mean ± standard deviation over seeds; {_order(ranked)}",
        style="dim",
    )
    names = list(dict.fromkeys(name for line in ranked.lines for name in line.varied))
    figures = ["validation", "test"] if ranked.by == "validation" else ["test"]
    rows: list[list[object]] = []
    for line in ranked.lines[:MOST_ROWS]:
        shown = [_spread(line.validation if part == "validation" else line.test, ranked.metric) for part in figures]
        seeds = f"{line.seeds} ({line.diverged} diverged)" if line.diverged else line.seeds
        rows.append([*(line.varied.get(name) for name in names), *shown, seeds])
    console.print(table((*names, *figures, "seeds"), rows, numbers=(*figures, "seeds")))
    if len(ranked.lines) > MOST_ROWS:
        console.print(f"... and {len(ranked.lines) - MOST_ROWS} more", style="dim")
    console.print()
    counts = {by: sum(one.by == by and one.error is None for one in done) for by in ("here", "before", "elsewhere")}
    words = {"here": "done now", "before": "there already", "elsewhere": "done by another process"}
    ran = ", ".join(f"{count} {words[by]}" for by, count in counts.items() if count)
    console.print(
        facts({"runs": ran, "folder": plan.out, "next": f"fedflat report {plan.out}, fedflat show {plan.out}"})
    )


def _order(ranked: Ranking) -> str:
    if ranked.by == "validation":
        return "best first by validation"
    return "best first on the test set, which is optimistic; set data.validation to rank on validation data"


def _spread(values: tuple[float, ...], metric: str) -> str | None:
    from fedflat.experiment.campaign.ranking import mean_and_spread

    mean, std = mean_and_spread(values)
    return (
        None
        if mean is None
        else shown_metric(mean, metric) + ("" if std is None else f" ± {shown_metric(std, metric)}")
    )
