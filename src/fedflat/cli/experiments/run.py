"""fedflat run, resume: a single experiment."""

from __future__ import annotations

import re
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.downloads import fetch_if_missing
from fedflat.cli.shared.error_reporting import Interrupted
from fedflat.cli.shared.flags import CONFIG, FLAGS, JSON, QUIET, SET, TRACK, algorithm_names, optional, with_settings
from fedflat.cli.shared.one_run import draw_curve, print_run, run_document
from fedflat.cli.shared.progress import progress
from fedflat.cli.shared.screen import print_json
from fedflat.experiment.config import EXECUTION_SETTINGS

if TYPE_CHECKING:
    from fedflat.experiment.callback import Callback
    from fedflat.experiment.config import Config

RUNS = Path("runs")
"""Default folder for runs."""


@with_settings()
def run(
    settings: dict[str, Any],
    algorithm: str | None = typer.Argument(
        None,
        metavar="ALGORITHM",
        help="algorithm, e.g. fedavg, scaffold+sam or fedmoswa+asam(rho=0.5)+wima",
        show_default=False,
        autocompletion=algorithm_names,
    ),
    config: Path | None = CONFIG,
    assignments: list[str] = SET,
    out: Path | None = optional("--out", "a new folder for the run", "runs/ALGORITHM-DATA-seedSEED", metavar="FOLDER"),
    dry_run: bool = typer.Option(False, "--dry-run", help="print the complete config and stop"),
    track: str | None = TRACK,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Run one experiment and save it to a folder.

    Example: fedflat run fedmoswa+wima --rounds 50 --partition 'dirichlet(alpha=0.1)'
    """
    from fedflat.api import make_config

    if algorithm is not None:
        settings = settings | {"algorithm": algorithm}
    made = make_config(config, settings, assignments)
    if dry_run:
        print_json(made.model_dump(mode="json")) if as_json else print(made.to_yaml(), end="")
        return
    _go(made, new_folder(made) if out is None else out, as_json, quiet, track=track)


@with_settings(*(flag for flag in FLAGS if flag not in EXECUTION_SETTINGS), defaults=False)
def resume(
    settings: dict[str, Any],
    folder: Path = typer.Argument(metavar="FOLDER", help="the folder of a run"),
    track: str | None = TRACK,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Resume an interrupted run; the result equals that of an uninterrupted one.

    Settings not given here stay unchanged.

    Example: fedflat resume runs/fedmoswa-digits-seed0 --workers 2
    """
    from fedflat.api import make_config
    from fedflat.experiment.stopping import ENDED_STATUSES
    from fedflat.experiment.store.run_folder import load_record

    record = load_record(folder)
    if record.status in ENDED_STATUSES:
        if as_json:
            print_json(run_document(record))
            return
        print(f"The run in {folder} is already {record.status}; nothing to resume.")
        print_run(record)
        return
    _go(make_config(record.config, settings), folder, as_json, quiet, resume=True, track=track)


def _go(
    config: Config, folder: Path, as_json: bool, quiet: bool, resume: bool = False, track: str | None = None
) -> None:
    from fedflat.experiment.campaign.estimate import ForecastCallback
    from fedflat.experiment.run import Run
    from fedflat.experiment.setup.problem import device_of
    from fedflat.experiment.store.run_folder import RunFolder
    from fedflat.models import describe_trained
    from fedflat.reporting.result import Result

    followed = trackers(track)
    device_of(config)  # fail before a download
    fetch_if_missing(config, quiet or as_json)
    try:
        with progress(quiet or as_json) as shown:
            going = Run(config, folder, callbacks=(shown, ForecastCallback(shown.foretell), *followed), resume=resume)
            trained = describe_trained(going.problem.model)
            if trained and not (quiet or as_json):
                print(f"{config.model}: {trained}", file=sys.stderr)
            record = going.go()
    except KeyboardInterrupt:
        begun = RunFolder(folder).exists
        raise Interrupted(f"continue with: fedflat resume {folder}" if begun else "nothing was written yet") from None
    draw_curve(Result(record))
    if as_json:
        print_json(run_document(record))
    else:
        print_run(record)


def trackers(place: str | None) -> tuple[Callback, ...]:
    """The tracking callback, if requested."""
    if place is None:
        return ()
    from fedflat.reporting.tracking import Tracker

    return (Tracker(place),)


def data_slug(config: Config) -> str:
    """The dataset name as part of a folder name."""
    name = re.sub(r"\bpath=/[^,)]*/", "path=", config.data.dataset)  # keep only the last part of a path
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def new_folder(config: Config) -> Path:
    """The default folder of a run; a number is appended if it exists."""
    slug = re.sub(r"[^a-z0-9.]+", "-", config.algorithm.lower()).strip("-")
    path = RUNS / f"{slug}-{data_slug(config)}-seed{config.seed}"
    return next(p for n in count(1) if not (p := path if n == 1 else path.with_name(f"{path.name}-{n}")).exists())
