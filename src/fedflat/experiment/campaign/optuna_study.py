"""What Optuna knows of a search, in a file beside its trials.

What a trial tries is drawn by a sampler that is seeded anew with the trial's number and the setting's name, so that a search that was
interrupted goes on with the same draws as one that was not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.engines.round.randomness import generator
from fedflat.errors import UserError
from fedflat.experiment.campaign.sweep_file import Range, Tune, Values
from fedflat.text import write_value

if TYPE_CHECKING:
    import optuna

JOURNAL, LOCK = "tune.journal", "tune.lock"
SEARCH = "search"
"""The study's attribute that says which search it is of."""
STARTUP = 5
"""Trials that are never ended early, and that others are compared with."""


class Study:
    """The trials of a search, shared by all processes that work on it."""

    def __init__(self, out: Path, tune: Tune) -> None:
        self._optuna = _optuna()
        self._tune = tune
        lock = FileLock(out / LOCK)
        _cut(out / JOURNAL, lock)
        backend = self._optuna.storages.journal.JournalFileBackend(str(out / JOURNAL), lock_obj=lock)
        pruner = self._optuna.pruners.MedianPruner(STARTUP) if tune.prune else self._optuna.pruners.NopPruner()
        self._study: optuna.Study = self._optuna.create_study(
            storage=self._optuna.storages.JournalStorage(backend),
            study_name="tune",
            direction="maximize",
            pruner=pruner,
            load_if_exists=True,
        )

    def hold_to(self, search: Values, out: Path) -> None:
        """Note which search this is, where nothing is tried yet; refuse another one than is noted.

        Studies of versions that noted nothing go on, since nobody knows what their trials were.
        """
        if SEARCH not in self._study.user_attrs and not self.count():
            self._study.set_user_attr(SEARCH, _as_noted(search))
        self.check(search, out)

    def check(self, search: Values, out: Path) -> None:
        """Refuse another search than is noted, or one with fewer trials than there are."""
        if SEARCH not in self._study.user_attrs:
            return
        differing = _difference(self._study.user_attrs[SEARCH], _as_noted(search))
        if differing:
            raise UserError(
                f"{out} holds a search with other settings ({differing}), and trials of both cannot be compared; "
                "choose another --out, or put the file back as it was"
            )
        if self.count() > self._tune.trials:
            raise UserError(
                f"{out} holds {self.count()} trials already, which is more than tune.trials={self._tune.trials}; "
                f"choose another --out, or set trials to {self.count()} or more"
            )

    def count(self) -> int:
        """How many trials there are, whatever came of them."""
        return len(self._study.trials)

    def unfinished(self) -> list[int]:
        """The numbers of trials that are going on, or were left."""
        return [trial.number for trial in self._study.trials if not trial.state.is_finished()]

    def ask(self) -> int:
        """A new trial's number."""
        return int(self._study.ask().number)

    def values(self, number: int, space: dict[str, Range | list[Any]]) -> Values:
        """What a trial tries: as drawn before, or drawn now."""
        frozen = self._study.trials[number]
        if frozen.state.is_finished():
            return {name: frozen.params[name] for name in space if name in frozen.params}
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        found: Values = {}
        for name, values in space.items():
            self._study.sampler = self._sampler(number, name)
            found[name] = _drawn(trial, name, values)
        return found

    def _sampler(self, number: int, name: str) -> Any:
        seed = int(generator(self._tune.sampler_seed, f"trial {number}: {name}").integers(2**31))
        samplers = self._optuna.samplers
        return samplers.RandomSampler(seed) if self._tune.sampler == "random" else samplers.TPESampler(seed=seed)

    def is_bad(self, number: int, rounds: int, score: float) -> bool:
        """Note a score on the way; whether it is worse than the median of the others."""
        frozen = self._study.trials[number]
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        if rounds not in frozen.intermediate_values:
            trial.report(score, rounds)
        return bool(trial.should_prune())

    def tell(self, number: int, score: float | None, state: str) -> None:
        """Note what came of a trial."""
        states = self._optuna.trial.TrialState
        self._study.tell(
            number, score, {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[state]
        )

    def best(self) -> tuple[int, float] | None:
        """The number and the score of the best trial; the first of several."""
        complete = [trial for trial in self._study.trials if trial.state == self._optuna.trial.TrialState.COMPLETE]
        if not complete:
            return None
        return int(self._study.best_trial.number), float(self._study.best_value)


class FileLock:
    """A lock on a file, which ends with the process; Optuna's own would outlive one that is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None

    def acquire(self) -> bool:
        """Wait until it is one's own."""
        self._held = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.name == "posix":
            import fcntl

            fcntl.flock(self._held, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Let others have it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _as_noted(search: Values) -> Values:
    """A search as it comes back from the journal."""
    noted: Values = json.loads(json.dumps(search, default=str))
    return noted


def _difference(noted: Values, now: Values) -> str:
    """The settings in which two searches differ; those that one of two versions does not have are no difference, unless searched over."""
    names = [name for name in {**noted, **now} if name.startswith("tune.") or (name in noted and name in now)]
    differing = [name for name in names if noted.get(name) != now.get(name)]
    return ", ".join(f"{name}={_shown(noted.get(name))} instead of {_shown(now.get(name))}" for name in differing)


def _shown(value: Any) -> str:
    """A setting as a file has it: a range without what is not said of it.

    >>> _shown({"low": 0.0, "high": 1.0, "log": False, "step": None}), _shown([1, None]), _shown(None)
    ('{low: 0.0, high: 1.0}', '[1, none]', 'none')
    """
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{key}: {_shown(said)}" for key, said in value.items() if said is not None and said is not False
            )
            + "}"
        )
    return "[" + ", ".join(map(_shown, value)) + "]" if isinstance(value, list) else write_value(value)


def _drawn(trial: optuna.Trial, name: str, values: Range | list[Any]) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    if values.whole:
        return trial.suggest_int(name, int(values.low), int(values.high), step=int(values.step or 1), log=values.log)
    return trial.suggest_float(name, values.low, values.high, step=values.step, log=values.log)


def _cut(path: Path, lock: FileLock) -> None:
    """Remove a last line that a kill has left half-written."""
    lock.acquire()
    try:
        if path.exists():
            whole = path.read_bytes()
            os.truncate(path, len(whole.rpartition(b"\n")[0]) + (b"\n" in whole))
    finally:
        lock.release()


def _optuna() -> Any:
    try:
        import optuna
        import optuna.storages.journal
    except ImportError:
        raise UserError(
            "a search needs Optuna 4 or later, which is not installed; pip install 'fedflat[sweep]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
