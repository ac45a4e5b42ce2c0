"""fedflat reproduce: run a published table and compare cell by cell."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli import Interrupted
from fedflat.cli.experiments.compare import read_seeds
from fedflat.cli.experiments.run import RUNS
from fedflat.cli.shared.flags import DATA_DIR, DRY_RUN, JOBS, JSON, PROBE, QUIET, SEEDS, SET, no_default
from fedflat.cli.shared.screen import (
    counted,
    fetch_if_missing,
    key_values,
    print_json,
    screen,
    shown_count,
    shown_seconds,
    table,
)
from fedflat.errors import UserError, one_of
from fedflat.reporting.figures.files import write_figure
from fedflat.reporting.progress import progress
from fedflat.setting_names import full_name

if TYPE_CHECKING:
    from fedflat.experiment.campaign.estimate import RemainingWork
    from fedflat.experiment.config import Config
    from fedflat.papers import PaperTable
    from fedflat.papers.cost import GpuTime
    from fedflat.papers.outcome import CellOutcome, MeasuredRun
    from fedflat.papers.plan import Deviations, PlannedExperiment, ReproductionPlan

SCALES = ("paper", "small")
NO_DEVIATIONS = ("engine.", "data.dir", "init")
"""Prefixes of settings that do not change results, or whose change is recorded separately (init)."""
PLAN_SETTINGS = (
    "algorithm",
    "model",
    "data.dataset",
    "data.partition",
    "federation.clients_per_round",
    "training.local_epochs",
    "training.local_steps",
    "training.rounds",
)
"""Settings with a column of their own in the plan; others that affect training are shown if they differ."""
ON_GPU = "--probe --set engine.device=cuda --set engine.precision=bf16"
"""Options with which a machine with a GPU times a few steps of each kind of run, for runs that cannot be estimated."""
ASK_FROM = 3600.0
"""Estimated seconds above which a terminal asks for confirmation."""


def reproduce(
    name: str = typer.Argument(
        metavar="PAPER/TABLE", help="table, e.g. fedswa/table3 (list: fedflat papers); or a paper, or all"
    ),
    cells: list[str] = no_default(
        "--cells", "cell pattern, e.g. 'fedmoswa/*'; repeatable [dim](default: all)[/dim]", [], metavar="PATTERN"
    ),
    rounds: int | None = typer.Option(
        None, "--rounds", min=1, metavar="N", help="number of rounds; there is no verdict if it is not the paper's"
    ),
    seeds: str = SEEDS,
    scale: str = typer.Option(
        "paper", "--scale", metavar="SCALE", help="paper, or small (same structure in seconds, with stand-ins)"
    ),
    representative: bool = typer.Option(False, "--representative", help="only one representative cell"),
    out: Path | None = no_default("--out", "folder for the runs; finished ones are not repeated", metavar="FOLDER"),
    data_dir: Path | None = DATA_DIR,
    assignments: list[str] = SET,
    jobs: int | None = JOBS,
    dry_run: bool = DRY_RUN,
    probe: bool = PROBE,
    yes: bool = typer.Option(False, "--yes", help="start without confirmation"),
    markdown: Path | None = no_default("--markdown", "also write the result to this file", metavar="FILE.md"),
    as_csv: Path | None = no_default("--csv", "also write the result to this file", metavar="FILE.csv"),
    record: Path | None = no_default(
        "--record", "also store each run's result as a JSON file below this folder", metavar="FOLDER"
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Run the missing cells of a published table; show published, measured, difference and verdict.

    Example: fedflat reproduce fedswa/table3 --cells 'fedmoswa/*' --seeds 3
    """
    from fedflat.experiment.campaign.estimate import remaining_work
    from fedflat.experiment.store.files import require_folder
    from fedflat.papers.outcome import outcomes as outcomes_of
    from fedflat.papers.plan import make_plan

    tables, seed_list, silent = _find_tables(name), read_seeds(seeds), quiet or as_json
    if scale not in SCALES:
        raise one_of("scale", scale, SCALES)
    if cells and len(tables) > 1:
        raise UserError(f"--cells needs a single table, but '{name}' means {len(tables)}; e.g. {tables[0].full_name}")
    if cells and representative:
        raise UserError("--cells and --representative exclude each other; use one of them")
    for file in filter(None, (markdown, as_csv)):
        require_folder(file)
    deviations = _deviations(scale == "small", rounds, data_dir, assignments)
    root = out or RUNS / "reproduce" / _folder_name(deviations)

    def plan_tables() -> Iterator[tuple[ReproductionPlan, RemainingWork]]:
        """Plan one table after another: tables of a paper share runs, which may have finished meanwhile."""
        for each in tables:
            chosen_cells = each.choose([each.file.representative] if representative else cells)
            plan = make_plan(each, chosen_cells, seed_list, root / each.paper.name, deviations)
            if assignments:
                _check_names(plan)
            yield plan, remaining_work(plan.runs, probing=probe and not deviations.small)

    documents: list[dict[str, Any]] = []
    failure: UserError | None = None
    if dry_run:
        plans = []
        for plan, work in plan_tables():
            plans.append(plan)
            documents.append(_plan_document(plan, work))
            if not as_json:
                _print_plan(plan, work)
        if len(plans) > 1 and not as_json:
            _print_total(plans)
    else:
        all_outcomes: list[CellOutcome] = []
        for plan, work in plan_tables():
            if not silent:
                _print_work(plan, work, stderr=True)
                _confirm_if_long(plan, work, yes)
            measured, failure = _run(plan, jobs, silent, record)  # after a failure, finished runs are still shown
            outcomes = outcomes_of(plan, measured)
            all_outcomes += outcomes
            documents.append(_result_document(plan, work, outcomes, root / plan.table.paper.name))
            if not as_json:
                _print_outcomes(outcomes, documents[-1])
            if failure is not None:
                break
        _write_outcomes(markdown, as_csv, all_outcomes, deviations.small)
    if as_json:
        print_json(documents if len(tables) > 1 else documents[0])
    if failure is not None:
        raise failure


