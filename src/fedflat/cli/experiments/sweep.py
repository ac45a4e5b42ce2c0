"""fedflat sweep: a grid of experiments, each run once."""

from __future__ import annotations

import sys
from operator import attrgetter
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli import Interrupted
from fedflat.cli.experiments.run import RUNS
from fedflat.cli.shared.flags import DRY_RUN, JSON, PROBE, QUIET, optional
from fedflat.cli.shared.screen import (
    counted,
    fetch_if_missing,
    key_values,
    print_json,
    screen,
    show_loading,
    shown_bytes,
    shown_count,
    shown_seconds,
    table,
    with_unit,
)
from fedflat.errors import UserError, error_of_runs
from fedflat.reporting.progress import progress

if TYPE_CHECKING:
    from fedflat.experiment.campaign.ranking import Ranking, Split
    from fedflat.experiment.campaign.sweep import Sweep, SweepResult, SweepRun

SPLITS: tuple[Split, ...] = ("validation", "test")
MAX_ROWS = 40
"""Maximum number of combinations in a table."""
OUT = optional("--out", "folder for the runs", "runs/ and the file's name", metavar="FOLDER")
FILE_JOBS = optional("--jobs", "concurrent runs", "as in the file", metavar="N", min=1)


def sweep(
    file: Path = typer.Argument(
        metavar="FILE.yaml", help="base, grid, list, exclude, keep, jobs, devices, ray_address, branch"
    ),
    out: Path | None = OUT,
    jobs: int | None = FILE_JOBS,
    ray_address: str | None = typer.Option(
        None,
        "--ray-address",
        metavar="ADDRESS",
        help="HOST:PORT of a Ray cluster, or auto; distributes runs over its nodes",
    ),
    dry_run: bool = DRY_RUN,
    probe: bool = PROBE,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Run every combination of settings in a file. Repeat the command to continue, or start it twice to share the work.

    Example: fedflat sweep learning-rates.yaml --jobs 4
    """
    show_loading(quiet or as_json)
    from fedflat.experiment.campaign.sweep import plan_sweep, slug
    from fedflat.experiment.campaign.sweep_file import read_sweep

    sweep_file = read_sweep(file)
    if ray_address is not None:
        sweep_file = sweep_file.changed(ray_address=ray_address)
    if sweep_file.tune is not None:
        raise UserError(f"{file} contains a tune section; use fedflat tune {quote(str(file))}")
    plan = plan_sweep(sweep_file, out or RUNS / slug(file))
    run_plan(plan, jobs, dry_run=dry_run, probe=probe, as_json=as_json, quiet=quiet)


def run_plan(plan: Sweep, jobs: int | None, *, dry_run: bool, probe: bool, as_json: bool, quiet: bool) -> None:
    """Show the plan of a sweep and, unless ``dry_run``, run it and show the results.

    Args:
        plan: the runs of the sweep.
        jobs: concurrent runs; None uses the number in the sweep file.
        dry_run: only show the plan.
        probe: estimate the remaining time from a measurement of a few local steps.
        as_json: print JSON instead of text.
        quiet: show no progress.
    """
    if dry_run:
        _print_plan(plan, jobs, probe, as_json)
        return
    silent = quiet or as_json
    config_by_dataset = {run.config.data.dataset: run.config for run in plan.runs}
    for config in config_by_dataset.values():
        fetch_if_missing(config, silent)
    if not silent:
        screen(stderr=True).print(key_values(_describe_plan(plan, jobs, probe)))
    results = _run(plan, jobs, silent)
    failed = [(result.run.name, result.error) for result in results if result.error is not None]
    any_succeeded = len(failed) < len(results)
    if any_succeeded and as_json:
        print_json(_document(plan, results))
    elif any_succeeded:
        _print_results(plan, results)
    if failed:
        raise error_of_runs(failed, len(results))


def _run(plan: Sweep, jobs: int | None, silent: bool) -> list[SweepResult]:
    """Run a sweep with progress; return the results in the order of the plan."""
    from fedflat.experiment.campaign.sweep import run_sweep

    def report_waiting(runs: int) -> None:
        if not silent:
            print(f"waiting for {counted(runs, 'run')} of another process", file=sys.stderr, flush=True)

    results: dict[str, SweepResult] = {}
    try:
        with progress(silent, len(plan.runs)) as display:
            for result in run_sweep(plan, (display,), jobs, report_waiting):
                results[result.run.name] = result
                display.count_run()
    except KeyboardInterrupt:
        raise Interrupted(f"{len(results)} of {len(plan.runs)} runs finished; repeat the command to continue") from None
    return [results[run.name] for run in plan.runs if run.name in results]


def _describe_plan(plan: Sweep, jobs: int | None, probe: bool) -> dict[str, object]:
    """Describe a sweep for the screen: its runs, rounds, disk space, estimated time and folder, as texts by label."""
    from fedflat.experiment.campaign.estimate import remaining_work
    from fedflat.experiment.campaign.sweep import runs_at_once

    on_cluster = plan.file.ray_address is not None
    probe_here = probe and not on_cluster
    work = remaining_work(plan.runs, runs_at_once(plan, jobs) if probe_here else 1, probe_here)
    _, disk_space = _disk_space(plan, jobs)
    texts: dict[str, object] = {
        "runs": f"{work.runs}, {work.done} finished",
        "rounds": f"{shown_count(work.rounds)} remaining",
        "disk": disk_space,
    }
    if probe and work.rounds:
        if work.seconds is not None:
            texts["time"] = f"about {shown_seconds(work.seconds)} on this machine (estimated)"
        else:
            texts["time"] = f"unknown ({'cluster nodes cannot be probed' if on_cluster else work.reason})"
    return texts | {"folder": plan.out}


def _disk_space(plan: Sweep, jobs: int | None) -> tuple[dict[str, int] | None, str]:
    """Estimate the disk space that a sweep needs.

    Returns:
        The bytes used at the peak (``most``) and at the end (``kept``), or None if a dataset is missing, so that model
        sizes are unknown; and a description for the screen.
    """
    from fedflat.experiment.campaign.disk_space import sweep_disk
    from fedflat.experiment.campaign.estimate import is_available
    from fedflat.experiment.campaign.sweep import runs_at_once

    configs = [run.config for run in plan.runs]
    missing = [config.data.dataset for config in configs if not is_available(config.data.dataset, config.data.dir)]
    if missing:
        return None, f"unknown ({min(missing)} is not downloaded)"
    space = sweep_disk(configs, plan.file.keep, runs_at_once(plan, jobs))
    text = f"up to {shown_bytes(space.most)}, excluding logs"
    if space.kept < space.most:
        text += f"; {shown_bytes(space.kept)} remain"
    return vars(space), text


def _print_plan(plan: Sweep, jobs: int | None, probe: bool, as_json: bool) -> None:
    """Print how much work a sweep is, and its runs with their state."""
    if as_json:
        runs = [
            {"name": run.name, "varied": run.varied, "done": run.done, "rounds_left": run.rounds_left}
            for run in plan.runs
        ]
        disk_bytes, _ = _disk_space(plan, jobs)
        print_json({"folder": plan.out, "runs": runs, "disk": disk_bytes})
        return
    console = screen()
    console.print(key_values(_describe_plan(plan, jobs, probe)))
    console.print()
    rows = []
    for run in plan.runs:
        rows.append([run.name, "finished" if run.done else f"{counted(run.rounds_left, 'round')} remaining"])
    console.print(table(("run", "state"), rows[:MAX_ROWS]))
    _print_omitted(len(rows))


def _print_omitted(rows: int) -> None:
    if rows > MAX_ROWS:
        screen().print(f"... and {rows - MAX_ROWS} more", style="dim")


def _ranked(results: list[SweepResult]) -> Ranking:
    """Rank the combinations of a sweep's varied settings."""
    from fedflat.experiment.campaign.ranking import ranking
    from fedflat.experiment.config import setting_names

    known = set(setting_names())
    varied_settings = [name for result in results for name in result.run.varied if name in known]

    def values_of(run: SweepRun) -> dict[str, Any]:
        """The varied settings of a run, including those at their default."""
        return {name: attrgetter(name)(run.config) for name in varied_settings} | run.varied

    return ranking((values_of(result.run), result.record) for result in results if result.record is not None)


def _document(plan: Sweep, results: list[SweepResult]) -> dict[str, Any]:
    """Return the results of a sweep as JSON-compatible values.

    ``lines`` has one entry per combination of varied settings, best first, with scores over seeds; ``runs`` has one
    entry per run, where ``by`` states who did it: this call, an earlier call, or another process.
    """
    from fedflat.experiment.campaign.ranking import last_score
    from fedflat.reporting.tables.summary import seed_statistics

    ranked = _ranked(results)
    lines = []
    for combination in ranked.combinations:
        line: dict[str, Any] = {
            "varied": combination.varied,
            "seeds": combination.seeds,
            "diverged": combination.diverged,
        }
        for split in SPLITS:
            scores = combination.scores(split)
            statistics = seed_statistics(scores) if scores else None
            line[split] = {"mean": statistics and statistics.mean, "std": statistics and statistics.std}
        lines.append(line)
    runs = []
    for result in results:
        run, record = result.run, result.record
        entry: dict[str, Any] = {"name": run.name, "folder": run.folder, "varied": run.varied, "by": result.by}
        if record is None:
            entry |= {"status": "failed", "reason": str(result.error or ""), "validation": None, "test": None}
        else:
            entry |= {"status": record.status, "reason": str(result.error or record.reason)}
            entry |= {"validation": last_score(record, "validation"), "test": last_score(record, "test")}
        runs.append(entry)
    return {"folder": plan.out, "metric": ranked.metric, "best_by": ranked.split, "lines": lines, "runs": runs}


ORIGINS = {"here": "done now", "before": "done earlier", "elsewhere": "done by another process"}
"""Text for the origin of a result (``SweepResult.by``): this call, an earlier one, or another process."""


def _print_results(plan: Sweep, results: list[SweepResult]) -> None:
    """Print the combinations of a sweep, best first, and how many runs were done now, before, or by another process."""
    from fedflat.cli.shared.several_runs import report_command
    from fedflat.reporting.tables.summary import seed_statistics

    ranked = _ranked(results)
    if ranked.split == "validation":
        order, splits = "best first by validation", SPLITS
    else:
        order = "best first on the test set, which is optimistic; set data.validation to rank on validation data"
        splits = ("test",)
    names = list(dict.fromkeys(name for combination in ranked.combinations for name in combination.varied))
    rows: list[list[object]] = []
    for combination in ranked.combinations[:MAX_ROWS]:
        scores = [
            seed_statistics(scores).shown(ranked.metric) if (scores := combination.scores(split)) else None
            for split in splits
        ]
        diverged = f" ({combination.diverged} diverged)" if combination.diverged else ""
        values = [combination.varied.get(name) for name in names]
        rows.append([*values, *scores, f"{combination.seeds}{diverged}"])
    subtitle = f"{with_unit(ranked.metric)} in the last evaluation, mean ± standard deviation over seeds; {order}"
    console = screen()
    console.print()
    console.print(subtitle, style="dim")
    console.print(table((*names, *splits, "seeds"), rows, numeric=(*splits, "seeds")))
    _print_omitted(len(ranked.combinations))
    console.print()
    origins = [result.by for result in results if result.error is None]
    counts = ", ".join(f"{origins.count(by)} {text}" for by, text in ORIGINS.items() if by in origins)
    report = report_command(plan.out, [run.config for run in plan.runs])
    next_commands = f"{report}, fedflat show {quote(str(plan.out))}"
    console.print(key_values({"runs": counts, "folder": plan.out, "next": next_commands}))
