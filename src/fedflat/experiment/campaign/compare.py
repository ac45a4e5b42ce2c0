"""Compare algorithms over seeds; all runs with one seed share the partition, cohorts and batches."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedflat.algorithms import algorithm, canonical
from fedflat.data import Dataset
from fedflat.errors import UserError, error_of_runs
from fedflat.experiment.callback import Callback, RemoteCallback, require_remote
from fedflat.experiment.campaign.processes import run_in_parallel, run_in_sequence, unsendable_names
from fedflat.experiment.config import Config, describe_difference
from fedflat.experiment.run import Run
from fedflat.experiment.setup.engine import MIN_STEPS_FOR_PROCESSES, SMALL_MODEL, require_same_compile, total_steps
from fedflat.experiment.setup.problem import decide_precision, device_of, load_data
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.provenance import fingerprints, require_same_inputs
from fedflat.experiment.store.run_collection import forget_order, runs_below, save_order
from fedflat.experiment.store.run_folder import Record, RunFolder, load_record
from fedflat.models import parameter_count
from fedflat.processes import available_cores, is_sendable
from fedflat.registry import changed_plugins


class ResumableRun(NamedTuple):
    """A run to start or, if its folder has it already, to continue or load."""

    config: Config
    folder: Path | None = None
    user_objects: dict[str, Any] | None = None

    def execute(self, callbacks: tuple[Callback, ...]) -> Record:
        """Return the record of the run once it has ended in this process, or in another one before this call."""
        existing = existing_run(self.config, self.folder)
        if existing is not None and existing.has_ended:
            return load_record(existing.path)
        options = self.user_objects or {}
        return Run(self.config, self.folder, callbacks=callbacks, resume=existing is not None, **options).execute()

    def __str__(self) -> str:
        return f"{self.config.algorithm}, seed {self.config.seed}"


def reject_varied_settings(names: Iterable[str], remedies: Mapping[str, str]) -> None:
    """Raise a ``UserError`` if the settings ``names`` include one that a comparison varies, a key of ``remedies``."""
    for name in names:
        if name in remedies:
            raise UserError(f"a comparison sets {name} itself; {remedies[name]} instead")


def compare(
    base: Config,
    algorithms: Sequence[str],
    seeds: int | Sequence[int],
    out: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    **user_objects: Any,
) -> Iterator[Record]:
    """Run every algorithm with every seed.

    Args:
        base: settings that all runs share.
        algorithms: algorithms as text, e.g. ``"fedsam(rho=0.1)"``.
        seeds: number of seeds (0, 1, ...), or the seeds themselves.
        out: folder for the runs. Finished runs in it are loaded, interrupted ones resumed.
        callbacks: callbacks of all runs.
        jobs: number of concurrent runs; default: one per core if runs are small, otherwise one.
        user_objects: user-supplied ``data``, ``model`` and ``task``.

    Yields:
        One record per run, by seed and then by algorithm, whatever the order in which runs finish.
    """
    texts = [canonical(algorithm(text)) for text in algorithms]
    for text in texts:
        if texts.count(text) > 1:
            raise UserError(f"the comparison lists {text} twice; list each algorithm once")
    numbers = seed_numbers(seeds)
    configs = [base.changed(algorithm=text, seed=seed) for seed in numbers for text in texts]
    folders: list[Path] = []
    if out is not None:
        require_outside_runs(out)
        folders = comparison_folders(out, texts, numbers)
        save_order(out, folders)
    try:
        yield from run_each(configs, folders or [None] * len(configs), callbacks, jobs, **user_objects)
    except UserError:
        if out is not None:
            forget_order(out, folders)
        raise


def comparison_folders(out: Path, algorithms: Sequence[str], seeds: Sequence[int]) -> list[Path]:
    """The folders of a comparison's runs below ``out``, by seed and then by algorithm."""
    names = [folder_name(canonical(algorithm(text))) for text in algorithms]
    return [out / name / f"seed-{seed}" for seed in seeds for name in names]


def finished_runs(out: Path | None, algorithms: Sequence[str], seeds: Sequence[int]) -> int:
    """The number of finished runs of a comparison below ``out``; 0 if it is not saved."""
    folders = [] if out is None else comparison_folders(out, algorithms, seeds)
    return sum(RunFolder(folder).has_ended for folder in folders)


