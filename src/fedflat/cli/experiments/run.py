"""fedflat run, resume: a single experiment."""

from __future__ import annotations

import re
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli import Interrupted
from fedflat.cli.shared.completion import complete_algorithm
from fedflat.cli.shared.flags import (
    CONFIG,
    FLAGS,
    JSON,
    QUIET,
    RUN,
    SET,
    TRACK,
    optional,
    with_settings,
)
from fedflat.cli.shared.one_run import CURVE, draw_curve, print_run, run_document
from fedflat.cli.shared.screen import fetch_if_missing, print_json, print_precision, show_loading
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback
from fedflat.reporting.forecast import ForecastCallback
from fedflat.reporting.progress import progress
from fedflat.setting_names import RESUME_SETTINGS

if TYPE_CHECKING:
    from fedflat.experiment.callback import RunView
    from fedflat.experiment.config import Config

RUNS = Path("runs")
"""Default folder for runs."""


@with_settings()
def run(
    settings: dict[str, Any],  # values of the flags that with_settings adds, such as --rounds
    algorithm: str | None = typer.Argument(
        None,
        metavar="ALGORITHM",
        help="algorithm, e.g. fedavg, scaffold+sam or fedmoswa+asam(rho=0.5)+wima",
        show_default=False,
        autocompletion=complete_algorithm,
    ),
    config: Path | None = CONFIG,
    assignments: list[str] = SET,
    out: Path | None = optional("--out", "a new folder for the run", "runs/ALGORITHM-DATA-seedSEED", metavar="FOLDER"),
    dry_run: bool = typer.Option(False, "--dry-run", help="check and print the complete config, and stop"),
    track: str | None = TRACK,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Run one experiment and save it to a folder.

    Example: fedflat run fedmoswa+wima --rounds 50 --partition 'dirichlet(alpha=0.1)'
    """
    show_loading(quiet or as_json or dry_run)
    from fedflat.experiment.make_config import make_config

    if algorithm is not None:
        settings = settings | {"algorithm": algorithm}
    run_config = make_config(config, settings, assignments)
    if not dry_run:
        _train(run_config, out or new_folder(run_config), as_json, quiet, track)
        return
    _check(run_config)
    if as_json:
        print_json(run_config.model_dump(mode="json"))
    else:
        print(run_config.to_yaml(), end="")


@with_settings(*(flag for flag in FLAGS if flag not in RESUME_SETTINGS), show_defaults=False)
def resume(
    settings: dict[str, Any],  # values of the flags that with_settings adds, such as --workers
    folder: Path = RUN,
    track: str | None = TRACK,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Resume an interrupted run; the result equals that of an uninterrupted one.

    Settings not given here stay unchanged. If a final model of a finished run is missing or damaged, all of them are
    written again from the last checkpoint.

    Example: fedflat resume runs/fedmoswa-digits-seed0 --workers 2
    """
    show_loading(quiet or as_json)
    from fedflat.experiment.analysis.reopen import resume_command
    from fedflat.experiment.campaign.branch import branch_command
    from fedflat.experiment.make_config import make_config
    from fedflat.experiment.store.final_models import has_restorable_models
    from fedflat.experiment.store.run_folder import RunFolder, load_record
    from fedflat.reporting.result import Result

    run_folder = RunFolder(folder)
    is_restored = has_restorable_models(run_folder)
    if is_restored or not run_folder.has_ended:
        command = resume_command(run_folder)
        if command != run_folder.resume_command:
            raise UserError(f"the run in {folder} used Python objects; continue it with {command}")
        config = run_folder.config()
        run_folder.load_plugins()
        if is_restored and not (quiet or as_json):
            print("A final model is missing or damaged; the final models are written again.", file=sys.stderr)
        _train(make_config(config, settings), folder, as_json, quiet, track, resume=True)
        return
    record = load_record(folder)
    if not (folder / CURVE).exists():  # the process was killed before it drew the curve
        draw_curve(Result(record))
    if as_json:
        print_json(run_document(record))
    else:
        can_branch = record.status == "finished" and record.config.federation.privacy is None
        more = f" For more rounds: {branch_command(record, folder)}." if can_branch else ""
        print(f"The run in {folder} is already {record.status}; nothing to resume.{more}")
        print_run(record)


class ResumeMessage(Callback):
    """Prints the round from which a run is resumed."""

    def began(self, run: RunView) -> None:
        """Print the round of the checkpoint; without one, the run starts from its first round."""
        message = f"Resuming from the checkpoint of round {run.rounds} of {run.config.training.rounds}."
        if run.rounds == run.config.init_rounds:
            message = f"The run has no checkpoint yet; starting from round {run.rounds}."
        print(message, file=sys.stderr)


def _check(config: Config) -> None:
    """Build the data, partition and model of a dry run, with the same errors as the run; nothing is downloaded."""
    from fedflat.algorithms import algorithm
    from fedflat.data import data_dir, dataset_source
    from fedflat.experiment.campaign.sweep import check_names
    from fedflat.experiment.setup.engine import training_of
    from fedflat.experiment.setup.privacy import describe_privacy
    from fedflat.experiment.setup.problem import build_problem, check_new_run, is_user_supplied
    from fedflat.experiment.setup.timing import check_asynchronous

    data = config.data
    if not is_user_supplied(data.dataset):
        check_names(config.model, data.dataset, data.partition, data.augmentation)
        if not dataset_source(data.dataset).is_local(data_dir(data.dir)):
            print(f"fedflat: partition and model are not checked, because {data.dataset} is missing", file=sys.stderr)
            return
    # The run may be meant for another machine, so its device need not be here.
    problem, partition = build_problem(config.changed(engine={"device": "cpu"}))
    check_new_run(config, problem.task.metric, partition)
    check_asynchronous(config, algorithm(config.algorithm))
    training = training_of(config, algorithm(config.algorithm), len(partition.clients), problem)
    _print_privacy(describe_privacy(config, training))


def _print_privacy(description: str) -> None:
    """Print the guarantee of a private run to stderr; ``description`` is empty for other runs."""
    if description:
        print(f"fedflat: {description}", file=sys.stderr)


def _train(config: Config, folder: Path, as_json: bool, quiet: bool, track: str | None, resume: bool = False) -> None:
    """Train a new or resumed run with a progress display, draw its learning curve and print its results."""
    from fedflat.experiment.run import Run
    from fedflat.experiment.setup.privacy import describe_privacy
    from fedflat.experiment.setup.problem import device_of
    from fedflat.experiment.store.checkpoint import checkpoint_rounds
    from fedflat.experiment.store.run_folder import RunFolder
    from fedflat.models import describe_trained
    from fedflat.reporting.result import Result

    silent, tracking = quiet or as_json, tracking_callbacks(track)
    device_of(config)  # if the device is missing, fail before a download
    print_precision(config, silent)
    fetch_if_missing(config, silent)
    try:
        with progress(silent) as display:
            resumed = (ResumeMessage(),) if resume and not silent else ()
            callbacks: tuple[Callback, ...] = (*resumed, display, ForecastCallback(display.show_forecast), *tracking)
            run = Run(config, folder, callbacks=callbacks, resume=resume)
            trained_part = describe_trained(run.problem.model)  # empty if the whole model is trained
            if trained_part and not silent:
                print(f"{config.model}: {trained_part}", file=sys.stderr)
            if not silent:
                _print_privacy(describe_privacy(config, run.training))
                if run.config.engine.compile == "on" != config.engine.compile:
                    print("compile: on (engine.compile=auto; the run is long enough to benefit)", file=sys.stderr)
            record = run.execute()
    except KeyboardInterrupt:
        if RunFolder(folder).exists:
            rounds = checkpoint_rounds(RunFolder(folder)) or config.init_rounds
            raise Interrupted(f"continue from round {rounds} with: {RunFolder(folder).resume_command}") from None
        raise Interrupted("nothing was written yet") from None
    draw_curve(Result(record))
    if as_json:
        print_json(run_document(record))
    else:
        print_run(record)


def tracking_callbacks(tracker: str | None) -> tuple[Callback, ...]:
    """Return the callback that logs to ``tracker``: tensorboard, mlflow or wandb; none if it is None."""
    if tracker is None:
        return ()
    from fedflat.reporting.tracking import Tracker

    return (Tracker(tracker),)


def data_slug(config: Config) -> str:
    """Return the dataset's name as part of a folder name."""
    name = re.sub(r"\bpath=/[^,)]*/", "path=", config.data.dataset)  # keep only the last part of a path
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def run_slug(config: Config) -> str:
    """Return a run's algorithm, dataset and seed as a folder name."""
    algorithm = re.sub(r"[^a-z0-9.]+", "-", config.algorithm.lower()).strip("-")
    return f"{algorithm}-{data_slug(config)}-seed{config.seed}"


def new_folder(config: Config) -> Path:
    """Return a default folder for a run that does not exist yet: ``fedavg-digits-seed0``, or with ``-2``, ``-3``..."""
    path = folder = RUNS / run_slug(config)
    for number in count(2):
        if not folder.exists():
            break
        folder = path.with_name(f"{path.name}-{number}")
    return folder
