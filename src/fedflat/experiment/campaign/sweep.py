"""Sweeps: each combination of settings in a sweep file is a run in its own folder.

Several processes may share the folder of a sweep. Each run is then executed once, by one of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedflat import data as datasets
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, require_remote
from fedflat.experiment.campaign.branch import branch_point
from fedflat.experiment.campaign.compare import (
    CurrentInputs,
    existing_run,
    folder_name,
    parallel_runs,
    warn_about_changed_plugins,
)
from fedflat.experiment.campaign.estimate import PlannedRun
from fedflat.experiment.campaign.processes import Results, run_in_parallel, run_in_sequence
from fedflat.experiment.campaign.sweep_file import (
    SweepFile,
    Values,
    all_placeholders,
    combinations,
    fill_placeholders,
)
from fedflat.experiment.config import Config, parse_config
from fedflat.experiment.run import Run
from fedflat.experiment.store.cleanup import Keep, remove_locked
from fedflat.experiment.store.files import DamagedFile, LockedError, create_folder, is_free, locked, write_atomically
from fedflat.experiment.store.run_collection import SWEEP
from fedflat.experiment.store.run_folder import Record, load_record
from fedflat.models import model_spec
from fedflat.setting_names import SHORT_NAMES, flat, nest

MAX_NAME_LENGTH = 100
"""Longest folder name in characters; a hash replaces the end of a longer one."""
HASH_LENGTH = 10
SECONDS_BETWEEN_POLLS = 0.5
"""Seconds between two checks whether other processes have finished their runs."""


@dataclass(frozen=True)
class SweepRun(PlannedRun):
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
    """None if the run failed."""
    by: Literal["here", "before", "elsewhere"]
    """Who executed the run: this call, an earlier call, or another process during this call."""
    error: UserError | None = None


def plan_sweep(file: SweepFile, out: Path) -> Sweep:
    """List the runs of a sweep with their folders in ``out``, without writing anything."""
    base = _base_settings(file, out)
    varied = combinations(file)
    configs = [make_run_config(base, combination) for combination in varied]
    _check_distinct(varied, configs)
    _check_cluster(file, configs)
    runs = []
    for name, combination, run_config in zip(_folder_names(varied, base), varied, configs, strict=True):
        settings = fill_placeholders({**base, **combination})
        # Placeholders such as rho are part of a combination but are not settings, so they keep their values.
        filled_combination = {key: settings.get(key, value) for key, value in combination.items()}
        runs.append(SweepRun(run_config, out / name, name, filled_combination))
    return Sweep(file, out, tuple(runs))


def _check_distinct(varied: Sequence[Values], configs: Sequence[Config]) -> None:
    """Raise a ``UserError`` if two combinations of settings give the same config."""
    combination_of: dict[Config, Values] = {}
    for combination, run_config in zip(varied, configs, strict=True):
        if run_config in combination_of:
            first = describe(combination_of[run_config])
            raise UserError(f"{first} and {describe(combination)} are the same run; list each value once")
        combination_of[run_config] = combination


def _check_cluster(file: SweepFile, configs: Sequence[Config]) -> None:
    """Raise a ``UserError`` if the file's ``ray_address`` contradicts other settings."""
    if file.ray_address is None:
        return
    if file.devices:
        raise UserError(
            "devices lists GPUs of this machine, but ray_address runs the sweep on a cluster; leave one of them out"
        )
    if any(run_config.engine.name == "ray" for run_config in configs):
        raise UserError(
            "engine.name=ray spreads each run over a cluster, ray_address the whole sweep; leave one of them out"
        )


def _base_settings(file: SweepFile, out: Path) -> Values:
    """The settings that all runs share, by full name, including those that branches inherit from the original run."""
    settings = dict(flat(file.base))
    if not file.branch:
        return settings
    for name in ("init", "init_rounds"):
        if name in settings:
            raise UserError(f"{name} and branch both choose the initial weights; leave one of them out")
    start = branch_point(file.branch)
    start.check(out)
    return dict(flat(start.settings(out))) | settings


def make_run_config(base: Values, varied: Values) -> Config:
    """Build the config of one run and check the names of its components.

    Args:
        base: settings that all runs share, by full name.
        varied: the settings that distinguish the run; they are listed in error messages.
    """
    try:
        run_config = parse_config(nest(fill_placeholders({**base, **varied})))
        data = run_config.data
        check_names(run_config.model, data.dataset, data.partition, data.augmentation)
        return run_config
    except UserError as error:
        raise UserError(f"the combination {describe(varied)} is not possible: {error}") from None


