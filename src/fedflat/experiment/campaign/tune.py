"""Search for the settings with the best validation metric, with Optuna, in any number of processes.

The test set influences nothing: trials are scored on examples held out of the training set, and only the chosen trial
is evaluated on the test set, once, at the end.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedflat.engines.problem.kernels import KernelError
from fedflat.engines.problem.task import lower_is_better
from fedflat.errors import GpuFailed, MachineFailed, UserError, WorkerLost
from fedflat.experiment.analysis.reopen import primary_model
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign.compare import parallel_runs
from fedflat.experiment.campaign.optuna_study import (
    JOURNAL,
    DeadlineCallback,
    OutOfTime,
    Pruned,
    PruningCallback,
    Study,
)
from fedflat.experiment.campaign.processes import PATIENCE, start_process
from fedflat.experiment.campaign.ranking import last_score
from fedflat.experiment.campaign.sweep import (
    SECONDS_BETWEEN_POLLS,
    AlreadyFinished,
    LockedRun,
    describe,
    make_run_config,
)
from fedflat.experiment.campaign.sweep_file import (
    SETTINGS,
    Space,
    SweepFile,
    Tune,
    Values,
    all_placeholders,
    check_names,
    check_space,
    extreme_values,
    flat_base,
    placeholders,
    with_full_names,
)
from fedflat.experiment.config import Config, changes_results
from fedflat.experiment.setup.problem import task_of
from fedflat.experiment.store.cleanup import delete_parts
from fedflat.experiment.store.files import (
    DamagedFile,
    LockedError,
    create_folder,
    is_free,
    locked,
    write_atomically,
)
from fedflat.experiment.store.provenance import ChangedInputs, fingerprints
from fedflat.experiment.store.run_folder import Record, load_record
from fedflat.processes import ChildDied, ChildKilled, ChildProcess, close_children, sendable_error, wait_for_any
from fedflat.setting_names import flat

WORKER_LOST = "worker-lost"
"""File in a trial's folder that notes the first loss of a worker process."""
BEST = "best.json"
"""The file with the best trial and its test scores."""


@dataclass(frozen=True)
class Search:
    """A checked search; make one with :func:`plan_search`."""

    base: Values
    """Settings of all trials, by full name."""
    space: Space
    """The values to search over, by full name of the setting."""
    tune: Tune
    file: SweepFile
    out: Path
    """Folder of the search."""
    seconds: float = math.inf
    """Seconds after which the search pauses, counted from the call that runs it."""

    def config(self, values: Values, seed: int) -> Config:
        """The config of a trial with one of its seeds."""
        return make_run_config({**self.base, "seed": seed}, values)

    def resolved(self, values: Values) -> Values:
        """The settings that a trial with these values tries, by full name, with placeholders filled in."""
        settings = dict(flat(self.config(values, self.tune.seeds[0]).model_dump(mode="json")))
        with_placeholders = [name for name, value in self.base.items() if placeholders(value)]
        return {name: settings[name] for name in (*with_placeholders, *self.space) if name in settings}

    def example_config(self) -> Config:
        """The config of a trial with the first value of every setting and the first seed."""
        return self.extreme_configs()[0]

    def extreme_configs(self) -> list[Config]:
        """The configs of trials with the first and with the last value of every setting, and the first seed."""
        return [self.config(values, self.tune.seeds[0]) for values in extreme_values(self.space)]

    def identity(self) -> Values:
        """Everything that determines what trials try and how they score, by setting.

        Leaves out the number of trials and where they run, so that a search can be extended and moved.
        """
        fixed: Values = {}
        example = self.example_config()
        for name, value in flat(example.model_dump(mode="json")):
            if changes_results(name) and name != "seed":
                fixed[name] = value
        for name, value in self.base.items():
            # The config of one trial shows neither placeholders nor the values that fill them.
            if placeholders(value) or name not in SETTINGS:
                fixed[name] = value
        identity = {name: value for name, value in fixed.items() if name not in self.space}
        if "init" not in self.space:
            identity |= {f"sha256 of {name}": value for name, value in fingerprints({}, example.init).items()}
        for name, values in self.space.items():
            identity[f"tune.space.{name}"] = values if isinstance(values, list) else values.model_dump(mode="json")
        for name, value in self.tune.model_dump(mode="json", exclude={"trials", "space"}).items():
            identity[f"tune.{name}"] = value
        return identity

    def values(self, study: Study, number: int) -> Values:
        """The values that a trial tries; drawn on the first call."""
        return study.values(number, self.space)

    def folder(self, number: int) -> Path:
        """The folder of a trial."""
        return self.out / f"trial-{number:04d}"


