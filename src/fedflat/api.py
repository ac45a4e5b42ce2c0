"""The Python API: run, rounds, compare, sweep, resume, load and report."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedflat.data import Dataset, from_clients
from fedflat.data.arrays import Pair
from fedflat.engines.problem.task import CustomLoss, Task
from fedflat.errors import UserError, error_of_runs, one_of, require_instance
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign import compare as comparing
from fedflat.experiment.config import Config
from fedflat.experiment.make_config import (
    as_algorithms,
    as_callbacks,
    as_path,
    check_jobs,
    check_user_objects,
    keep_clients,
    make_config,
    prepare,
)
from fedflat.experiment.rounds import Round
from fedflat.experiment.run import Run
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.final_models import has_restorable_models
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.reporting.comparison import Comparison
from fedflat.reporting.progress import progress as progress_display
from fedflat.reporting.result import Result
from fedflat.setting_names import RESUME_SETTINGS


def run(
    algorithm: str | None = None,
    *,
    base: str | Path | Config | None = None,
    out: str | Path | None = None,
    dataset: str | Path | Dataset | None = None,
    model: str | nn.Module | None = None,
    task: str | Task | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Run one experiment.

    Args:
        algorithm: the algorithm, e.g. ``"fedavg"`` or ``"scaffold+sam(rho=0.1)"`` (list: ``fedflat algorithms``).
        base: a YAML file or ``Config`` that provides the settings not given here.
        out: a new folder for config, metrics, checkpoints and models. Without one, the result exists only in memory.
        dataset: the name of a dataset (list: ``fedflat data list``), the path of a file, or a ``Dataset`` from
            ``fedflat.data.from_arrays``, ``from_clients``, ``from_texts`` or ``from_torch``. The clients of such a
            dataset keep their examples unless you pass ``partition`` or another number of ``clients``.
        model: the name of a model (list: ``fedflat models``), or a ``torch.nn.Module``, which is copied.
        task: loss and metrics, e.g. ``"mse"``, ``"f1"`` or ``Huber(delta=2)``; default: by target type.
        callbacks: one or several observers, called after every round and evaluation.
        progress: show a progress bar in terminals and notebooks.
        **settings: further settings by short name (``rounds=50``, ``lr=0.1``, ``batch_size=50``, ``clients=100``,
            ``clients_per_round=10``, ``local_epochs=5``, ``partition="dirichlet(alpha=0.1)"``, ``eval_every=5``,
            ``seed=1``) or by full name with ``__`` for the dot (``training__momentum=0.9``). List:
            ``fedflat settings``.

    Returns:
        The run's history, metrics and models.

    Example:
        >>> result = run("fedavg", dataset="digits", model="mlp(hidden=8)", rounds=2, local_steps=1, workers=1)
        >>> result.status, len(result.history)
        ('finished', 3)
    """
    with progress_display(silent=not progress, lines_when_piped=False) as display:
        observers = (display, *as_callbacks(callbacks))
        return Result(_prepare_run(algorithm, base, out, dataset, model, task, observers, settings).execute())


class Rounds(Iterator[Round]):
    """An iterator over the rounds of a run, which trains each round on demand.

    A second loop continues where the first stopped. After ``close``, an unfinished run trains no further rounds.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._steps = run.train_rounds()  # a generator that trains a round at each step, and pauses the run if closed
        # Pause the run when nothing refers to it any more, and before the interpreter shuts down.
        weakref.finalize(self, self._steps.close)

    def __next__(self) -> Round:
        """Train the next round; raises ``StopIteration`` after the last, ``UserError`` if the run stopped earlier."""
        record = self.run.record
        is_finished = record is not None and record.status in ENDED_STATUSES
        if getgeneratorstate(self._steps) == GEN_CLOSED and not is_finished:
            raise self._unfinished()  # an empty loop would look as if the run had finished
        next(self._steps)
        return Round.of(self.run)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The evaluations so far, one dictionary each, including the evaluation before the first round."""
        return self.run.history

    def close(self) -> None:
        """Pause the run. If it has a folder, its models are written, and it can be resumed."""
        self._steps.close()

    def result(self) -> Result:
        """Pause the run and return its result; remaining rounds are not trained."""
        self.close()
        if self.run.record is not None:
            return Result(self.run.record)
        if self.run.rounds > self.run.config.init_rounds:  # stopped by an exception
            raise self._unfinished()
        raise UserError("no round was trained, so there is no result; iterate over at least one round first")

    def _unfinished(self) -> UserError:
        """The error that the run was closed, or stopped by an exception, before its last round."""
        ended = f"this run stopped after {self.run.rounds} of {self.run.config.training.rounds} rounds"
        folder = self.run.folder
        if folder is None or not folder.exists:
            return UserError(f"{ended} and has no folder; start again, with out=FOLDER to be able to resume")
        return UserError(f"{ended}; continue it with fedflat.resume({str(folder.path)!r})")