@lru_cache(maxsize=1024)
def check_names(model: str, dataset: str, partition: str, augmentation: str) -> None:
    """Raise a ``UserError`` for an unknown name now, not only when the run starts."""
    model_spec(model)
    datasets.dataset_source(dataset)
    datasets.canonical_partition(partition)
    datasets.augmentation(augmentation)


def describe(varied: Values) -> str:
    """A combination of settings in one line, for messages.

    >>> describe({"training.lr": 0.1, "seed": 0})
    'training.lr=0.1, seed=0'
    """
    return ", ".join(f"{name}={value}" for name, value in varied.items()) or "without changes"


def _folder_names(varied: Sequence[Values], base: Values) -> list[str]:
    """A readable folder name for each combination, with a hash where names are too long or differ only in case."""
    readable = [_folder_name(combination, base) for combination in varied]
    counts = Counter(name.lower() for name in readable)
    names = []
    for name, combination in zip(readable, varied, strict=True):
        if counts[name.lower()] > 1 or len(name) > MAX_NAME_LENGTH:
            digest = hashlib.sha256(json.dumps(combination, sort_keys=True, default=str).encode()).hexdigest()
            start = name[: MAX_NAME_LENGTH - HASH_LENGTH - len("--")].rstrip("-_.")
            name = f"{start}--{digest[:HASH_LENGTH]}"
        names.append(name)
    return names


def _folder_name(varied: Values, base: Values) -> str:
    """A readable folder name for a combination: the algorithm, then ``setting-value`` pairs.

    A combination may also contain values of placeholders, such as ``a`` below. If one of its texts contains the
    placeholder, the value is left out, because the text shows it.

    Args:
        varied: the settings and placeholders of the combination, by name.
        base: settings that all runs share, by full name.

    >>> _folder_name({"data.partition": "dirichlet(alpha={a})", "algorithm": "fedavg", "a": 0.1, "seed": 0}, {})
    'fedavg--partition-dirichlet_alpha_0.1--seed-0'
    """
    short_names = {full: short for short, full in SHORT_NAMES.items()}
    filled = fill_placeholders({**base, **varied})
    placeholders_in_texts = all_placeholders(varied.values())
    texts = {}
    for setting, value in varied.items():
        is_shown_in_a_text = setting not in filled and setting in placeholders_in_texts
        if not is_shown_in_a_text:
            texts[setting] = folder_name(str(filled.get(setting, value)))
    parts = [texts.pop("algorithm")] if "algorithm" in texts else []
    last_words = Counter(setting.rpartition(".")[2] for setting in texts)
    for setting, text in texts.items():
        last_word = setting.rpartition(".")[2]
        label = last_word if last_words[last_word] == 1 else setting
        parts.append(f"{short_names.get(setting, label)}-{text}")
    return "--".join(parts)


class AlreadyFinished(LockedError):
    """Another process has finished the run in the meantime."""


class LockedRun(NamedTuple):
    """A run of a sweep, executed by whichever process locks its folder first."""

    config: Config
    folder: Path
    keep: Keep = Keep()
    user_objects: dict[str, Any] | None = None

    def execute(self, callbacks: tuple[Callback, ...]) -> Record:
        """Start or resume the run.

        Raises:
            LockedError: another process is working on it.
            AlreadyFinished: another process has finished it.
        """
        with locked(self.folder):
            existing = existing_run(self.config, self.folder)
            is_finished = existing is not None and existing.has_ended
            if not is_finished:
                Run(self.config, self.folder, callbacks=callbacks, resume=existing is not None).execute()
            remove_locked(self.folder, self.keep.removed)
        if is_finished:
            raise AlreadyFinished(f"{self.folder} is finished")
        return load_record(self.folder)


def run_sweep(
    sweep: Sweep,
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    on_wait: Callable[[int], None] = lambda runs: None,
) -> Iterator[SweepResult]:
    """Execute all unfinished runs of a sweep and yield results as they arrive; a failing run does not stop the others.

    Several processes may run the same sweep; one of them executes each run. At the end, this process waits for the
    runs that others hold, and resumes those whose process was killed.

    Args:
        sweep: the planned sweep.
        callbacks: callbacks of all runs.
        jobs: number of concurrent runs; default: as in the file.
        on_wait: called with the number of runs held by other processes before waiting for them.
    """
    # This also rejects folders that hold runs with other settings or data, before any run starts.
    inputs = CurrentInputs({})
    finished_before = {run.name for run in sweep.runs if _is_finished(run, inputs)}
    warn_about_changed_plugins([run.folder for run in sweep.runs])
    if sweep.file.branch:
        with locked(sweep.out, wait=True):
            branch_point(sweep.file.branch).write(sweep.out)
    write_index(sweep)
    unfinished: list[SweepRun] = []
    for run in sweep.runs:
        if run.name in finished_before:
            _clean_up(run, sweep.file.keep)
            yield _load_result(run, "before")
        else:
            unfinished.append(run)
    reported = 0  # the number of waiting runs that ``on_wait`` was last called with
    while unfinished:
        held_by_others = []
        with closing(_start_runs(sweep, unfinished, callbacks, jobs)) as outcomes:
            for index, outcome in outcomes:
                if isinstance(outcome, LockedError) and not isinstance(outcome, AlreadyFinished):
                    held_by_others.append(unfinished[index])
                else:
                    yield _result(unfinished[index], outcome)
        unfinished = held_by_others
        if unfinished and len(unfinished) != reported:
            reported = len(unfinished)
            on_wait(reported)
        while unfinished:
            time.sleep(SECONDS_BETWEEN_POLLS)  # at least once: locks of other machines are not always visible here
            if any(is_free(run.folder) for run in unfinished):
                break


