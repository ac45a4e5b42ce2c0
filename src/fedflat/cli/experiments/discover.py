"""fedflat discover: search the space of algorithms, and confirm the winner on unseen seeds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli import Interrupted
from fedflat.cli.experiments.run import RUNS
from fedflat.cli.experiments.sweep import FILE_JOBS, OUT
from fedflat.cli.shared.flags import DRY_RUN, JSON, QUIET, optional
from fedflat.cli.shared.screen import counted, fetch_if_missing, key_values, print_json, print_section, screen, table

if TYPE_CHECKING:
    from fedflat.experiment.campaign.discover import Discovery


def discover(
    file: Path = typer.Argument(metavar="SPACE.yaml", help="YAML file with slots, parameters and baselines"),
    out: Path | None = OUT,
    minutes: float | None = optional(
        "--minutes", "time limit of the searches, without the confirmation", "as in the file", metavar="M", min=0.01
    ),
    jobs: int | None = FILE_JOBS,
    dry_run: bool = DRY_RUN,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Search the space of algorithms on validation data; confirm the winner against tuned baselines on unseen seeds.

    Repeat the command to continue, with more --minutes to extend the search.

    Example: fedflat discover examples/discover-digits.yaml --minutes 5 --jobs 2
    """
    from fedflat.experiment.campaign.discover import SEARCH, check_setup, confirm, finalists, plan_discovery, problems
    from fedflat.experiment.campaign.space_file import read_space
    from fedflat.experiment.campaign.sweep import slug
    from fedflat.experiment.campaign.tune import check_folder
    from fedflat.reporting.discovery import discovery_document, write_report

    discovery = plan_discovery(read_space(file), out or RUNS / slug(file))
    silent = quiet or as_json
    for search in discovery.searches.values():
        check_folder(search)
    if dry_run:
        _print_plan(discovery, minutes, as_json)
        return
    for changes in problems(discovery).values():
        fetch_if_missing(discovery.searches[SEARCH].changed(changes).example_config(), silent)
    check_setup(discovery)
    try:
        _search(discovery, minutes, jobs, silent)
        best = finalists(discovery)
        runs = []
        for problem, finalist, record in confirm(discovery, best, jobs):
            runs.append((problem, finalist, record))
            if not silent:
                name = "winner" if finalist.label == SEARCH else finalist.label
                where = "" if problem == SEARCH else f" on {problem}"
                print(f"confirmed {name}{where}, seed {record.config.seed}: {record.status}", file=sys.stderr)
    except KeyboardInterrupt:
        raise Interrupted("repeat the command to continue") from None
    document = discovery_document(discovery, best, runs)
    write_report(document, discovery.out)
    if as_json:
        print_json(document)
    else:
        _print_report(discovery, document)


def _search(discovery: Discovery, minutes: float | None, jobs: int | None, silent: bool) -> None:
    """Evaluate the missing candidates; print one line per candidate unless ``silent``."""
    from fedflat.experiment.campaign.discover import run_searches

    for name, trial in run_searches(discovery, minutes, jobs):
        if not silent:
            outcome = trial.state if trial.score is None else f"validation {trial.score:.4g}"
            print(f"{name}, {trial}: {trial.error or outcome}", file=sys.stderr, flush=True)


def _print_plan(discovery: Discovery, minutes: float | None, as_json: bool) -> None:
    """Print the size of the space, the rungs, the time limit, and the numbers of candidates and runs."""
    from fedflat.experiment.campaign.discover import problems

    file = discovery.file
    plan = {
        "folder": discovery.out,
        "combinations": discovery.combinations,
        "excluded": discovery.excluded,
        "searches": list(discovery.searches) if as_json else ", ".join(discovery.searches),
        "candidates of each search": file.candidates,
        "rungs": discovery.rungs if as_json else ", ".join(map(str, discovery.rungs)),
        "minutes": minutes or file.minutes,
        "confirmation runs without ablation": len(file.confirm.seeds)
        * len(problems(discovery))
        * len(discovery.searches),
    }
    if as_json:
        print_json(plan)
    else:
        screen().print(key_values(plan))


def _print_report(discovery: Discovery, document: dict[str, Any]) -> None:
    """Print the winner, the finalists and the differences, each with its caption."""
    from fedflat.reporting.discovery import report_tables, selection_text

    for shown in report_tables(document).values():
        heads = list(shown.heads.values())
        print_section(shown.full_caption, table(heads, shown.rows, heads[1:]))
    results = {
        "verdict": document["verdict"],
        "selection": selection_text(document),
        "report": discovery.out / "discover.md",
    }
    print_section(f"Best of {counted(len(document['candidates']['search']), 'candidate')}", key_values(results))
    command = f"\n{document['finalists'][0]['command']}"  # outside the table, which would break its lines
    screen().print(command, soft_wrap=True)
