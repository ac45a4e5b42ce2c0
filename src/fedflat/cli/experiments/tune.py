"""fedflat tune: search for settings, scored on a validation split."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli import Interrupted
from fedflat.cli.experiments.run import RUNS
from fedflat.cli.experiments.sweep import OUT
from fedflat.cli.shared.flags import DRY_RUN, JSON, QUIET, optional
from fedflat.cli.shared.screen import (
    counted,
    fetch_if_missing,
    key_values,
    print_json,
    print_section,
    screen,
    show_loading,
    shown_metric,
    with_unit,
)

if TYPE_CHECKING:
    from fedflat.experiment.campaign.tune import Search


def tune(
    file: Path = typer.Argument(
        metavar="FILE.yaml", help="YAML file with base settings and a tune section (space, trials)"
    ),
    out: Path | None = OUT,
    jobs: int | None = optional("--jobs", "concurrent trials", "as in the file, or 1", metavar="N", min=1),
    dry_run: bool = DRY_RUN,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Search for the settings with the best validation metric (Optuna); evaluate the best once on the test set.

    Repeat the command to continue; start it several times, or with --jobs, to search in parallel.

    Example: fedflat tune learning-rates.yaml --jobs 2
    """
    show_loading(quiet or as_json)
    from fedflat.experiment.campaign.sweep import slug
    from fedflat.experiment.campaign.sweep_file import read_sweep
    from fedflat.experiment.campaign.tune import check_folder, evaluate_best, plan_search

    search = plan_search(read_sweep(file), out or RUNS / slug(file), file)
    if dry_run:
        check_folder(search)
        _print_plan(search, as_json)
        return
    fetch_if_missing(search.example_config(), quiet or as_json)
    _run_trials(search, jobs, quiet or as_json)
    chosen = evaluate_best(search)
    if as_json:
        print_json({"folder": search.out, **chosen})
    else:
        _print_chosen(search, chosen)


def _run_trials(search: Search, jobs: int | None, silent: bool) -> None:
    """Run the missing trials; print one line per trial unless ``silent``."""
    from fedflat.experiment.campaign.tune import run_search_in_parallel

    def report(line: str) -> None:
        if not silent:
            print(line, file=sys.stderr, flush=True)

    def report_waiting(trials: int) -> None:
        report(f"waiting for {counted(trials, 'trial')} of another process")

    try:
        for trial in run_search_in_parallel(search, jobs, report_waiting):
            outcome = trial.state if trial.score is None else f"validation {trial.score:.4g}"
            report(f"{trial}: {trial.error or outcome}")
    except KeyboardInterrupt:
        raise Interrupted("repeat the command to continue") from None


def _print_plan(search: Search, as_json: bool) -> None:
    """Print the numbers of trials, runs and rounds, and the search space."""
    space = {}
    for name, values in search.space.items():
        space[name] = values if isinstance(values, list) else values.model_dump(exclude_defaults=True)
    runs = search.tune.trials * len(search.tune.seeds)
    plan = {
        "folder": search.out,
        "trials": search.tune.trials,
        "runs": runs,
        "rounds": runs * search.example_config().training.rounds,
        "space": space,
    }
    if as_json:
        print_json(plan)
    else:
        screen().print(key_values(plan))


def _print_chosen(search: Search, chosen: dict[str, Any]) -> None:
    """Print the best settings with their validation and test metric."""
    from fedflat.cli.shared.several_runs import assignments_text, report_command
    from fedflat.experiment.store.run_folder import RunFolder

    metric, config = chosen["metric"], quote(f"{chosen['folders'][0]}/config.yaml")
    plugins = "".join(f" --plugin {quote(path)}" for path in RunFolder(Path(chosen["folders"][0])).plugins())
    results = {
        f"validation {with_unit(metric)}": f"{shown_metric(chosen['validation'], metric)} (optimistic)",
        f"test {with_unit(metric)}": f"{shown_metric(fmean(chosen['test']), metric)} (evaluated once)",
        "trial": chosen["trial"],
        "folder": search.out,
        "next": report_command(search.out, search.extreme_configs()),
        "new seed": f"fedflat run --config {config} --seed {max(search.tune.seeds) + 1}{plugins}",
    }
    title = f"Best of {search.tune.trials} trials by {chosen['chosen_by']}: {assignments_text(chosen['settings'])}"
    print_section(title, key_values(results))
