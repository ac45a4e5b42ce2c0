"""fedflat compare: several algorithms and seeds on the same data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.experiments.run import RUNS, data_slug, trackers
from fedflat.cli.shared.downloads import fetch_if_missing
from fedflat.cli.shared.error_reporting import Interrupted
from fedflat.cli.shared.flags import CONFIG, JSON, QUIET, SET, TRACK, algorithm_names, optional, with_settings
from fedflat.cli.shared.one_run import check_figure, write_figure
from fedflat.cli.shared.progress import progress
from fedflat.cli.shared.screen import facts, print_json, screen
from fedflat.cli.shared.several_runs import comparison_document, print_comparison
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.experiment.config import Config


@with_settings("seed")
def compare(
    settings: dict[str, Any],
    algorithms: list[str] = typer.Argument(
        help="two or more algorithms, e.g. fedavg fedsam fedmoswa+wima",
        metavar="ALGORITHM",
        autocompletion=algorithm_names,
    ),
    seeds: str = typer.Option("3", "--seeds", metavar="SEEDS", help="number of seeds (3) or a list (0,1,2)"),
    target: list[float] = typer.Option(
        [],
        "--target",
        metavar="VALUE",
        help="also report rounds to this accuracy; repeatable",
        show_default=False,
    ),
    config: Path | None = CONFIG,
    assignments: list[str] = SET,
    out: Path | None = optional(
        "--out",
        "folder for the runs; finished ones are not repeated",
        "a folder in runs/ that depends on the settings",
        metavar="FOLDER",
    ),
    figure: Path | None = optional(
        "--figure", "figure file", "comparison.png in the output folder", metavar="FILE.png"
    ),
    over: str = typer.Option(
        "round",
        "--over",
        metavar="AXIS",
        help="x axis of the curves: round, bytes_up, backward_passes or samples",
    ),
    jobs: int | None = optional(
        "--jobs",
        "concurrent runs, one process each",
        "one per core for small runs",
        metavar="N",
        min=1,
    ),
    track: str | None = TRACK,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Compare algorithms on the same partitions, cohorts and batches over several seeds.

    Example: fedflat compare fedavg fedsam fedmoswa --rounds 50 --target 0.9
    """
    from fedflat.api import make_config
    from fedflat.experiment.campaign.compare import SomeFailed
    from fedflat.experiment.campaign.compare import compare as records_of
    from fedflat.experiment.setup.problem import device_of
    from fedflat.experiment.stopping import check_target
    from fedflat.reporting.result import Comparison

    for value in target:
        check_target(value, "accuracy")  # every metric available on the command line is a fraction
    base, chosen = make_config(config, settings, assignments), read_seeds(seeds)
    _check_axis(over)
    if figure is not None:
        check_figure(figure)
    out = default_folder(base) if out is None else out
    device_of(base)  # fail before a download
    fetch_if_missing(base, quiet or as_json)
    followed = trackers(track)
    records, runs = [], len(algorithms) * len(chosen)
    failed: SomeFailed | None = None
    try:
        with progress(quiet or as_json, runs) as shown:
            for record in records_of(base, algorithms, chosen, out, (shown, *followed), jobs):
                records.append(record)
                shown.run_over()
    except KeyboardInterrupt:
        raise Interrupted(
            f"{len(records)} of {runs} runs finished; repeat the command with --out {out} to continue"
        ) from None
    except SomeFailed as some:
        failed = some
        if not records:
            raise
    comparison = Comparison(records)
    figure = out / "comparison.png" if figure is None else figure
    write_figure(comparison.plot(over=over), figure)
    if as_json:
        print_json({"folder": out, "figure": figure, **comparison_document(comparison, target)})
    else:
        print_comparison(comparison, target)
        screen().print()
        screen().print(facts({"runs": out, "figure": figure}))
    if failed is not None:
        raise failed


def read_seeds(text: str) -> list[int]:
    """Parse seeds: ``3`` means 0, 1, 2; ``4,7`` lists them.

    >>> read_seeds("3"), read_seeds("4,7"), read_seeds("5,")
    ([0, 1, 2], [4, 7], [5])
    """
    try:
        seeds = [int(word) for word in text.split(",") if word.strip()] if "," in text else list(range(int(text)))
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"cannot read --seeds '{text}'; expected a number of seeds (3) or distinct seeds (0,1,2)")
    return seeds


def default_folder(base: Config) -> Path:
    """A folder determined by the settings, so that a repeated command continues."""
    settings = base.model_copy(update={"algorithm": "", "seed": 0}).model_dump_json()
    return RUNS / f"compare-{data_slug(base)}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


def _check_axis(over: str) -> None:
    from fedflat.errors import one_of
    from fedflat.reporting.figures.curves import AXES

    if over not in AXES:
        raise one_of("axis", over, AXES)