class Trial(NamedTuple):
    """A finished trial."""

    number: int
    values: Values
    state: str
    """complete, pruned or failed."""
    score: float | None
    """Validation metric, averaged over seeds."""
    error: str = ""

    def __str__(self) -> str:
        rounded = {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in self.values.items()}
        return f"trial {self.number}: {describe(rounded)}"


def plan_search(file: SweepFile, out: Path, where: object = "the file") -> Search:
    """Build the search that a sweep file describes, without writing anything.

    Args:
        file: its content.
        out: the folder of the search.
        where: name of the file, for messages.

    Raises:
        UserError: the file contradicts itself or does not describe a valid search.
    """
    if file.tune is None:
        raise UserError(
            f"{where} has no tune section; add one with a space to search, for example {{lr: {{low: 0.01, high: 1}}}}"
        )
    if file.grid or file.entries or file.exclude or file.branch:
        raise UserError("a file with tune cannot have grid, list, exclude or branch; put them in another file")
    if file.ray_address is not None:
        raise UserError(
            "a search cannot use ray_address; leave it out and start fedflat tune on several nodes, in a shared folder"
        )
    if not file.keep.models:
        raise UserError("a search evaluates the model of its best trial; leave out models=false in keep")
    tune = file.tune
    space = with_full_names(tune.space, "tune.space")
    base = flat_base(file.base)
    # Check that settings exist, and that every placeholder {name} in a value refers to one of them.
    listed = [value for values in space.values() if isinstance(values, list) for value in values]
    names = {**dict.fromkeys(base, "base"), **dict.fromkeys(tune.space, "tune.space")}
    check_names(names, all_placeholders([*base.values(), *listed]))
    if not space:
        raise UserError("tune.space is empty; add settings to search over, e.g. {lr: {low: 0.01, high: 1, log: true}}")
    check_space(space, "tune.space")
    if len(set(tune.seeds)) < len(tune.seeds) or min(tune.seeds) < 0:
        raise UserError(f"tune.seeds is {tune.seeds}; expected distinct seeds of 0 or more, for example [0, 1, 2]")
    search = Search(base, space, tune, file, out)
    for config in search.extreme_configs():  # if both ends of every range are valid, so are the values in between
        check_scoring(config)
    return search


def check_scoring(config: Config) -> None:
    """Raise a ``UserError`` if a trial with this config has no validation score, or uses the test set."""
    if config.data.validation == 0:
        raise UserError(
            "a search needs a validation split to score trials; set data.validation in base, for example to 0.1"
        )
    if config.stop.target is not None:
        raise UserError("stop.target looks at the test set, which a search must not; use stop.patience instead")


def run_search(
    search: Search, callbacks: tuple[Callback, ...] = (), on_wait: Callable[[int], None] = lambda trials: None
) -> Iterator[Trial]:
    """Run the missing trials one after another and yield those run here; trials of killed processes are resumed.

    A search by a single process is reproducible, no matter how often it is interrupted.

    Args:
        search: the search.
        callbacks: callbacks of all runs.
        on_wait: called with the number of trials held by other processes before waiting for them.
    """
    study = open_study(search)
    has_reported = False
    deadline = time.monotonic() + search.seconds
    while time.monotonic() < deadline:
        with ExitStack() as lock:
            number = _lock_next_trial(search, study, lock)
            if number is not None:
                try:
                    trial = _run_trial(search, study, number, (*callbacks, DeadlineCallback(deadline)))
                except OutOfTime:
                    return
                yield trial
                continue
        held_by_others = study.unfinished()
        if not held_by_others:
            return
        if not has_reported:
            on_wait(len(held_by_others))
            has_reported = True
        time.sleep(SECONDS_BETWEEN_POLLS)