def _find_tables(name: str) -> list[PaperTable]:
    """Return the table ``PAPER/TABLE``, all tables of ``PAPER``, or every table for ``all``."""
    from fedflat.papers import Paper, find, papers

    if name.lower() == "all":
        return [table for paper in papers().values() for table in paper.tables.values()]
    paper_or_table = find(name)
    return list(paper_or_table.tables.values()) if isinstance(paper_or_table, Paper) else [paper_or_table]


def _confirm_if_long(plan: ReproductionPlan, work: RemainingWork, yes: bool) -> None:
    """On a terminal, ask for confirmation if rounds remain and their estimated time is long or unknown."""
    is_long = work.seconds is None or work.seconds > ASK_FROM
    if is_long and work.rounds and not yes and not plan.deviations.small and sys.stdin.isatty():
        typer.confirm("Start?", abort=True, err=True)


def _deviations(small: bool, rounds: int | None, data_dir: Path | None, assignments: Sequence[str]) -> Deviations:
    """Return how the runs deviate from the paper: small scale, rounds, dataset folder and --set assignments."""
    from fedflat.experiment.config import parse_config
    from fedflat.experiment.make_config import assign
    from fedflat.papers.plan import Deviations

    def apply_settings(paper_config: Config) -> Config:
        """Apply the --set assignments to the config of a run."""
        if not assignments:
            return paper_config
        values: dict[str, Any] = paper_config.model_dump(mode="json")
        for assignment in assignments:
            assign(values, assignment)
        return parse_config(values)

    parts = [assignment.partition("=") for assignment in assignments]
    settings = {full_name(name): value for name, _, value in parts}
    changed = tuple(f"{name}={value}" for name, value in settings.items() if not name.startswith(NO_DEVIATIONS))
    return Deviations(small, rounds, data_dir, apply_settings, changed, has_initial_weights="init" in settings)


def _check_names(plan: ReproductionPlan) -> None:
    """Raise a ``UserError`` if --set gave the runs an unknown dataset, model, partition or augmentation."""
    from fedflat.experiment.campaign.sweep import check_names

    configs = [run.config for run in (*plan.runs, *plan.skipped)]
    for names in {(each.model, each.data.dataset, each.data.partition, each.data.augmentation) for each in configs}:
        check_names(*names)


def _folder_name(deviations: Deviations) -> str:
    """Return a folder name for deviations from the paper, so that different settings never share runs."""
    name = "small" if deviations.small else "paper"
    if deviations.rounds:
        name += f"-{deviations.rounds}-rounds"
    if deviations.changed_settings:
        name += f"-{hashlib.sha256(repr(deviations.changed_settings).encode()).hexdigest()[:8]}"
    return name


