"""fedflat reproduce: run a published table and compare cell by cell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.experiments.compare import read_seeds
from fedflat.cli.experiments.run import RUNS
from fedflat.cli.shared.downloads import fetch_if_missing
from fedflat.cli.shared.error_reporting import Interrupted
from fedflat.cli.shared.flags import JSON, QUIET, SET
from fedflat.cli.shared.progress import progress
from fedflat.cli.shared.screen import facts, print_json, screen, shown_count, shown_seconds, table
from fedflat.errors import UserError, one_of

if TYPE_CHECKING:
    from fedflat.experiment.campaign.estimate import RemainingWork
    from fedflat.experiment.config import Config
    from fedflat.papers import PaperTable
    from fedflat.papers.outcome import CellOutcome, MeasuredRun
    from fedflat.papers.plan import ReproductionPlan, ReproductionScale

SCALES = ("paper", "small")
HARMLESS = ("engine.", "data.dir", "init")
"""Settings that do not affect results, and initial weights."""
ASK_FROM = 3600.0
"""Estimated seconds above which a terminal asks for confirmation."""


def reproduce(
    name: str = typer.Argument(
        metavar="PAPER/TABLE",
        help="table, e.g. fedswa/table3 (list: fedflat papers); or a paper, or all",
    ),
    cells: list[str] = typer.Option(
        [],
        "--cells",
        metavar="PATTERN",
        help="cell pattern, e.g. 'fedmoswa/*'; repeatable [dim](default: all)[/dim]",
        show_default=False,
    ),
    rounds: int | None = typer.Option(
        None, "--rounds", min=1, metavar="N", help="number of rounds; fewer than the paper gives no verdict"
    ),
    seeds: str = typer.Option("3", "--seeds", metavar="SEEDS", help="number of seeds (3) or a list (0,1,2)"),
    scale: str = typer.Option(
        "paper", "--scale", metavar="SCALE", help="paper, or small (same structure in seconds, with substitutes)"
    ),
    representative: bool = typer.Option(False, "--representative", help="only one representative cell"),
    out: Path | None = typer.Option(
        None, "--out", metavar="FOLDER", help="folder for the runs; finished ones are not repeated"
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", metavar="FOLDER", help="where the datasets lie"),
    assignments: list[str] = SET,
    jobs: int | None = typer.Option(None, "--jobs", min=1, metavar="N", help="runs at the same time"),
    dry_run: bool = typer.Option(False, "--dry-run", help="show the plan and its cost, then stop"),
    probe: bool = typer.Option(True, "--probe/--no-probe", help="measure a few local steps to estimate the duration"),
    yes: bool = typer.Option(False, "--yes", help="start without confirmation"),
    markdown: Path | None = typer.Option(
        None, "--markdown", metavar="FILE.md", help="also write the result to this file"
    ),
    as_csv: Path | None = typer.Option(None, "--csv", metavar="FILE.csv", help="also write the result to this file"),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Run the missing cells of a published table; show published, measured, difference and verdict.

    Example: fedflat reproduce fedswa/table3 --cells 'fedmoswa/*' --seeds 3
    """
    found, chosen = _tables(name), read_seeds(seeds)
    if scale not in SCALES:
        raise one_of("scale", scale, SCALES)
    if cells and len(found) > 1:
        raise UserError(f"--cells needs a single table, but '{name}' means {len(found)}; e.g. {found[0].full_name}")
    for file in filter(None, (markdown, as_csv)):
        if not file.absolute().parent.is_dir():
            raise UserError(f"{file} cannot be written: folder {file.parent} does not exist")
    wanted = _scale(scale, rounds, data_dir, assignments)
    documents: list[dict[str, Any]] = []
    result: list[CellOutcome] = []
    failed: UserError | None = None
    for one in found:
        folder = (out or RUNS / "reproduce" / _variant(wanted)) / one.paper.name
        plan = _plan(one, [one.file.small] if representative else cells, chosen, folder, wanted)
        cost = _cost(plan, probe)
        if dry_run:
            documents.append(_show_plan(plan, cost, as_json))
            continue
        _before(plan, cost, quiet or as_json, yes)
        measured, failed = _run(plan, folder, jobs, quiet or as_json)
        outcomes = _outcomes(plan, measured)
        result += outcomes
        documents.append(_document(plan, cost, outcomes, folder))
        if not as_json:
            _print_result(plan, outcomes, folder)
        if failed is not None:
            break
    if not dry_run:
        _write(markdown, as_csv, result, wanted.small)
    if as_json:
        print_json(documents if len(found) > 1 else documents[0])
    if failed is not None:
        raise failed


