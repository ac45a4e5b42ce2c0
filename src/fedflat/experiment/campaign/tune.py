"""A search for the settings with the best validation metric, by Optuna; any number of processes may work on it.

The test set chooses nothing: trials are scored on examples held out of the training set, and the chosen one alone is evaluated on the
test set, once, at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedflat.errors import UserError
from fedflat.experiment.analysis.reopen import primary_model
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.campaign.optuna_study import JOURNAL, Study
from fedflat.experiment.campaign.ranking import last_score, metric_of
from fedflat.experiment.campaign.sweep import SECONDS_BETWEEN_LOOKS, Claimed, Over, config_of, told
from fedflat.experiment.campaign.sweep_file import Range, SweepFile, Tune, Values, check_names, flat, holes
from fedflat.experiment.config import SHORT, Config, changes_results, setting_names
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.experiment.store.lock import LockedError, is_free, locked
from fedflat.experiment.store.record import Record, load_record

BEST = "best.json"


class Pruned(Exception):
    """A trial is worse than half of the others after as many rounds."""


@dataclass(frozen=True)
class Search:
    """A search, checked."""

    base: Values
    space: dict[str, Range | list[Any]]
    tune: Tune
    file: SweepFile
    out: Path

    def config(self, values: Values, seed: int) -> Config:
        """One run of a trial."""
        return config_of({**self.base, **values, "seed": seed}, values)

    def decides(self) -> Values:
        """All that decides what trials try and how they score, by setting: everything but the number of trials, and where they are run."""
        first = self.config(next(corners(self.space)), self.tune.seeds[0])
        settings = {
            name: value
            for name, value in flat(first.model_dump(mode="json"))
            if changes_results(name) and name != "seed"
        }
        # What stands for braces, and texts with braces, say more than one trial's config does.
        written = {
            name: value
            for name, value in self.base.items()
            if holes(value) or name not in {*setting_names(), "flatness"}
        }
        space = {
            f"tune.space.{name}": values if isinstance(values, list) else values.model_dump(mode="json")
            for name, values in self.space.items()
        }
        how = {
            f"tune.{name}": value
            for name, value in self.tune.model_dump(mode="json", exclude={"trials", "space"}).items()
        }
        return {name: value for name, value in {**settings, **written}.items() if name not in self.space} | space | how

    def folder(self, number: int) -> Path:
        """Where a trial lies."""
        return self.out / f"trial-{number:04d}"


class Tried(NamedTuple):
    """What came of a trial."""

    number: int
    values: Values
    state: str
    """complete, pruned or failed."""
    score: float | None
    mistake: str = ""


# --- checking -------------------------------------------------------------------------------------------------------------------------


def plan_search(file: SweepFile, out: Path) -> Search:
    """The search of a file; nothing is written."""
    if file.tune is None:
        raise UserError(
            "there is no search in this file; expected a part tune with a space, for example {rate: {low: 0.01, high: 1}}"
        )
    if file.grid or file.entries or file.exclude or file.branch:
        raise UserError(
            "a file with tune is a search, and has no grid, list, exclude or branch; put them in another file"
        )
    if file.ray_address is not None:
        raise UserError(
            "a search is not spread over a Ray cluster by ray_address; start fedflat tune on several nodes, in a shared folder"
        )
    if not file.keep.models:
        raise UserError(
            "keep: models=false is not possible in a search, since the model of the chosen run is evaluated; leave it out"
        )
    space = {SHORT.get(name, name): values for name, values in file.tune.space.items()}
    base = dict(flat(file.base))
    lists = [value for values in space.values() if isinstance(values, list) for value in values]
    check_names(
        {**dict.fromkeys(base, "base"), **dict.fromkeys(file.tune.space, "tune.space")},
        set().union(*map(holes, [*base.values(), *lists])),
    )
    _check_space(space)
    _check_seeds(file.tune.seeds)
    search = Search(base, space, file.tune, file, out)
    for values in corners(space):
        config = search.config(values, file.tune.seeds[0])
        if config.data.validation == 0:
            raise UserError(
                "a search is scored on a validation split, and there is none; set data.validation in base, for example to 0.1"
            )
        if config.stop.target is not None:
            raise UserError(
                "stop.target looks at the test set, which must not matter in a search; leave it out, or use stop.patience"
            )
    return search


def _check_space(space: dict[str, Range | list[Any]]) -> None:
    if not space:
        raise UserError(
            "tune.space is empty; add what to search over, for example {rate: {low: 0.01, high: 1, log: true}}"
        )
    for name, values in space.items():
        if name in ("seed", "data.validation"):
            raise UserError(
                f"{name} is nothing to search over, since it changes what trials are scored by; remove it from tune.space"
            )
        if isinstance(values, list):
            if not values or not all(isinstance(value, (bool, int, float, str)) or value is None for value in values):
                raise UserError(
                    f"tune.space: {name} is {values}; expected a list of numbers or words, or a range with low and high"
                )
        elif values.low >= values.high:
            raise UserError(
                f"tune.space: {name} goes from low={values.low:g} to high={values.high:g}; low must be below high"
            )
        elif values.log and (values.low <= 0 or values.step is not None):
            raise UserError(f"tune.space: {name} is on a logarithmic scale, which needs low above 0 and no step")


def _check_seeds(seeds: list[int]) -> None:
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UserError(f"tune.seeds is {seeds}; expected each seed once and none below 0, for example [0, 1, 2]")


def corners(space: dict[str, Range | list[Any]]) -> Iterator[Values]:
    """The first and the last of everything, to find mistakes before anything runs."""
    for place in (0, -1):
        yield {
            name: v[place] if isinstance(v, list) else (_number(v, v.low if place == 0 else v.high))
            for name, v in space.items()
        }


def _number(of: Range, value: float) -> float:
    return int(value) if of.whole else value


# --- searching ------------------------------------------------------------------------------------------------------------------------


def run_search(
    search: Search, callbacks: tuple[Callback, ...] = (), waiting: Callable[[int], None] = lambda trials: None
) -> Iterator[Tried]:
    """Do the trials that are missing, and tell of each that this process does; those of killed processes are gone on with.

    With one process it is the same search each time, however often it is killed: what a trial tries depends on the trials before alone.
    """
    study = _study(search)
    told_of = False
    while True:
        with ExitStack() as claim:
            number = _next(search, study, claim)
            if number is not None:
                yield _do(search, study, number, callbacks)
                continue
        others = study.unfinished()
        if not others:
            return
        if not told_of:
            waiting(len(others))
            told_of = True
        time.sleep(SECONDS_BETWEEN_LOOKS)


def check_folder(search: Search) -> None:
    """Refuse the folder of another search; it is not made where there is none yet."""
    if (search.out / JOURNAL).exists():
        Study(search.out, search.tune).check(search.decides(), search.out)


def trials_left(search: Search) -> int:
    """How many trials are still to be done, or are going on."""
    study = _study(search)
    return max(0, search.tune.trials - study.count()) + len(study.unfinished())


def _study(search: Search) -> Study:
    """The trials that there are, which must be of the same search."""
    create_folder(search.out)
    study = Study(search.out, search.tune)
    with locked(search.out, wait=True):
        study.hold_to(search.decides(), search.out)
    return study


def _next(search: Search, study: Study, claim: ExitStack) -> int | None:
    """The number of a trial that is now this process's own: one that was left, or a new one; None where there are enough."""
    with locked(search.out, wait=True):
        left = [number for number in study.unfinished() if is_free(search.folder(number))]
        if not left and study.count() >= search.tune.trials:
            return None
        number = left[0] if left else study.ask()
        claim.enter_context(locked(search.folder(number)))
        return number