def run_search_in_parallel(
    search: Search, jobs: int | None = None, on_wait: Callable[[int], None] = lambda trials: None
) -> Iterator[Trial]:
    """Run the missing trials in several processes and yield each as it finishes.

    Later trials depend on which earlier ones have finished, so only a search with one job is reproducible.

    Args:
        search: the search.
        jobs: number of concurrent trials; default: as in the file.
        on_wait: called with the number of trials held by other processes before waiting for them.
    """
    deadline = time.monotonic() + search.seconds
    requested, left = jobs or search.file.jobs or len(search.file.devices) or 1, _trials_left(search)
    at_once = parallel_runs([search.example_config()] * left, (), requested, {})
    if at_once > 1 or (left and search.file.devices):  # only another process can be limited to a GPU
        yield from _run_in_processes(search, at_once)
    # This also finishes the trials of processes that died.
    yield from run_search(_limited(search, deadline), on_wait=on_wait)


def _limited(search: Search, deadline: float) -> Search:
    """The search with the seconds that are left until ``deadline``, a time of this process's monotonic clock."""
    return replace(search, seconds=deadline - time.monotonic())


def _run_in_processes(search: Search, at_once: int) -> Iterator[Trial]:
    """Let ``at_once`` processes run trials and yield them; a process that dies leaves its trial unfinished.

    If a GPU fails, the trial has failed, and a new process takes the place of the old one.
    """
    devices: list[str | None] = [str(device) for device in search.file.devices] or [None]
    deadline = time.monotonic() + search.seconds

    def start(device: str | None) -> ChildProcess:
        return start_process(_serve_search, _limited(search, deadline), device=device)

    children = {start(device): device for device in islice(cycle(devices), at_once)}
    try:
        while children:
            for child in wait_for_any(children):
                try:
                    message = child.receive()
                except ChildDied as death:
                    if isinstance(death, ChildKilled):  # otherwise it exited because no trial was left
                        warnings.warn(f"a process of the search {death}; repeat the command to continue", stacklevel=2)
                    del children[child]
                    close_children([child], PATIENCE)
                    continue
                if isinstance(message, GpuFailed):
                    warnings.warn(str(message), stacklevel=2)
                    device = children.pop(child)
                    close_children([child], PATIENCE)
                    children[start(device)] = device
                    continue
                if isinstance(message, BaseException):
                    raise message
                yield message
    finally:
        close_children(children, PATIENCE)


def _serve_search(pipe: Connection, search: Search) -> None:
    """Main function of a child: run trials until none is left, and send each to the parent."""
    try:
        for trial in run_search(search):
            pipe.send(trial)
    except (ConnectionError, KeyboardInterrupt):
        return
    except Exception as error:  # raised again in the parent
        with suppress(ConnectionError):  # the parent has stopped the search because of another process's error
            pipe.send(sendable_error(error))


def check_folder(search: Search) -> None:
    """Raise a ``UserError`` if the folder holds another search; nothing is created."""
    if (search.out / JOURNAL).exists():
        Study(search.out, search.tune).check(search.identity(), search.out)


def _trials_left(search: Search) -> int:
    """The number of trials that have not finished, including those that have not started."""
    study = open_study(search)
    return max(0, search.tune.trials - study.count()) + len(study.unfinished())


def open_study(search: Search) -> Study:
    """Open or create the study in the search's folder; raises a ``UserError`` if it belongs to another search."""
    create_folder(search.out)
    is_new = not (search.out / JOURNAL).exists()  # an existing journal stores whether lower is better
    study = Study(search.out, search.tune, is_new and lower_is_better(task_of(search.example_config())))
    with locked(search.out, wait=True):
        study.identify(search.identity(), search.out)
    return study


def _lock_next_trial(search: Search, study: Study, lock: ExitStack) -> int | None:
    """Lock the folder of an abandoned or a new trial until ``lock`` closes.

    Returns:
        The trial's number, or None if all trials are finished or held by other processes.
    """
    with locked(search.out, wait=True):
        free = {number for number in study.unfinished() if is_free(search.folder(number))}
        # A trial may finish between the two checks. Nobody else can lock one now, so the others are abandoned.
        abandoned = [number for number in study.unfinished() if number in free]
        if not abandoned and study.count() >= search.tune.trials:
            return None
        number = abandoned[0] if abandoned else study.ask()
        lock.enter_context(locked(search.folder(number)))
        return number