def _tables(name: str) -> list[PaperTable]:
    """The named table, all tables of a paper, or all tables."""
    from fedflat.papers import Paper, find, papers

    if name.lower() == "all":
        return [table for paper in papers().values() for table in paper.tables.values()]
    found = find(name)
    return list(found.tables.values()) if isinstance(found, Paper) else [found]


def _plan(
    found: PaperTable, cells: Sequence[str], seeds: Sequence[int], folder: Path, scale: ReproductionScale
) -> ReproductionPlan:
    from fedflat.papers.plan import make_plan

    return make_plan(found, found.choose(list(cells)), seeds, folder, scale)


def _cost(plan: ReproductionPlan, probing: bool) -> RemainingWork:
    from fedflat.experiment.campaign.estimate import remaining_work

    return remaining_work(plan.runs, probing=probing and not plan.scale.small)


def _outcomes(plan: ReproductionPlan, measured: dict[Path, MeasuredRun]) -> list[CellOutcome]:
    from fedflat.papers.outcome import outcomes

    return outcomes(plan, measured)


def _before(plan: ReproductionPlan, cost: RemainingWork, silent: bool, yes: bool) -> None:
    """Show the plan, and ask for confirmation if it is long."""
    if silent:
        return
    _print_cost(plan, cost, stderr=True)
    long = cost.seconds is None or cost.seconds > ASK_FROM
    if long and not yes and not plan.scale.small and cost.rounds and sys.stdin.isatty():
        typer.confirm("Start?", abort=True, err=True)


def _scale(scale: str, rounds: int | None, folder: Path | None, assignments: Sequence[str]) -> ReproductionScale:
    from fedflat.experiment.config import assign, config
    from fedflat.papers.plan import ReproductionScale

    def change(one: Config) -> Config:
        if not assignments:
            return one
        values: dict[str, Any] = one.model_dump(mode="json")
        for assignment in assignments:
            assign(values, assignment)
        return config(values)

    changed = tuple(text for text in assignments if not text.startswith(HARMLESS))
    brought = any(text.startswith("init=") for text in assignments)
    return ReproductionScale(scale == "small", rounds, folder, change, changed, brought)


def _variant(scale: ReproductionScale) -> str:
    """A folder name for deviations from the paper, so that different settings never share runs."""
    import hashlib

    kind = "small" if scale.small else "paper"
    rounds = f"-{scale.rounds}-rounds" if scale.rounds else ""
    other = f"-{hashlib.sha256(repr(scale.changed).encode()).hexdigest()[:8]}" if scale.changed else ""
    return kind + rounds + other


def _run(
    plan: ReproductionPlan, out: Path, jobs: int | None, silent: bool
) -> tuple[dict[Path, MeasuredRun], UserError | None]:
    """Results of all runs, and the error that ended them early, if any."""
    from fedflat.experiment.campaign.compare import run_each
    from fedflat.papers.outcome import MeasuredRun
    from fedflat.papers.post_hoc import measure

    if not plan.scale.small:
        for data in {run.config.data.dataset: run.config for run in plan.runs if not run.done}.values():
            fetch_if_missing(data, silent)
    measured: dict[Path, MeasuredRun] = {}
    runs = {run.folder: run for run in plan.runs}
    try:
        with progress(silent, len(plan.runs)) as shown:
            records = run_each([run.config for run in plan.runs], [run.folder for run in plan.runs], (shown,), jobs)
            for record in records:
                assert record.folder is not None
                run = runs[record.folder.path]
                models = measure(record, run.queries, plan.scale.small) if record.status != "diverged" else {}
                measured[run.folder] = MeasuredRun.of(record, models)
                shown.run_over()
    except KeyboardInterrupt:
        raise Interrupted(
            f"{len(measured)} of {len(plan.runs)} runs finished; repeat the command with --out {out} to continue"
        ) from None
    except UserError as mistake:
        if not measured:
            raise
        return measured, mistake
    return measured, None


def _print_cost(plan: ReproductionPlan, cost: RemainingWork, stderr: bool = False) -> None:
    time = "unknown" if cost.seconds is None else f"about {shown_seconds(cost.seconds)} on this machine (estimated)"
    why = f" ({cost.reason})" if cost.reason else ""
    lines: dict[str, object] = {
        "table": f"{plan.table.full_name}, {len(plan.cells)} of {len(plan.table.cells)} cells",
        "runs": f"{cost.runs} with {len(plan.seeds)} seed{'s' * (len(plan.seeds) != 1)}, {cost.done} finished",
        "rounds": f"{shown_count(cost.rounds)} remaining",
    }
    if not plan.scale.small:
        lines["time"] = time + why
    instead = sorted({text for run in plan.runs for text in run.stand_ins})
    if instead:
        lines["stand-ins"] = "; ".join(instead)
    reasons = list(plan.lacking.values())
    if reasons:
        lines["skipped"] = "; ".join(f"{reasons.count(reason)} cells: {reason}" for reason in dict.fromkeys(reasons))
    screen(stderr).print(facts(lines))


