"""fedflat tune: search for settings, scored on a validation split."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.experiments.run import RUNS
from fedflat.cli.experiments.sweep import DRY_RUN, OUT
from fedflat.cli.shared.downloads import fetch_if_missing
from fedflat.cli.shared.error_reporting import Interrupted
from fedflat.cli.shared.flags import JSON, QUIET, optional
from fedflat.cli.shared.screen import facts, print_json, screen, shown_metric, with_unit
from fedflat.text import write_value

if TYPE_CHECKING:
    from fedflat.experiment.campaign.tune import Search


JOBS = optional("--jobs", "trials at the same time", "what the file says, or 1", metavar="N", min=1)


def tune(
    file: Path = typer.Argument(
        metavar="FILE.yaml", help="YAML file with base settings and a tune section (space, trials)"
    ),
    out: Path | None = OUT,
    jobs: int | None = JOBS,
    dry_run: bool = DRY_RUN,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Search for the settings with the best validation metric (Optuna); evaluate the best once on the test set.

    Repeat the command to continue; start it several times, or with --jobs, to search in parallel.

    Example: fedflat tune learning-rates.yaml --jobs 2
    """
    from fedflat.experiment.campaign.sweep import slug
    from fedflat.experiment.campaign.sweep_file import read_sweep
    from fedflat.experiment.campaign.tune import check_folder, choose, plan_search

    search = plan_search(read_sweep(file), out or RUNS / slug(file))
    if dry_run:
        check_folder(search)
        _show(search, as_json)
        return
    fetch_if_missing(search.config(_first(search), search.tune.seeds[0]), quiet or as_json)
    _run(search, jobs, quiet or as_json)
    chosen = choose(search)
    if as_json:
        print_json({"folder": search.out, **chosen})
    else:
        _print(search, chosen)


def _first(search: Search) -> dict[str, Any]:
    from fedflat.experiment.campaign.tune import corners

    return next(corners(search.space))


def _run(search: Search, jobs: int | None, silent: bool) -> None:
    from fedflat.experiment.campaign.tune import run_search_side_by_side

    def waiting(trials: int) -> None:
        if not silent:
            print(
                f"waiting for {trials} trial{'s' * (trials != 1)} of another process",
                file=sys.stderr,
                flush=True,
            )

    try:
        for tried in run_search_side_by_side(search, jobs, waiting):
            if not silent:
                came = tried.error or (tried.state if tried.score is None else f"validation {tried.score:.4g}")
                print(f"{tried}: {came}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise Interrupted("repeat the command to continue") from None


def _show(search: Search, as_json: bool) -> None:
    tune, rounds = search.tune, search.config(_first(search), search.tune.seeds[0]).training.rounds
    lines = {
        "folder": search.out,
        "trials": tune.trials,
        "runs": tune.trials * len(tune.seeds),
        "rounds": tune.trials * len(tune.seeds) * rounds,
        "space": {
            name: values if isinstance(values, list) else values.model_dump(exclude_defaults=True)
            for name, values in search.space.items()
        },
    }
    print_json(lines) if as_json else screen().print(facts(lines))


def _print(search: Search, chosen: dict[str, Any]) -> None:
    metric, test = chosen["metric"], chosen["test"]
    console = screen()
    console.print()
    settings = ", ".join(f"{name}={write_value(value)}" for name, value in chosen["settings"].items())
    console.print(f"Best of {search.tune.trials} trials by {chosen['chosen_by']}: {settings}", style="bold")
    console.print(
        facts(
            {
                f"validation {with_unit(metric)}": f"{shown_metric(chosen['validation'], metric)} (optimistic)",
                f"test {with_unit(metric)}": f"{shown_metric(fmean(test), metric)} (evaluated once)",
                "trial": chosen["trial"],
                "folder": search.out,
                "next": f"fedflat report {search.out}",
            }
        )
    )