def rounds(
    algorithm: str | None = None,
    model: str | nn.Module | None = None,
    clients_data: Sequence[Pair] | None = None,
    test_data: Pair | None = None,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    base: str | Path | Config | None = None,
    out: str | Path | None = None,
    dataset: str | Path | Dataset | None = None,
    task: str | Task | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    **settings: Any,
) -> Rounds:
    """Run one experiment a round at a time, from your own loop. The result is the same as that of ``run``.

    Args:
        algorithm: the algorithm, e.g. ``"scaffold+sam"``.
        model: name of a model, e.g. ``"resnet18"``, or a torch module.
        clients_data: one pair (inputs, targets) per client, of tensors or arrays with the examples in the first
            dimension, or one torch dataset of such pairs. Clients keep their examples unless ``partition`` is set.
        test_data: a pair (inputs, targets) to evaluate on.
        loss: a function of outputs and targets that returns the mean loss of a batch; default: cross-entropy.
        base: settings to start from: a YAML file or a ``Config``.
        out: folder for the run; without one, nothing is written.
        dataset: name of a dataset, path of a file, or a ``Dataset``, instead of ``clients_data`` and ``test_data``.
        task: loss and metrics, by name or as a ``Task``, instead of ``loss``.
        callbacks: objects that observe the run.
        **settings: further settings by name, e.g. ``rounds=50`` or ``training__lr_decay=0.998``.

    Returns:
        An iterator over ``Round`` objects with the cohort, the loss, the evaluation and the models of each round.

    Example:
        >>> import torch
        >>> clients = [(torch.randn(20, 4) + label, torch.full((20,), label)) for label in (0, 1)]
        >>> for round in rounds("fedavg", torch.nn.Linear(4, 2), clients, rounds=3, workers=1):
        ...     print(round.number, round.cohort)
        1 (0, 1)
        2 (0, 1)
        3 (0, 1)
    """
    if clients_data is not None:
        if dataset is not None:
            raise UserError("clients_data and dataset exclude each other; pass one of them")
        dataset = from_clients(clients_data, test_data)
        settings = keep_clients(settings, len(clients_data), has_base=base is not None)
    elif test_data is not None:
        raise UserError("test_data needs clients_data; a named dataset has its own test set")
    if loss is not None:
        if task is not None:
            raise UserError("loss and task exclude each other; pass one of them")
        if not callable(loss):
            raise UserError(
                f"loss is {loss!r}; expected a function of outputs and targets, "
                "such as torch.nn.functional.cross_entropy"
            )
        require_instance(loss, "loss")
        task = CustomLoss(function=loss)
    return Rounds(_prepare_run(algorithm, base, out, dataset, model, task, callbacks, settings))