def _show_plan(plan: ReproductionPlan, cost: RemainingWork, as_json: bool) -> dict[str, Any]:
    """Print the plan, as JSON or on the screen."""
    if not as_json:
        _print_cost(plan, cost)
        first = [run.config for run in plan.runs if run.config.seed == plan.seeds[0]]
        rows = [
            [c.algorithm, c.model, c.data.dataset, c.data.partition, c.federation.clients_per_round, c.training.rounds]
            for c in first
        ]
        screen().print()
        screen().print(
            table(
                ("algorithm", "model", "data", "partition", "per round", "rounds"),
                rows,
                numbers=("per round", "rounds"),
            )
        )
        return {}
    runs = [
        {"folder": run.folder, "done": run.done, "cells": run.cells, "config": run.config.model_dump(mode="json")}
        for run in plan.runs
    ]
    return {"table": plan.table.full_name, "runs": runs, "lacking": plan.lacking, "cost": vars(cost)}


def _print_result(plan: ReproductionPlan, result: Sequence[CellOutcome], out: Path) -> None:
    from rich.text import Text

    from fedflat.papers.document import OUTCOME, outcome_rows
    from fedflat.papers.outcome import picture_command

    colours = {"within": "green", "above": "yellow", "below": "yellow", "diverged": "red", "censored": "yellow"}
    rows: list[list[object]] = []
    for line in outcome_rows(result):
        rows.append([*line[:6], Text(line[6], style=colours.get(line[6], "")), line[7]])
    console = screen()
    console.print()
    console.print(table(OUTCOME, rows, numbers=OUTCOME[1:6]))
    console.print()
    console.print(_rule(plan), style="dim")
    counts = {
        verdict: sum(one.verdict == verdict for one in result)
        for verdict in dict.fromkeys(one.verdict for one in result)
    }
    console.print(
        f"{plan.table.full_name}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}", style="bold"
    )
    picture = picture_command(plan, out)
    console.print(facts({"runs": out, **({"picture": picture} if picture else {})}))


def _rule(plan: ReproductionPlan) -> str:
    if plan.scale.small:
        instead = sorted({text for run in plan.runs for text in run.stand_ins})
        substitutes = "; ".join(instead) or "none"
        return f"Small scale checks the structure only; the numbers are meaningless. Substitutes: {substitutes}."
    if any(plan.scale.obstacle(cell) == "other settings" for cell in plan.cells):
        return f"No verdict for cells affected by changed settings ({', '.join(plan.scale.changed)})."
    if plan.scale.rounds is not None:
        return f"No verdict for cells with more than {plan.scale.rounds} published rounds."
    return (
        "within: the published number lies in the 95 % prediction interval of one more run, "
        "from its ± or the seed variation, whichever is larger."
    )


def _document(
    plan: ReproductionPlan, cost: RemainingWork, result: Sequence[CellOutcome], folder: Path
) -> dict[str, Any]:
    from fedflat.papers.document import outcomes_document
    from fedflat.papers.outcome import picture_command

    return {
        "table": plan.table.full_name,
        "folder": folder,
        "scale": "small" if plan.scale.small else "paper",
        "stand_ins": sorted({text for run in plan.runs for text in run.stand_ins}),
        "cost": vars(cost),
        "rule": _rule(plan),
        "picture": picture_command(plan, folder),
        "cells": outcomes_document(result),
    }


def _write(markdown_file: Path | None, csv_file: Path | None, result: Sequence[CellOutcome], small: bool) -> None:
    from fedflat.experiment.store.files import write_whole
    from fedflat.papers.document import OUTCOME, SMALL, comma_separated, markdown, outcome_rows, small_rows

    heads, lines = (SMALL, small_rows(result)) if small else (OUTCOME, outcome_rows(result))
    heads = ("table", *heads)
    rows = [[one.cell.table, *line] for one, line in zip(result, lines, strict=True)]
    if markdown_file is not None:
        write_whole(markdown_file, markdown(heads, rows) + "\n")
    if csv_file is not None:
        write_whole(csv_file, comma_separated(heads, rows))