def _do(search: Search, study: Study, number: int, callbacks: tuple[Callback, ...]) -> Tried:
    values = study.values(number, search.space)
    scores: list[float] = []
    try:
        for place, seed in enumerate(search.tune.seeds):
            watch = (_Watch(study, number),) if search.tune.prune and place == 0 else ()
            record = _record(
                search, search.config(values, seed), search.folder(number) / f"seed-{seed}", (*callbacks, *watch)
            )
            score = last_score(record, "validation")
            if score is None:
                study.tell(number, None, "failed")
                return Tried(number, values, "failed", None, record.reason or record.status)
            scores.append(score)
    except Pruned:
        study.tell(number, None, "pruned")
        return Tried(number, values, "pruned", None)
    except LockedError:
        raise
    except UserError as mistake:
        study.tell(number, None, "failed")
        return Tried(number, values, "failed", None, str(mistake))
    study.tell(number, fmean(scores), "complete")
    return Tried(number, values, "complete", fmean(scores))


def _record(search: Search, config: Config, folder: Path, callbacks: tuple[Callback, ...]) -> Record:
    try:
        return Claimed(config, folder, search.file.keep).go(callbacks)
    except Over:
        return load_record(folder)


class _Watch(Callback):
    """Tells the study how a run is getting on, and ends it where that is bad."""

    def __init__(self, study: Study, number: int) -> None:
        self._study, self._number = study, number

    def evaluated(self, run: RunView) -> None:
        newest = run.history[-1]
        found = newest["validation"].get(run.primary, newest["validation"]["server"]).get(run.metric)
        if found is not None and self._study.is_bad(self._number, run.rounds, found):
            raise Pruned


# --- the best -------------------------------------------------------------------------------------------------------------------------


def choose(search: Search) -> dict[str, Any]:
    """The best trial by validation, evaluated on the test set; the same answer, without evaluating again, once it is written."""
    study = _study(search)
    best = study.best()
    if best is None:
        raise UserError(
            f"no trial in {search.out} came to an end with a score, so that there is nothing to choose; look at them with fedflat show"
        )
    number, score = best
    folders = [str(search.folder(number) / f"seed-{seed}") for seed in search.tune.seeds]
    trial = {"trial": number, "settings": study.values(number, search.space), "validation": score, "folders": folders}
    with locked(search.out, wait=True):
        file = search.out / BEST
        known: Values = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        chosen = {**known, "folders": folders} if _is_of(known, trial) else _evaluated(trial)
        if chosen != known:
            write_whole(file, json.dumps(chosen, indent=1, default=str) + "\n")
    return chosen


def _evaluated(trial: Values) -> Values:
    """A trial with what its runs score on the test set."""
    from fedflat.experiment.analysis.evaluation import evaluate

    records = [load_record(Path(folder)) for folder in trial["folders"]]
    metric = metric_of(records[0])
    return {
        "trial": trial["trial"],
        "settings": trial["settings"],
        "chosen_by": f"validation {metric}, mean over {len(records)} seed{'s' * (len(records) != 1)}",
        "metric": metric,
        "validation": trial["validation"],
        "test": [float(evaluate(record, primary_model(record), ("test",))["test"][metric]) for record in records],
        "folders": trial["folders"],
    }


def _is_of(known: Values, trial: Values) -> bool:
    """Whether a test score that was written is of this trial; where its folders lie may have changed since, with a copy."""
    same = all(known.get(name) == trial[name] for name in ("trial", "settings", "validation"))
    return same and len(known["test"]) == len(trial["folders"])


def in_words(tried: Tried) -> str:
    """A trial in a line."""
    return f"trial {tried.number}: {told(tried.values)}"
