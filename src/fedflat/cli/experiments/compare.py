"""fedflat compare: several algorithms and seeds on the same data."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli import Interrupted
from fedflat.cli.experiments.run import RUNS, data_slug, tracking_callbacks
from fedflat.cli.shared.completion import complete_algorithm
from fedflat.cli.shared.flags import CONFIG, JOBS, JSON, QUIET, SEEDS, SET, TARGETS, TRACK, optional, with_settings
from fedflat.cli.shared.screen import (
    counted,
    fetch_if_missing,
    key_values,
    print_json,
    print_precision,
    screen,
    show_loading,
)
from fedflat.errors import SomeFailed, UserError, one_of
from fedflat.reporting.figures.files import check_figure, write_figure
from fedflat.reporting.progress import progress

if TYPE_CHECKING:
    from fedflat.experiment.config import Config

MAX_SEEDS = 10_000


@with_settings("seed")
def compare(
    settings: dict[str, Any],  # values of the flags that with_settings adds, such as --rounds
    algorithms: list[str] = typer.Argument(
        help="algorithms to compare, e.g. fedavg fedsam fedmoswa+wima",
        metavar="ALGORITHM...",
        autocompletion=complete_algorithm,
    ),
    seeds: str = SEEDS,
    target: list[float] = TARGETS,
    config: Path | None = CONFIG,
    assignments: list[str] = SET,
    out: Path | None = optional(
        "--out",
        "folder for the runs; finished ones are not repeated",
        "a folder in runs/ that depends on the settings",
        metavar="FOLDER",
    ),
    figure: Path | None = optional(
        "--figure",
        "figure file, with this command's runs",
        "comparison.png in the output folder, with all finished runs there that have the same settings",
        metavar="FILE.png",
    ),
    over: str = typer.Option(
        "round",
        "--over",
        metavar="AXIS",
        help="x axis of the curves: round, bytes_up, bytes_down, backward_passes, samples, virtual_seconds",
    ),
    jobs: int | None = JOBS,
    track: str | None = TRACK,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Compare algorithms on the same partitions, cohorts and batches over several seeds.

    Example: fedflat compare fedavg fedsam fedmoswa --rounds 50 --target 0.9
    """
    show_loading(quiet or as_json)
    from fedflat.cli.shared.several_runs import comparison_document, print_comparison
    from fedflat.experiment.campaign.compare import compare as run_comparison
    from fedflat.experiment.campaign.compare import finished_records, finished_runs, reject_varied_settings
    from fedflat.experiment.make_config import make_config
    from fedflat.experiment.setup.problem import device_of, task_of
    from fedflat.experiment.stopping import check_target
    from fedflat.reporting.comparison import Comparison
    from fedflat.reporting.distinct import drop_repeated
    from fedflat.reporting.figures.curves import AXES, mark_targets

    # Check everything first: downloads and runs take a long time.
    names = [assignment.partition("=")[0] for assignment in assignments]
    remedies = {"seed": "list seeds (--seeds 5,7 or, for one seed, --seeds 5,)", "algorithm": "name it as an argument"}
    reject_varied_settings(names, remedies)
    base, seed_list = make_config(config, settings, assignments), read_seeds(seeds)
    if over not in AXES:
        raise one_of("axis", over, AXES)
    if figure is not None:
        check_figure(figure)
    device_of(base)  # raises an error if the device is unavailable
    silent, out = quiet or as_json, out or default_folder(base)
    if len(algorithms) == 1 and len(seed_list) == 1:
        warnings.warn("one run is not a comparison; add algorithms or seeds, or use fedflat run", stacklevel=2)
    print_precision(base, silent)
    fetch_if_missing(base, silent)
    metric = task_of(base).metric if target else ""
    for value in target:
        check_target(value, metric)
    tracking = tracking_callbacks(track)
    records, total_runs = [], len(algorithms) * len(seed_list)
    already_finished = finished_runs(out, algorithms, seed_list)
    failure: SomeFailed | None = None
    try:
        with progress(silent, total_runs, already_finished) as display:
            for record in run_comparison(base, algorithms, seed_list, out, (display, *tracking), jobs):
                records.append(record)
                display.count_run()
    except KeyboardInterrupt:
        # Runs finish in any order, so more may have finished than records have arrived.
        finished = finished_runs(out, algorithms, seed_list)
        raise Interrupted(
            f"{finished} of {total_runs} runs finished; repeat the command with --out {quote(str(out))} to continue: "
            "interrupted runs continue from their last checkpoint"
        ) from None
    except SomeFailed as error:
        if not records:
            raise
        failure = error  # raised after the results of the other runs are printed
    comparison = Comparison(records)
    earlier = [] if figure else finished_records(out, base)
    drawn = drop_repeated([*records, *earlier])[0]  # paused runs are only in records
    plot = Comparison(drawn).plot(over=over)
    figure = figure or out / "comparison.png"
    mark_targets(plot, target, comparison.metric)
    write_figure(plot, figure)
    if as_json:
        print_json({"folder": out, "figure": figure, **comparison_document(comparison, target)})
    else:
        print_comparison(comparison, target)
        screen().print()
        rows = {"runs": str(out), "figure": str(figure)}
        if already_finished:
            rows["not repeated"] = f"{already_finished} of {total_runs} runs, finished earlier"
        if len(drawn) > len(records):
            rows["in the figure"] = f"also {counted(len(drawn) - len(records), 'run')} of earlier comparisons in {out}"
        screen().print(key_values(rows))
    if failure is not None:
        raise failure


def read_seeds(text: str) -> list[int]:
    """Parse seeds: ``3`` means 0, 1, 2; ``4,7`` lists them.

    >>> read_seeds("3"), read_seeds("4,7"), read_seeds("5,")
    ([0, 1, 2], [4, 7], [5])
    """
    try:
        if "," in text:
            seeds = [int(word) for word in text.split(",") if word.strip()]
        else:
            seeds = list(range(min(int(text), MAX_SEEDS + 1)))
    except ValueError:
        seeds = []
    if len(seeds) > MAX_SEEDS:
        raise UserError(f"--seeds {text} asks for more than {MAX_SEEDS} runs of each algorithm; use fewer seeds")
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"cannot read --seeds '{text}'; expected a number of seeds (3) or distinct seeds (0,1,2)")
    return seeds


def default_folder(base: Config) -> Path:
    """Return a folder whose name depends on all settings except algorithm and seed.

    A repeated command therefore finds its earlier runs, even if algorithms or seeds are added.
    """
    settings = base.changed(algorithm="", seed=0).model_dump_json()
    return RUNS / f"compare-{data_slug(base)}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
