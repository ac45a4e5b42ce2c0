"""A sweep: every combination of a file is a run in a folder of its own, done once, by whichever process is there for it."""

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
from fedflat.experiment.campaign.branch import start
from fedflat.experiment.campaign.compare import begun_run, folder_name, how_many_at_once
from fedflat.experiment.campaign.processes import Results, side_by_side
from fedflat.experiment.campaign.sweep_file import SweepFile, Values, combinations, fill, flat, holes
from fedflat.experiment.config import SHORT, Config, config
from fedflat.experiment.run import Run
from fedflat.experiment.stopping import OVER
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.experiment.store.cleanup import Keep, remove_locked
from fedflat.experiment.store.lock import LockedError, is_free, locked
from fedflat.experiment.store.record import Record, load_record
from fedflat.experiment.store.run_folder import Awaited
from fedflat.models import model_spec

INDEX = "sweep.json"
LONGEST = 100
"""Letters of a folder's name from which on the rest is only a hash."""
SECONDS_BETWEEN_LOOKS = 0.5
"""At runs that other processes work on."""


@dataclass(frozen=True)
class Planned(Awaited):
    """One run of a sweep."""

    name: str
    varied: Values
    """What sets it apart, by setting."""


@dataclass(frozen=True)
class Sweep:
    """All that is to be run, and how."""

    file: SweepFile
    out: Path
    runs: tuple[Planned, ...]


class Done(NamedTuple):
    """What came of a run."""

    run: Planned
    record: Record | None
    by: Literal["here", "before", "elsewhere"]
    """Done by this call, there already, or done by another process meanwhile."""
    mistake: UserError | None = None


# --- planning -------------------------------------------------------------------------------------------------------------------------


def plan_sweep(file: SweepFile, out: Path) -> Sweep:
    """The runs of a sweep, each with its folder; nothing is written."""
    base = _base(file, out)
    runs = [(one, config_of({**base, **one}, one)) for one in combinations(file)]
    seen: dict[Config, Values] = {}
    for one, made in runs:
        if made in seen:
            raise UserError(f"{told(seen[made])} and {told(one)} are the same run; list each value once")
        seen[made] = one
    _check_cluster(file, [made for _, made in runs])
    names = _names([one for one, _ in runs], base)
    shown = [one | {name: value for name, value in fill({**base, **one}).items() if name in one} for one, _ in runs]
    planned = [Planned(made, out / name, name, one) for name, one, (_, made) in zip(names, shown, runs, strict=True)]
    return Sweep(file, out, tuple(planned))


def _check_cluster(file: SweepFile, configs: Sequence[Config]) -> None:
    if file.ray_address is None:
        return
    if file.devices:
        raise UserError(
            "devices are GPUs of this machine, and ray_address hands out those of a cluster; leave one of them out"
        )
    if any(made.engine.name == "ray" for made in configs):
        raise UserError(
            "engine.name=ray spreads each run over a cluster, and ray_address the sweep; leave one of them out"
        )


def _base(file: SweepFile, out: Path) -> Values:
    """The settings that all runs share."""
    begun = _begun(file.branch, out) if file.branch else {}
    given = dict(flat(file.base))
    clash = [name for name in ("init", "init_rounds") if file.branch and name in given]
    if clash:
        raise UserError(f"{clash[0]} is what branch says; leave one of them out")
    return {**begun, **given}


def _begun(branch: str, out: Path) -> Values:
    """The settings of the run that a sweep goes on from."""
    found = start(branch)
    found.check(out)
    return dict(flat(found.settings(out)))


def config_of(values: Values, varied: Values) -> Config:
    """The config of flat settings; a mistake names the combination."""
    nested: Values = {}
    for name, value in fill(values).items():
        *sections, last = name.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value
    try:
        made = config(nested)
        _check_texts(made.model, made.data.dataset, made.data.partition, made.data.augmentation)
        return made
    except UserError as mistake:
        raise UserError(f"the combination {told(varied)} is not possible: {mistake}") from None


@lru_cache(maxsize=1024)
def _check_texts(model: str, data: str, partition: str, augmentation: str) -> None:
    """Refuse names that a run would only find wrong once its turn has come."""
    model_spec(model)
    datasets.dataset_source(data)
    datasets.canonical_partition(partition)
    datasets.augmentation(augmentation)


def told(varied: Values) -> str:
    """A combination in words."""
    return ", ".join(f"{name}={value}" for name, value in varied.items()) or "without changes"


def _names(varied: Sequence[Values], base: Values) -> list[str]:
    """A folder's name for every combination: readable, the same whenever the file is read, and never one for two."""
    plain = [_name(one, base) for one in varied]
    lower = [name.lower() for name in plain]
    fine = [lower.count(name.lower()) == 1 and len(name) <= LONGEST for name in plain]
    return [name if good else _hashed(name, one) for name, good, one in zip(plain, fine, varied, strict=True)]


def _name(one: Values, base: Values) -> str:
    """What sets a run apart, as a folder's name.

    >>> _name({"data.partition": "dirichlet(alpha={a})", "algorithm": "fedavg", "a": 0.1, "seed": 0}, {})
    'fedavg--split-dirichlet_alpha_0.1--seed-0'
    """
    short = {full: name for name, full in SHORT.items()}
    filled = fill({**base, **one})
    stand_ins = set().union(*map(holes, one.values()))
    texts = {
        name: folder_name(str(filled.get(name, value)))
        for name, value in one.items()
        if name in filled or name not in stand_ins
    }
    shown = [texts.pop("algorithm")] if "algorithm" in texts else []
    lasts = [name.rpartition(".")[2] for name in texts]
    labels = [
        short.get(name, last if lasts.count(last) == 1 else name) for name, last in zip(texts, lasts, strict=True)
    ]
    return "--".join([*shown, *(f"{label}-{text}" for label, text in zip(labels, texts.values(), strict=True))])