def finished_records(out: Path, base: Config) -> list[Record]:
    """All finished, readable runs below ``out`` that differ from ``base`` only in algorithm and seed."""
    records = []
    for path in runs_below(out):
        with suppress(UserError):  # the run is unreadable or has other settings
            recorded = RunFolder(path).config()
            run = existing_run(base.changed(algorithm=recorded.algorithm, seed=recorded.seed), path)
            records += [load_record(path)] if run is not None and run.has_ended else []
    return records


def require_outside_runs(out: Path) -> None:
    """Raise a ``UserError`` if ``out`` is a run folder or lies in one."""
    for folder in (out.absolute(), *out.absolute().parents):
        if RunFolder(folder).exists and (folder / "status.json").is_file():
            raise UserError(f"{out} is in the run folder {folder}; choose a folder outside it with --out")


def seed_numbers(seeds: Any) -> list[int]:
    """Seeds as Python integers, given a number of seeds or a sequence; NumPy and torch integers are accepted."""
    try:
        try:  # this first: a tensor with a single seed could also be read as a number of seeds
            sequence: Iterable[Any] = list(seeds)
        except TypeError:
            sequence = range(operator.index(seeds))
        numbers = [operator.index(seed) for seed in sequence]
    except TypeError:
        numbers = []
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise UserError(
            f"cannot compare with seeds={seeds!r}; expected their number (3) or distinct seeds of 0 or more ([0, 1, 2])"
        )
    return numbers


def run_each(
    configs: Sequence[Config],
    folders: Sequence[Path | None],
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    **user_objects: Any,
) -> Iterator[Record]:
    """Run every config in its folder and yield the records in order.

    Finished runs are loaded, and interrupted ones are resumed. A run that fails does not stop the others; after the
    last record, ``SomeFailed`` is raised, or a ``UserError`` if all runs failed with the same message.

    Args:
        configs: the runs.
        folders: the folder of each run; None if the run is not saved.
        callbacks: callbacks of all runs.
        jobs: number of concurrent runs; default: one per core if runs are small, otherwise one.
        user_objects: user-supplied ``data``, ``model`` and ``task``.
    """
    inputs = CurrentInputs(user_objects)
    outcomes: dict[int, Record | UserError] = {}  # by position in ``configs``
    unfinished: dict[int, ResumableRun] = {}  # likewise
    warn_about_changed_plugins(folders)
    for position, (config, folder) in enumerate(zip(configs, folders, strict=True)):
        try:
            existing = existing_run(config, folder, inputs)
            if existing is not None and existing.has_ended:
                outcomes[position] = load_record(existing.path)
                continue
        except DamagedFile as error:
            outcomes[position] = error
            continue
        unfinished[position] = ResumableRun(config, folder, user_objects)
    positions, runs = list(unfinished), list(unfinished.values())
    at_once = parallel_runs([run.config for run in runs], callbacks, jobs, user_objects)
    if at_once > 1:
        running = run_in_parallel(runs, at_once, require_remote(callbacks))
    else:
        running = run_in_sequence(runs, callbacks)
    errors: list[tuple[ResumableRun, UserError]] = []
    with closing(running) as results:
        for position in range(len(configs)):
            while position not in outcomes:  # yield in order, although runs finish in any order
                index, outcome = next(results)
                outcomes[positions[index]] = outcome
            outcome = outcomes[position]
            if isinstance(outcome, UserError):
                errors.append((ResumableRun(configs[position]), outcome))
            else:
                yield outcome
    if errors:
        raise error_of_runs(errors, len(configs))


def warn_about_changed_plugins(folders: Sequence[Path | None]) -> None:
    """Warn if a plugin has changed since runs in ``folders`` began: they are not repeated with the new content."""
    changed = {folder: changed_plugins(RunFolder(folder).plugins()) for folder in folders if folder is not None}
    runs = [str(folder) for folder, names in changed.items() if names]
    if runs:
        plugins = ", ".join(dict.fromkeys(name for names in changed.values() for name in names))
        warnings.warn(
            f"{plugins} has changed since {len(runs)} of these runs began, or is not loaded now, and they are not "
            f"repeated: {', '.join(runs)}; to train them with other code, use --out NEW or remove their folders",
            stacklevel=2,
        )


