"""Sweeps: every combination of a file is a run in its own folder, done once by one of the processes that share it."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedflat import data as datasets
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, require_remote
from fedflat.experiment.campaign.branch import branch_point
from fedflat.experiment.campaign.compare import existing_run, folder_name, how_many_at_once
from fedflat.experiment.campaign.processes import Results, side_by_side
from fedflat.experiment.campaign.sweep_file import (
    SweepFile,
    Values,
    all_placeholders,
    combinations,
    fill,
    flat,
    nested,
)
from fedflat.experiment.config import SHORT_NAMES, Config, config
from fedflat.experiment.run import Run
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.cleanup import Keep, remove_locked
from fedflat.experiment.store.files import LockedError, create_folder, is_free, locked, write_whole
from fedflat.experiment.store.run_folder import Awaited, Record, load_record
from fedflat.models import model_spec

INDEX = "sweep.json"
LONGEST = 100
"""Longest folder name in characters; the end of a longer one becomes a hash."""
SECONDS_BETWEEN_POLLS = 0.5
"""Between looks at runs that other processes hold."""


@dataclass(frozen=True)
class SweepRun(Awaited):
    """One run of a sweep."""

    name: str
    varied: Values
    """The settings that distinguish it from the other runs."""


@dataclass(frozen=True)
class Sweep:
    """A sweep file with the runs that it describes."""

    file: SweepFile
    out: Path
    runs: tuple[SweepRun, ...]


class SweepResult(NamedTuple):
    """A finished or failed run of a sweep."""

    run: SweepRun
    record: Record | None
    by: Literal["here", "before", "elsewhere"]
    """Done by this call, found finished, or done meanwhile by another process."""
    error: UserError | None = None


def plan_sweep(file: SweepFile, out: Path) -> Sweep:
    """List the runs of a sweep with their folders in ``out``, without writing anything."""
    base = _base_settings(file, out)
    varied = combinations(file)
    configs = [config_of({**base, **combination}, combination) for combination in varied]
    first_with: dict[Config, Values] = {}
    for combination, made in zip(varied, configs, strict=True):
        if made in first_with:
            raise UserError(
                f"{describe(first_with[made])} and {describe(combination)} are the same run; list each value once"
            )
        first_with[made] = combination
    _check_cluster(file, configs)
    runs = []
    for name, combination, made in zip(_names(varied, base), varied, configs, strict=True):
        filled = fill({**base, **combination})
        shown = {setting: filled.get(setting, value) for setting, value in combination.items()}
        runs.append(SweepRun(made, out / name, name, shown))
    return Sweep(file, out, tuple(runs))


def _check_cluster(file: SweepFile, configs: Sequence[Config]) -> None:
    if file.ray_address is None:
        return
    if file.devices:
        raise UserError(
            "devices lists GPUs of this machine, but ray_address runs the sweep on a cluster; leave one of them out"
        )
    if any(made.engine.name == "ray" for made in configs):
        raise UserError(
            "engine.name=ray spreads each run over a cluster, ray_address the whole sweep; leave one of them out"
        )


def _base_settings(file: SweepFile, out: Path) -> Values:
    """The settings that all runs share, by full name."""
    given = dict(flat(file.base))
    if not file.branch:
        return given
    for name in ("init", "init_rounds"):
        if name in given:
            raise UserError(f"{name} and branch both choose the initial weights; leave one of them out")
    start = branch_point(file.branch)
    start.check(out)
    return {**dict(flat(start.settings(out))), **given}


def config_of(values: Values, varied: Values) -> Config:
    """The config of settings by full name; errors name the combination ``varied``."""
    try:
        made = config(nested(fill(values)))
        _check_names(made.model, made.data.dataset, made.data.partition, made.data.augmentation)
        return made
    except UserError as error:
        raise UserError(f"the combination {describe(varied)} is not possible: {error}") from None


@lru_cache(maxsize=1024)
def _check_names(model: str, dataset: str, partition: str, augmentation: str) -> None:
    """Report unknown names now rather than when the run's turn comes."""
    model_spec(model)
    datasets.dataset_source(dataset)
    datasets.canonical_partition(partition)
    datasets.augmentation(augmentation)