def _run(
    plan: ReproductionPlan, jobs: int | None, silent: bool, results_folder: Path | None
) -> tuple[dict[Path, MeasuredRun], UserError | None]:
    """Execute unfinished runs and measure their models; store the results of all runs in ``results_folder``, if given.

    Returns:
        The results of all finished runs by folder, and the error of a run that failed, or None.
    """
    from fedflat.experiment.campaign.compare import run_each
    from fedflat.papers.outcome import MeasuredRun
    from fedflat.papers.post_hoc import measure
    from fedflat.papers.results import record_run, require_no_other_result

    if results_folder is not None:
        require_no_other_result(results_folder, plan)
    unfinished = [run for run in plan.runs if not run.done]
    if not plan.deviations.small:
        config_by_dataset = {run.config.data.dataset: run.config for run in unfinished}
        for config in config_by_dataset.values():
            fetch_if_missing(config, silent)
    measured: dict[Path, MeasuredRun] = {}
    runs = {run.folder: run for run in plan.runs}
    try:
        with progress(silent, len(plan.runs), len(plan.runs) - len(unfinished)) as display:
            for record in run_each([run.config for run in plan.runs], list(runs), (display,), jobs):
                assert record.folder is not None
                run = runs[record.folder.path]
                has_models = record.status != "diverged"
                model_statistics = measure(record, run.queries, plan.deviations.small) if has_models else {}
                measured[run.folder] = MeasuredRun.of(record, model_statistics)
                if results_folder is not None:
                    at_once = max(1, min(jobs or 1, len(unfinished)))
                    record_run(results_folder, plan, run, record, measured[run.folder], at_once, run in unfinished)
                display.count_run()
    except KeyboardInterrupt:
        finished = f"{len(measured)} of {len(plan.runs)} runs of {plan.table.full_name} finished"
        raise Interrupted(f"{finished}; repeat the command to continue") from None
    except UserError as error:
        if not measured:
            raise
        return measured, error
    return measured, None


def _stand_ins(plan: ReproductionPlan) -> list[str]:
    """Return the stand-ins of all runs: what replaces data or models of the paper, e.g. ``digits for cifar10``."""
    return sorted({text for run in plan.runs for text in run.stand_ins})


def _missing_datasets(runs: Iterable[PlannedExperiment]) -> list[str]:
    """Return the names of the datasets that unfinished runs need and that are not downloaded."""
    from fedflat.experiment.campaign.estimate import is_available
    from fedflat.text import parse

    data = [run.config.data for run in runs if not run.done]
    return list(dict.fromkeys(parse(each.dataset)[0].name for each in data if not is_available(each.dataset, each.dir)))


def _data_commands(runs: Iterable[PlannedExperiment]) -> str:
    """Return the commands that get the missing datasets of runs; empty if none is missing."""
    return "; ".join(f"fedflat data get {name}" for name in _missing_datasets(runs))


def _shown_gpu_time(time: GpuTime) -> str:
    """Return a text with an estimated time on the GPU that the stored results come from."""
    from fedflat.papers.cost import HARDWARE

    if not time.runs:
        return "unknown" if time.unknown else "none"
    rest = f", for {time.runs} of {counted(time.runs + time.unknown_runs, 'run')}" if time.unknown else ""
    bounded = f" ({', '.join(time.bounded)})" if time.bounded else ""
    return f"about {shown_seconds(time.seconds)} on one {HARDWARE} in bf16, from measured rounds{bounded}{rest}"


def _not_estimated(times: Sequence[GpuTime], remedy: str) -> dict[str, object]:
    """Return a line on the runs whose time on a GPU cannot be estimated, why, and a remedy; none if all can be."""
    count = sum(time.unknown_runs for time in times)
    unknown = dict.fromkeys(text for time in times for text in time.unknown)
    line = f"{counted(count, 'run')} (unknown: {', '.join(unknown)}); {remedy}"
    return {"not estimated": line} if count else {}