def _hashed(name: str, one: Values) -> str:
    digest = hashlib.sha256(json.dumps(one, sort_keys=True, default=str).encode()).hexdigest()[:10]
    return f"{name[: LONGEST - 12].rstrip('-_.')}--{digest}"


# --- running --------------------------------------------------------------------------------------------------------------------------


class Over(LockedError):
    """Another process has done the run meanwhile."""


class Claimed(NamedTuple):
    """A run that is done by the process that claims it first."""

    config: Config
    folder: Path
    keep: Keep = Keep()
    own: dict[str, Any] | None = None

    def go(self, callbacks: tuple[Callback, ...]) -> Record:
        """Do it, or go on with it; ``LockedError`` while another process does, ``Over`` once it has."""
        with locked(self.folder):
            begun = begun_run(self.config, self.folder)
            over = begun is not None and begun.status in OVER
            if not over:
                Run(self.config, self.folder, callbacks=callbacks, resume=begun is not None).go()
            remove_locked(self.folder, self.keep.removed)
        if over:
            raise Over(f"{self.folder} is over")
        return load_record(self.folder)


def run_sweep(
    sweep: Sweep,
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    waiting: Callable[[int], None] = lambda runs: None,
) -> Iterator[Done]:
    """Do all runs of a sweep that are not over, several at a time, and tell of each as it ends; a run that fails stops no other.

    Several processes may do the same sweep: each run is done by one of them. Runs that others hold are looked at again at the end, and
    gone on with where their process was killed; ``waiting`` is told how many there are.
    """
    before = {run.name for run in sweep.runs if _over(run)}
    if sweep.file.branch:
        with locked(sweep.out, wait=True):
            start(sweep.file.branch).write(sweep.out)
    write_index(sweep)
    todo: list[Planned] = []
    for run in sweep.runs:
        if run.name in before:
            _tidy(run, sweep.file.keep)
            yield Done(run, load_record(run.folder), "before")
        else:
            todo.append(run)
    told_of = 0
    while todo:
        held = []
        with closing(_results(sweep, todo, callbacks, jobs)) as results:
            for number, outcome in results:
                if isinstance(outcome, LockedError) and not isinstance(outcome, Over):
                    held.append(todo[number])
                else:
                    yield _done(todo[number], outcome)
        todo = held
        if held and len(held) != told_of:
            told_of = len(held)
            waiting(told_of)
        while held:
            time.sleep(SECONDS_BETWEEN_LOOKS)  # at least once: locks of other machines are not always seen from here
            if any(is_free(run.folder) for run in held):
                break


def _over(run: Planned) -> bool:
    begun = begun_run(run.config, run.folder)
    return begun is not None and begun.status in OVER


def _tidy(run: Planned, keep: Keep) -> None:
    """Remove what is not kept of a run that was killed between its end and that."""
    if keep.removed:
        try:
            with locked(run.folder):
                remove_locked(run.folder, keep.removed)
        except LockedError:
            return


def _done(run: Planned, outcome: Record | UserError) -> Done:
    if isinstance(outcome, Over):
        return Done(run, load_record(run.folder), "elsewhere")
    return Done(run, None, "here", outcome) if isinstance(outcome, UserError) else Done(run, outcome, "here")


def _results(sweep: Sweep, todo: Sequence[Planned], callbacks: tuple[Callback, ...], jobs: int | None) -> Results:
    work = [Claimed(run.config, run.folder, sweep.file.keep) for run in todo]
    if sweep.file.ray_address is not None:
        from fedflat.experiment.campaign.ray_sweep import spread

        work = [one._replace(folder=one.folder.absolute()) for one in work]
        return spread(work, sweep.file.ray_address, jobs or sweep.file.jobs, callbacks, sweep.out / INDEX)
    devices = tuple(map(str, sweep.file.devices))
    together = how_many_at_once([run.config for run in todo], callbacks, _wanted(sweep, jobs), {})
    if together > 1 or devices:
        return side_by_side(work, together, require_remote(callbacks), devices)
    return one_by_one(work, callbacks)


def _wanted(sweep: Sweep, jobs: int | None) -> int | None:
    return jobs or sweep.file.jobs or len(sweep.file.devices) or None


def at_once(sweep: Sweep, jobs: int | None = None) -> int:
    """How many of its runs will be done at the same time; on a cluster, as many as it may turn out to have room for."""
    if sweep.file.ray_address is not None:
        return min(len(sweep.runs), jobs or sweep.file.jobs or len(sweep.runs))
    return how_many_at_once([run.config for run in sweep.runs], (), _wanted(sweep, jobs), {})


def one_by_one(work: Sequence[Claimed], callbacks: tuple[Callback, ...]) -> Results:
    """Every run's number and record, or why there is none, one after another in this process."""
    for number, one in enumerate(work):
        try:
            yield number, one.go(callbacks)
        except UserError as mistake:
            yield number, mistake


def write_index(sweep: Sweep) -> None:
    """Write which folder is which combination, where that is not said yet."""
    text = json.dumps({"format": 1, "runs": {run.name: run.varied for run in sweep.runs}}, indent=1, default=str) + "\n"
    create_folder(sweep.out)
    with locked(sweep.out, wait=True):
        path = sweep.out / INDEX
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text)


def slug(source: str | Path) -> str:
    """A file's name as that of a folder.

    >>> slug("sweeps/my rates.yaml")
    'my_rates'
    """
    return re.sub(r"[^\w.+-]+", "_", Path(source).stem)