def describe(varied: Values) -> str:
    """A combination in one line.

    >>> describe({"training.lr": 0.1, "seed": 0})
    'training.lr=0.1, seed=0'
    """
    return ", ".join(f"{name}={value}" for name, value in varied.items()) or "without changes"


def _names(varied: Sequence[Values], base: Values) -> list[str]:
    """Distinct, readable folder names that do not depend on the other combinations in the file."""
    plain = [_name(combination, base) for combination in varied]
    lower = [name.lower() for name in plain]
    usable = [lower.count(name.lower()) == 1 and len(name) <= LONGEST for name in plain]
    return [
        name if is_usable else _hashed(name, combination)
        for name, is_usable, combination in zip(plain, usable, varied, strict=True)
    ]


def _name(varied: Values, base: Values) -> str:
    """A combination as a folder name.

    >>> _name({"data.partition": "dirichlet(alpha={a})", "algorithm": "fedavg", "a": 0.1, "seed": 0}, {})
    'fedavg--partition-dirichlet_alpha_0.1--seed-0'
    """
    short = {full: name for name, full in SHORT_NAMES.items()}
    filled = fill({**base, **varied})
    # The texts of the combination already contain the values of its placeholders.
    inserted = all_placeholders(varied.values())
    texts = {
        name: folder_name(str(filled.get(name, value)))
        for name, value in varied.items()
        if name in filled or name not in inserted
    }
    parts = [texts.pop("algorithm")] if "algorithm" in texts else []
    last_words = [name.rpartition(".")[2] for name in texts]
    for (name, text), last in zip(texts.items(), last_words, strict=True):
        label = short.get(name, last if last_words.count(last) == 1 else name)
        parts.append(f"{label}-{text}")
    return "--".join(parts)


def _hashed(name: str, varied: Values) -> str:
    digest = hashlib.sha256(json.dumps(varied, sort_keys=True, default=str).encode()).hexdigest()[:10]
    return f"{name[: LONGEST - 12].rstrip('-_.')}--{digest}"


class AlreadyFinished(LockedError):
    """Another process has finished the run meanwhile."""


class LockedRun(NamedTuple):
    """A run for the process that locks its folder first."""

    config: Config
    folder: Path
    keep: Keep = Keep()
    user_objects: dict[str, Any] | None = None

    def go(self, callbacks: tuple[Callback, ...]) -> Record:
        """Start or resume the run.

        Raises:
            LockedError: another process is working on it.
            AlreadyFinished: another process has finished it.
        """
        with locked(self.folder):
            existing = existing_run(self.config, self.folder)
            finished = existing is not None and existing.status in ENDED_STATUSES
            if not finished:
                Run(self.config, self.folder, callbacks=callbacks, resume=existing is not None).go()
            remove_locked(self.folder, self.keep.removed)
        if finished:
            raise AlreadyFinished(f"{self.folder} is finished")
        return load_record(self.folder)