def compare(
    algorithms: str | Sequence[str],
    *,
    seeds: int | Sequence[int] = 3,
    base: str | Path | Config | None = None,
    out: str | Path | None = None,
    dataset: str | Path | Dataset | None = None,
    model: str | nn.Module | None = None,
    task: str | Task | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    jobs: int | None = None,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Run several algorithms on the same partitions, cohorts and batches.

    Args:
        algorithms: one or several algorithms, e.g. ``["fedavg", "scaffold+sam"]``.
        seeds: the number of seeds, counted from 0, or the seeds themselves.
        base: settings to start from: a YAML file or a ``Config``.
        out: a folder for all runs; finished runs found there are not repeated.
        dataset: name of a dataset, path of a file, or a ``Dataset``.
        model: name of a model, e.g. ``"resnet18"``, or a torch module.
        task: loss and metrics, by name or as a ``Task``.
        callbacks: objects that observe the runs; with several jobs, they must be ``RemoteCallback``s.
        jobs: number of concurrent runs; default: several if the runs are small, else 1.
        progress: show progress bars in terminals and notebooks.
        **settings: further settings by name, e.g. ``rounds=50`` or ``training__lr_decay=0.998``.

    Returns:
        All runs, with tables, statistics and plots over seeds.

    Example:
        >>> small = {"model": "mlp(hidden=8)", "rounds": 2, "local_steps": 1, "workers": 1, "jobs": 1}
        >>> len(compare(["fedavg", "scaffold"], seeds=2, **small).records)
        4
    """
    check_jobs(jobs)
    comparing.reject_varied_settings(settings, {"seed": "pass seeds=[5]", "algorithm": "pass it in algorithms"})
    config, user_objects = prepare(None, base, dataset, model, task, settings)
    # Absolute, as a callback may change the working directory between two runs.
    folder = None if out is None else as_path("out", out).absolute()
    texts, numbers, records = as_algorithms(algorithms), comparing.seed_numbers(seeds), []
    runs, finished = len(texts) * len(numbers), comparing.finished_runs(folder, texts, numbers)
    with progress_display(not progress, runs, finished, lines_when_piped=False) as display:
        observers = (display, *as_callbacks(callbacks))
        for record in comparing.compare(config, texts, numbers, folder, observers, jobs, **user_objects):
            records.append(record)
            display.count_run()
    return Comparison(records)


def sweep(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool = True,
) -> Comparison:
    """Run every combination of settings of a sweep.

    Args:
        source: the sweep: a YAML file, or its content with the keys ``base``, ``grid`` and others.
        out: a folder for all runs; finished runs found there are not repeated. Default: ``runs/NAME`` for a file.
        jobs: number of concurrent runs; default: the sweep's.
        callbacks: objects that observe the runs; with several jobs, they must be ``RemoteCallback``s.
        progress: show progress bars in terminals and notebooks.

    Returns:
        All runs, in the order of the sweep.

    Raises:
        SomeFailed: at least one run failed; the others have been completed. If all failed alike, that error is raised.

    Example:
        ``fedflat.sweep({"base": {"rounds": 50}, "grid": {"lr": [0.01, 0.1], "seed": [0, 1]}}, out="runs/lr")``
    """
    from fedflat.experiment.campaign.sweep import plan_sweep, run_sweep, slug
    from fedflat.experiment.campaign.sweep_file import read_sweep

    check_jobs(jobs)
    if not isinstance(source, Mapping):
        source = as_path("source", source, "sweep.yaml")
    if out is None:
        if isinstance(source, Mapping):
            raise UserError("a sweep needs a folder for its runs; pass out=FOLDER")
        out = Path("runs") / slug(source)
    plan = plan_sweep(read_sweep(source), as_path("out", out).absolute())
    results = {}
    with progress_display(silent=not progress, runs=len(plan.runs), lines_when_piped=False) as display:
        for result in run_sweep(plan, (display, *as_callbacks(callbacks)), jobs):
            results[result.run.name] = result
            display.count_run()
    failed = [(result.run.name, result.error) for result in results.values() if result.error is not None]
    if failed:
        raise error_of_runs(failed, len(results))
    records = [results[run.name].record for run in plan.runs]
    return Comparison(record for record in records if record is not None)


def resume(
    folder: str | Path,
    *,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    task: Task | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool = True,
    **changes: Any,
) -> Result:
    """Continue an interrupted run from its last checkpoint, with the same result as without the interruption.

    Args:
        folder: the run folder. If the run has ended already, its result is returned; missing or damaged final models
            are first written again from the checkpoint.
        dataset: the dataset, if the run began with a user-supplied one.
        model: the model, if the run began with a user-supplied one.
        task: the task, if the run began with a user-supplied one.
        callbacks: objects that observe the run.
        progress: show a progress bar in terminals and notebooks.
        **changes: settings that may change: ``workers``, ``engine``, ``device``, ``ray_address``, ``data_dir`` and
            ``save_every`` (applies to the remaining rounds).

    Returns:
        The complete run.

    Example:
        ``fedflat.resume("runs/first", workers=4)``
    """
    for name in changes:
        if name not in RESUME_SETTINGS:
            raise one_of("setting that may change in a resumed run", name, RESUME_SETTINGS)
    check_user_objects(dataset, model, task)
    run_folder = RunFolder(path := as_path("folder", folder))
    if run_folder.has_ended and not has_restorable_models(run_folder):
        return load(path)
    run_folder.load_plugins()
    config = make_config(run_folder.config(), changes)
    with progress_display(silent=not progress, lines_when_piped=False) as display:
        observers = (display, *as_callbacks(callbacks))
        run = Run(config, path, data=dataset, model=model, task=task, callbacks=observers, resume=True)
        return Result(run.execute())


def load(folder: str | Path) -> Result:
    """Load a run from its folder.

    Args:
        folder: the run folder; the run may still be in progress. ``fedflat.Comparison.load`` loads a folder of
            several runs.

    Returns:
        The run's history, metrics and models; models are read on demand.

    Example:
        ``fedflat.load("runs/first").summary()``
    """
    return Result.load(folder)


def report(
    runs: str | Path | Iterable[str | Path],
    out: str | Path = "report",
    *,
    title: str = "",
    targets: float | Sequence[float] = (),
    baseline: str | None = None,
    by: str = "mean_last",
    apart: bool = False,
    columns: str | Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    figures: bool = True,
) -> Path:
    """Write a report on runs: an HTML page, tables (CSV, Markdown, LaTeX) and figures (PDF).

    Args:
        runs: one or several run folders, or folders that contain runs.
        out: the folder to write to.
        title: title of the page.
        targets: one or several metric values; also report the rounds needed to reach each, e.g. ``[0.8, 0.9]``.
        baseline: the row that others are compared with, e.g. ``"fedavg"``; default: the first.
        by: compare by ``"mean_last"`` (mean of the last 10 % of evaluations), ``"last"``, ``"best"`` or
            ``"at_best_validation"``.
        apart: allow runs with different data or partitions, in separate sections.
        columns: columns of results tables, e.g. ``["mean_last", "best"]`` or ``"last,best"``; default: all (LaTeX: 2).
        labels: display names, e.g. ``{"mine": "Mine (ours)"}``; default: as in the algorithm's paper.
        figures: whether to draw figures.

    Returns:
        The path of the HTML page.

    Example:
        ``fedflat.report("runs/comparison", out="report", baseline="fedavg")``
    """
    from fedflat.reporting.page.gather import gather
    from fedflat.reporting.page.page import write_report

    folders = runs if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    folder = as_path("out", out, "report")
    options: dict[str, Any] = {"title": title, "baseline": baseline, "by": by, "apart": apart, "labels": labels}
    options["targets"] = [targets] if isinstance(targets, int | float) else targets
    options["columns"] = [name.strip() for name in columns.split(",")] if isinstance(columns, str) else columns
    write_report(gather([as_path("runs", path) for path in folders]), folder, **options, figures=figures)
    return folder / "report.html"


def _prepare_run(
    algorithm: str | None,
    base: str | Path | Config | None,
    out: str | Path | None,
    dataset: str | Path | Dataset | None,
    model: str | nn.Module | None,
    task: str | Task | None,
    callbacks: Callback | Sequence[Callback],
    settings: dict[str, Any],
) -> Run:
    """Build the run that the arguments of ``run`` describe, without starting it."""
    config, user_objects = prepare(algorithm, base, dataset, model, task, settings)
    return Run(config, None if out is None else as_path("out", out), callbacks=as_callbacks(callbacks), **user_objects)