def _print_work(plan: ReproductionPlan, work: RemainingWork, stderr: bool = False) -> None:
    """Print the numbers of cells, runs and rounds, the estimated time, stand-ins and skipped cells."""
    from fedflat.papers.cost import gpu_time

    time, skipped_time = gpu_time(plan.runs), gpu_time(plan.skipped)
    lines: dict[str, object] = {
        "table": f"{plan.table.full_name}, {len(plan.cells)} of {len(plan.table.cells)} cells",
        "runs": f"{work.runs} with {counted(len(plan.seeds), 'seed')}, {work.done} finished",
        "rounds": f"{shown_count(work.rounds)} remaining",
    }
    if plan.runs and not plan.deviations.small:
        reason = f" ({work.reason})" if work.reason else ""
        estimate = f"about {shown_seconds(work.seconds)} (estimated)"
        lines["time on this machine"] = f"{'unknown' if work.seconds is None else estimate}{reason}"
        lines["time on a GPU"] = _shown_gpu_time(time)
        if commands := _data_commands(plan.runs):
            lines["data to get"] = commands
    if stand_ins := _stand_ins(plan):
        lines["stand-ins"] = "; ".join(stand_ins)
    if plan.not_runnable:
        cells_by_reason = Counter(plan.not_runnable.values())
        lines["skipped"] = "; ".join(f"{count} cells: {reason}" for reason, count in cells_by_reason.items())
    if plan.skipped:
        rounds = shown_count(sum(run.rounds_left for run in plan.skipped))
        needs = [f"{counted(len(plan.skipped), 'run')}, {rounds} rounds", f"time: {_shown_gpu_time(skipped_time)}"]
        if commands := _data_commands(plan.skipped):
            needs.append(f"data to get: {commands}")
        lines["skipped cells need"] = "; ".join(needs)
    if not plan.deviations.small:
        has_weights = not any(cell.weights for cell in plan.cells if cell.name in plan.not_runnable)
        options = f"{ON_GPU}{'' if has_weights else ' --set init=FILE'}"
        remedy = f"to time a few steps on a GPU, with the data, repeat this command with {options}"
        lines |= _not_estimated([time, skipped_time], remedy)
    screen(stderr).print(key_values(lines))


def _print_plan(plan: ReproductionPlan, work: RemainingWork) -> None:
    """Print the plan with one row per run of the first seed, and the settings in which these runs differ."""
    from fedflat.cli.lookup.settings import flat_settings
    from fedflat.reporting.row import assignments, differing_names

    _print_work(plan, work)
    configs = [run.config for run in plan.runs if run.config.seed == plan.seeds[0]]
    settings = [flat_settings(config) for config in configs]
    trained = [name for name in differing_names(settings) if not name.startswith("evaluation.")]
    differing = [name for name in trained if name not in PLAN_SETTINGS]
    rows = []
    for config, values in zip(configs, settings, strict=True):
        data, training, per_round = config.data, config.training, config.federation.clients_per_round
        epochs = f"{training.local_steps} steps" if training.local_steps else training.local_epochs
        row = [config.algorithm, config.model, data.dataset, data.partition, per_round, epochs, training.rounds]
        rows.append([*row, ", ".join(assignments({name: values[name] for name in differing}))])
    columns = ("algorithm", "model", "data", "partition", "per round", "epochs", "rounds", "settings")
    shown = columns if differing else columns[:-1]
    if rows:
        screen().print("", table(shown, [row[: len(shown)] for row in rows], numeric=columns[4:7]), "")


def _print_total(plans: Sequence[ReproductionPlan]) -> None:
    """Print the total work of several tables; tables of a paper share runs."""
    from fedflat.papers.cost import gpu_time

    runs = {run.folder: run for plan in plans for run in plan.runs}
    skipped = {run.folder: run for plan in plans for run in plan.skipped if run.folder not in runs}
    rounds = shown_count(sum(run.rounds_left for run in runs.values()))
    total: dict[str, object] = {"all tables": f"{len(runs)} distinct runs, {rounds} rounds remaining"}
    if not plans[0].deviations.small:
        time, skipped_time = gpu_time(runs.values()), gpu_time(skipped.values())
        total["time on a GPU"] = _shown_gpu_time(time)
        if skipped:
            count = counted(len(skipped), "further run")
            total["skipped cells need"] = f"{count}; time: {_shown_gpu_time(skipped_time)}"
        total |= _not_estimated([time, skipped_time], "the list of each table says how")
    screen().print(key_values(total))


def _plan_document(plan: ReproductionPlan, work: RemainingWork) -> dict[str, Any]:
    """Return the plan as JSON-compatible values."""
    from fedflat.papers.cost import gpu_time

    runs = [
        {"folder": run.folder, "done": run.done, "cells": run.cells, "config": run.config.model_dump(mode="json")}
        for run in plan.runs
    ]
    return {
        "table": plan.table.full_name,
        "runs": runs,
        "lacking": plan.not_runnable,
        "cost": vars(work),
        "gpu": vars(gpu_time(plan.runs)),
        "missing_data": _missing_datasets(plan.runs),
        "skipped": {
            "runs": len(plan.skipped),
            "rounds": sum(run.rounds_left for run in plan.skipped),
            "gpu": vars(gpu_time(plan.skipped)),
            "missing_data": _missing_datasets(plan.skipped),
        },
    }