def _run_trial(search: Search, study: Study, number: int, callbacks: tuple[Callback, ...]) -> Trial:
    """Train a trial with every seed and record its mean validation score in the study.

    Raises:
        UserError: the trial stays unfinished, because the machine failed, or because files of the trial, the data or
            the initial weights were damaged or changed.
    """
    values = search.values(study, number)

    def finish(state: str, score: float | None = None, error: str = "") -> Trial:
        study.record_result(number, score, state)
        return Trial(number, values, state, score, error)

    scores: list[float] = []
    try:
        for index, seed in enumerate(search.tune.seeds):
            # Only the first seed can prune: the study compares trials round by round.
            pruner = (PruningCallback(study, number),) if search.tune.prune and index == 0 else ()
            folder = search.folder(number) / f"seed-{seed}"
            record = _run_or_load(search, search.config(values, seed), folder, (*callbacks, *pruner))
            score = last_score(record, "validation")
            if score is None:
                return finish("failed", error=record.reason or record.status)
            scores.append(score)
    except Pruned:
        trial = finish("pruned")
        delete_parts(folder, search.file.keep.removed)
        return trial
    except (LockedError, KernelError):  # user errors, but not failures of the trial
        raise
    except (MachineFailed, DamagedFile, ChangedInputs) as error:  # nor are these
        if isinstance(error, WorkerLost):  # unless it happens again, as if the trial's values were the reason
            marker = search.folder(number) / WORKER_LOST
            if marker.exists():
                return finish("failed", error=str(error))
            write_atomically(marker, f"{error}\n")
        raise type(error)(
            f"trial {number} was interrupted: {error}. Repeat the command to continue the search"
        ) from error
    except GpuFailed as error:
        raise GpuFailed(f"{finish('failed', error=str(error))}: {error}") from error
    except UserError as error:
        return finish("failed", error=str(error))
    return finish("complete", fmean(scores))


def _run_or_load(search: Search, config: Config, folder: Path, callbacks: tuple[Callback, ...]) -> Record:
    """Execute a run of a trial, or load it if it is already finished."""
    try:
        return LockedRun(config, folder, search.file.keep).execute(callbacks)
    except AlreadyFinished:
        return load_record(folder)


def evaluate_best(search: Search) -> dict[str, Any]:
    """Evaluate the best trial on the test set, write ``best.json`` and return its content.

    The model is evaluated once; a second call returns the same numbers.
    """
    study = open_study(search)
    best = study.best()
    if best is None:
        raise UserError(f"no trial in {search.out} has a score; read the errors above, or fedflat show {search.out}")
    number, score = best
    folders = [str(search.folder(number) / f"seed-{seed}") for seed in search.tune.seeds]
    trial = {
        "trial": number,
        "settings": search.resolved(search.values(study, number)),
        "validation": score,
        "folders": folders,
    }
    with locked(search.out, wait=True):
        file = search.out / BEST
        previous: Values = {}
        with suppress(OSError, ValueError):  # a missing or damaged file is written again
            previous = json.loads(file.read_text(encoding="utf-8"))
        content = {**previous, "folders": folders} if _describes(previous, trial) else _with_test_scores(trial)
        if content != previous:
            write_atomically(file, json.dumps(content, indent=1, default=str) + "\n")
    return content


def _with_test_scores(trial: Values) -> Values:
    """The content of ``best.json``: a trial with the test scores of its runs."""
    from fedflat.experiment.analysis.evaluation import evaluate

    records = [load_record(Path(folder)) for folder in trial["folders"]]
    metric = records[0].metric
    return {
        "trial": trial["trial"],
        "settings": trial["settings"],
        "chosen_by": f"validation {metric}, mean over {len(records)} seed{'s' * (len(records) != 1)}",
        "metric": metric,
        "validation": trial["validation"],
        "test": [float(evaluate(record, primary_model(record), ("test",))["test"][metric]) for record in records],
        "folders": trial["folders"],
    }


def _describes(content: Values, trial: Values) -> bool:
    """Whether ``best.json`` has this trial with all test scores; folders may have been moved, so they may differ."""
    if not isinstance(content, dict) or not isinstance(content.get("test"), list):
        return False
    is_same = all(content.get(name) == trial[name] for name in ("trial", "settings", "validation"))
    return is_same and len(content["test"]) == len(trial["folders"])