def _is_finished(run: SweepRun, inputs: CurrentInputs) -> bool:
    """Whether the run has ended; raises a ``UserError`` if its folder holds a run with other settings or data."""
    try:
        existing = existing_run(run.config, run.folder, inputs)
    except DamagedFile:
        return False  # the error is reported when this run is to start
    return existing is not None and existing.has_ended


def _clean_up(run: SweepRun, keep: Keep) -> None:
    """Delete the files that ``keep`` excludes, in case the run's process was killed before it deleted them."""
    if keep.removed:
        with suppress(LockedError), locked(run.folder):  # a process that holds the lock cleans up itself
            remove_locked(run.folder, keep.removed)


def _load_result(run: SweepRun, by: Literal["before", "elsewhere"]) -> SweepResult:
    """The result of a run that was executed before or elsewhere; an error if its files are damaged."""
    try:
        return SweepResult(run, load_record(run.folder), by)
    except DamagedFile as error:
        return SweepResult(run, None, by, error)


def _result(run: SweepRun, outcome: Record | UserError) -> SweepResult:
    """The result of a run that this call has attempted."""
    if isinstance(outcome, AlreadyFinished):
        return _load_result(run, "elsewhere")
    if isinstance(outcome, UserError):
        return SweepResult(run, None, "here", outcome)
    return SweepResult(run, outcome, "here")


def _start_runs(sweep: Sweep, runs: Sequence[SweepRun], callbacks: tuple[Callback, ...], jobs: int | None) -> Results:
    """Execute runs on a Ray cluster, in child processes or in this process, depending on the file and ``jobs``."""
    file = sweep.file
    if file.ray_address is not None:
        from fedflat.experiment.campaign.ray_sweep import run_on_cluster

        tasks = [LockedRun(run.config, run.folder.absolute(), file.keep) for run in runs]
        return run_on_cluster(tasks, file.ray_address, jobs or file.jobs, callbacks, sweep.out / SWEEP)
    tasks = [LockedRun(run.config, run.folder, file.keep) for run in runs]
    devices = tuple(map(str, file.devices))
    processes = parallel_runs([run.config for run in runs], callbacks, _requested_jobs(sweep, jobs), {})
    if processes > 1 or devices:
        return run_in_parallel(tasks, processes, require_remote(callbacks), devices)
    return run_in_sequence(tasks, callbacks)


def _requested_jobs(sweep: Sweep, jobs: int | None) -> int | None:
    """The number of jobs given by the caller or by the file, or one per listed GPU; None without any of these."""
    return jobs or sweep.file.jobs or len(sweep.file.devices) or None


def runs_at_once(sweep: Sweep, jobs: int | None = None) -> int:
    """The number of concurrent runs of a sweep; on a cluster, an upper bound."""
    if sweep.file.ray_address is not None:
        return min(len(sweep.runs), jobs or sweep.file.jobs or len(sweep.runs))
    return parallel_runs([run.config for run in sweep.runs], (), _requested_jobs(sweep, jobs), {})


def write_index(sweep: Sweep) -> None:
    """Write ``sweep.json``, which maps the name of each run's folder to its combination."""
    text = json.dumps({"format": 1, "runs": {run.name: run.varied for run in sweep.runs}}, indent=1, default=str) + "\n"
    create_folder(sweep.out)
    with locked(sweep.out, wait=True):
        path = sweep.out / SWEEP
        if not path.is_file() or path.read_bytes() != text.encode():
            write_atomically(path, text)


def slug(source: str | Path) -> str:
    """The name of a sweep file as a folder name.

    >>> slug("sweeps/my rates.yaml")
    'my_rates'
    """
    return re.sub(r"[^\w.+-]+", "_", Path(source).stem)