def _write_chart(table: PaperTable, outcomes: Sequence[CellOutcome], folder: Path) -> Path | None:
    """Draw the measured numbers of a figure that consists of bars; return the path, or None for other figures."""
    from fedflat.papers.pictures import bar_chart

    if not table.file.bars or all(outcome.mean is None for outcome in outcomes):
        return None
    path = folder / f"{table.name}.png"
    write_figure(bar_chart(outcomes), path)
    return path


def _print_outcomes(outcomes: Sequence[CellOutcome], document: dict[str, Any]) -> None:
    """Print one row per cell, the rule for verdicts, how many cells have each verdict, and where the files are."""
    from rich.text import Text

    from fedflat.papers.document import OUTCOME_COLUMNS, outcome_row

    colours = {"within": "green", "above": "yellow", "below": "yellow", "diverged": "red", "censored": "yellow"}
    verdict_column = OUTCOME_COLUMNS.index("verdict")
    rows = []
    for texts in map(outcome_row, outcomes):
        verdict = texts[verdict_column]
        coloured = Text(verdict, style=colours.get(verdict, ""))
        rows.append([*texts[:verdict_column], coloured, *texts[verdict_column + 1 :]])
    console = screen()
    console.print("", table(OUTCOME_COLUMNS, rows, numeric=OUTCOME_COLUMNS[1:verdict_column]), "")
    console.print(document["rule"], style="dim")
    counts = Counter(outcome.verdict for outcome in outcomes)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"{document['table']}: {verdicts}", style="bold")
    files = {"runs": document["folder"], "chart": document["chart"]}
    console.print(key_values({name: path for name, path in files.items() if path is not None}))
    for command in document["pictures"]:
        console.print(f"picture: {command}", soft_wrap=True)


def _verdict_rule(plan: ReproductionPlan) -> str:
    """Return a sentence on how verdicts are reached, or why there are none."""
    if plan.deviations.small:
        stand_ins = "; ".join(_stand_ins(plan)) or "none"
        return f"Small scale checks the structure only; the numbers are meaningless. Stand-ins: {stand_ins}."
    sources = {source for cell in plan.cells for source in plan.table.sources(cell)}
    reasons = sorted({plan.deviations.reason_for_no_verdict(cell) for cell in sources} - {""})
    if reasons:
        return f"No verdict for cells that deviate from the paper: {'; '.join(reasons)}."
    return (
        "within: the published number lies in the 95 % prediction interval for one more run. "
        "The interval follows from the published ± or from our variation over seeds, whichever is larger."
    )


def _result_document(
    plan: ReproductionPlan, work: RemainingWork, outcomes: Sequence[CellOutcome], folder: Path
) -> dict[str, Any]:
    """Write the chart of a table, if it is one of bars, and return its outcome as JSON-compatible values."""
    from fedflat.papers.document import outcomes_document
    from fedflat.papers.pictures import picture_commands

    return {
        "table": plan.table.full_name,
        "folder": folder,
        "scale": "small" if plan.deviations.small else "paper",
        "stand_ins": _stand_ins(plan),
        "cost": vars(work),
        "rule": _verdict_rule(plan),
        "pictures": picture_commands(plan, folder),
        "chart": _write_chart(plan.table, outcomes, folder),
        "cells": outcomes_document(outcomes),
    }


def _write_outcomes(
    markdown_file: Path | None, csv_file: Path | None, outcomes: Sequence[CellOutcome], small: bool
) -> None:
    """Write the outcomes of all tables as Markdown and CSV, if requested."""
    from fedflat.experiment.store.files import write_atomically
    from fedflat.papers.document import OUTCOME_COLUMNS, SMALL_COLUMNS, markdown, outcome_row, small_rows
    from fedflat.reporting.tables.files import csv_text

    columns = SMALL_COLUMNS if small else OUTCOME_COLUMNS
    values = small_rows(outcomes) if small else [outcome_row(outcome) for outcome in outcomes]
    columns = ("table", *columns)
    rows = [[outcome.cell.table, *outcome_values] for outcome, outcome_values in zip(outcomes, values, strict=True)]
    if markdown_file is not None:
        write_atomically(markdown_file, markdown(columns, rows) + "\n")
    if csv_file is not None:
        write_atomically(csv_file, csv_text([columns, *rows]))