class CurrentInputs:
    """Fingerprints of the inputs that runs would begin with now; every dataset and weights file is read at most once.

    Args:
        user_objects: user-supplied ``data``, ``model`` and ``task``.
    """

    def __init__(self, user_objects: Mapping[str, Any]) -> None:
        self._objects = fingerprints({**user_objects, "data": None})
        self._data: Dataset | None = user_objects.get("data")
        self._data_fingerprints: dict[tuple[object, ...], dict[str, str]] = {}
        self._init_fingerprints: dict[Path | None, dict[str, str]] = {}

    def of(self, config: Config) -> dict[str, str]:
        """The fingerprints of a config's data and initial weights, if they can be read, and of the user's objects."""
        key = config.data.dataset, config.data.dir, config.training.task
        if key not in self._data_fingerprints:
            self._data_fingerprints[key] = self._fingerprint_data(config)
        if config.init not in self._init_fingerprints:
            self._init_fingerprints[config.init] = fingerprints({}, config.init)
        return self._objects | self._data_fingerprints[key] | self._init_fingerprints[config.init]

    def _fingerprint_data(self, config: Config) -> dict[str, str]:
        try:
            return fingerprints({"data": load_data(config, self._data, download=False)})
        except UserError as error:  # finished runs can be read without their data
            warnings.warn(f"cannot check whether the data of existing runs have changed: {error}", stacklevel=2)
            return {}


def existing_run(config: Config, path: Path | None, inputs: CurrentInputs | None = None) -> RunFolder | None:
    """The folder ``path`` if it contains a run, otherwise None.

    Args:
        config: the run's config.
        path: the folder.
        inputs: what a new run would begin with; default: only the settings are compared.

    Raises:
        UserError: the run there has other settings, or began with other data or weights, another model or task.
    """
    if not path or not RunFolder(path).exists:
        return None
    folder = RunFolder(path)
    recorded = folder.config()
    differing = describe_difference(recorded, decide_precision(config, recorded))
    if differing:
        raise UserError(f"{path} holds a run with other settings ({differing}); choose another --out or remove it")
    require_same_compile(path, config, recorded)
    if inputs is not None:
        require_same_inputs(folder, inputs.of(config))
    return folder


def parallel_runs(
    configs: Sequence[Config], callbacks: tuple[Callback, ...], jobs: int | None, user_objects: dict[str, Any]
) -> int:
    """The number of concurrent runs.

    Args:
        configs: the runs; only the first is examined for engine and size.
        callbacks: callbacks of all runs.
        jobs: the requested number; if None, one per core where that is faster, otherwise one.
        user_objects: user-supplied ``data``, ``model`` and ``task``.

    Raises:
        UserError: ``jobs`` is more than one, but the runs cannot execute in other processes.
    """
    runs = len(configs)
    if jobs == 1 or runs < 2:
        return 1
    obstacle = _obstacle_to_processes(configs, callbacks, user_objects)
    if jobs is None:
        if obstacle or not _are_faster_in_parallel(configs[0], runs, user_objects):
            return 1
        return min(available_cores(), runs)
    if obstacle:
        raise UserError(f"cannot execute {jobs} runs in parallel: {obstacle}; use jobs=1")
    return min(jobs, runs)


def _obstacle_to_processes(
    configs: Sequence[Config], callbacks: tuple[Callback, ...], user_objects: dict[str, Any]
) -> str:
    """Why runs cannot execute in child processes; empty if they can."""
    workers = configs[0].engine.workers
    for callback in callbacks:
        if not isinstance(callback, RemoteCallback):
            return f"{type(callback).__name__} is not a RemoteCallback and needs the run in this process"
    if workers is not None and workers > 1:
        return f"engine.workers={workers} already gives each run several processes"
    if not is_sendable(user_objects):
        return "the running script defines the data, model or task, which other processes cannot import"
    local_names = unsendable_names(configs)
    if local_names:
        names = " and ".join(local_names)
        return f"other processes cannot import {names} from the running script, only from a file that it imports"
    return ""


def _are_faster_in_parallel(base: Config, runs: int, user_objects: dict[str, Any]) -> bool:
    """Whether one run is too small to use all cores, and all runs together are long enough to start processes."""
    if available_cores() < 2 or base.engine.name in ("lanes", "ray"):
        return False
    with suppress(UserError):  # the run itself will report that its device, data or model cannot be used
        if device_of(base).type != "cpu":
            return False
        data = load_data(base, user_objects.get("data"))
        model = user_objects.get("model")
        if model is None:
            parameters = parameter_count(base.model, data.input_shape, data.num_outputs)
        else:
            parameters = sum(parameter.numel() for parameter in model.parameters())
        return parameters <= SMALL_MODEL and runs * total_steps(base, len(data.train)) >= MIN_STEPS_FOR_PROCESSES
    return False


def folder_name(text: str) -> str:
    """An algorithm as a folder name.

    >>> folder_name("fedmoswa+asam(rho=0.3)")
    'fedmoswa+asam_rho_0.3'
    """
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")