def run_sweep(
    sweep: Sweep,
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    waiting: Callable[[int], None] = lambda runs: None,
) -> Iterator[SweepResult]:
    """Do all unfinished runs of a sweep and yield results as they arrive; a run that fails does not stop the others.

    Several processes may run the same sweep; each run is done by one of them. Runs that others hold are checked again
    at the end, and resumed if their process was killed.

    Args:
        sweep: the planned sweep.
        callbacks: callbacks of all runs.
        jobs: runs at the same time; the file decides by default.
        waiting: called with the number of runs held by other processes before waiting for them.
    """
    finished_before = {run.name for run in sweep.runs if _is_finished(run)}
    if sweep.file.branch:
        with locked(sweep.out, wait=True):
            branch_point(sweep.file.branch).write(sweep.out)
    write_index(sweep)
    todo: list[SweepRun] = []
    for run in sweep.runs:
        if run.name in finished_before:
            _clean_up(run, sweep.file.keep)
            yield SweepResult(run, load_record(run.folder), "before")
        else:
            todo.append(run)
    reported = 0
    while todo:
        held = []
        with closing(_results(sweep, todo, callbacks, jobs)) as results:
            for index, outcome in results:
                if isinstance(outcome, LockedError) and not isinstance(outcome, AlreadyFinished):
                    held.append(todo[index])
                else:
                    yield _result(todo[index], outcome)
        todo = held
        if held and len(held) != reported:
            reported = len(held)
            waiting(reported)
        while held:
            time.sleep(SECONDS_BETWEEN_POLLS)  # at least once: locks of other machines are not always visible here
            if any(is_free(run.folder) for run in held):
                break


def _is_finished(run: SweepRun) -> bool:
    existing = existing_run(run.config, run.folder)
    return existing is not None and existing.status in ENDED_STATUSES


def _clean_up(run: SweepRun, keep: Keep) -> None:
    """Remove what a finished run does not keep, in case it was killed before it could."""
    if keep.removed:
        try:
            with locked(run.folder):
                remove_locked(run.folder, keep.removed)
        except LockedError:
            return


def _result(run: SweepRun, outcome: Record | UserError) -> SweepResult:
    if isinstance(outcome, AlreadyFinished):
        return SweepResult(run, load_record(run.folder), "elsewhere")
    if isinstance(outcome, UserError):
        return SweepResult(run, None, "here", outcome)
    return SweepResult(run, outcome, "here")


def _results(sweep: Sweep, todo: Sequence[SweepRun], callbacks: tuple[Callback, ...], jobs: int | None) -> Results:
    file = sweep.file
    if file.ray_address is not None:
        from fedflat.experiment.campaign.ray_sweep import run_on_cluster

        tasks = [LockedRun(run.config, run.folder.absolute(), file.keep) for run in todo]
        return run_on_cluster(tasks, file.ray_address, jobs or file.jobs, callbacks, sweep.out / INDEX)
    tasks = [LockedRun(run.config, run.folder, file.keep) for run in todo]
    devices = tuple(map(str, file.devices))
    processes = how_many_at_once([run.config for run in todo], callbacks, _requested_jobs(sweep, jobs), {})
    if processes > 1 or devices:
        return side_by_side(tasks, processes, require_remote(callbacks), devices)
    return _in_sequence(tasks, callbacks)


def _requested_jobs(sweep: Sweep, jobs: int | None) -> int | None:
    return jobs or sweep.file.jobs or len(sweep.file.devices) or None


def at_once(sweep: Sweep, jobs: int | None = None) -> int:
    """Number of runs that will run at the same time; on a cluster, the most that may."""
    if sweep.file.ray_address is not None:
        return min(len(sweep.runs), jobs or sweep.file.jobs or len(sweep.runs))
    return how_many_at_once([run.config for run in sweep.runs], (), _requested_jobs(sweep, jobs), {})


def _in_sequence(tasks: Sequence[LockedRun], callbacks: tuple[Callback, ...]) -> Results:
    for index, task in enumerate(tasks):
        try:
            yield index, task.go(callbacks)
        except UserError as error:
            yield index, error


def write_index(sweep: Sweep) -> None:
    """Write ``sweep.json``, which maps folder names to combinations."""
    text = json.dumps({"format": 1, "runs": {run.name: run.varied for run in sweep.runs}}, indent=1, default=str) + "\n"
    create_folder(sweep.out)
    with locked(sweep.out, wait=True):
        path = sweep.out / INDEX
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text)


def slug(source: str | Path) -> str:
    """A file's name as a folder name.

    >>> slug("sweeps/my rates.yaml")
    'my_rates'
    """
    return re.sub(r"[^\w.+-]+", "_", Path(source).stem)
