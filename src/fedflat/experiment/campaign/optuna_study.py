"""The Optuna study of a search, stored in a journal file in the search's folder.

For every value, the sampler is seeded anew with the trial's number and the setting's name. A resumed search therefore
draws the same values as one that was never interrupted.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.campaign.sweep_file import Halving, SearchRange, Space, Tune, Values
from fedflat.experiment.store.files import explain_os_error
from fedflat.randomness import generator
from fedflat.text import write_value

if TYPE_CHECKING:
    import optuna

JOURNAL, LOCK = "tune.journal", "tune.lock"
SEARCH = "search"
"""The study attribute with the settings of the search."""
STARTUP_TRIALS = 5
"""Number of trials that must finish before later ones can be pruned."""
MAX_DRAWS = 1000
"""Number of draws after which a space counts as having no valid combination."""


class Study:
    """The trials of a search, shared by all processes that work on it.

    Args:
        out: folder of the search.
        tune: its settings.
        lower_is_better: whether lower scores are better; ignored if the journal exists, because it stores the answer.
    """

    def __init__(self, out: Path, tune: Tune, lower_is_better: bool = False) -> None:
        """Open or create the journal of the search, Optuna's file with all trials."""
        self._optuna = _import_optuna()
        self._tune = tune
        journal = _Journal(self._optuna, out / JOURNAL, out / LOCK)
        _check_journal(out / JOURNAL)
        try:
            self._storage = self._optuna.storages.JournalStorage(journal)
            self._study: optuna.Study = self._optuna.create_study(
                storage=self._storage,
                study_name="tune",
                direction="minimize" if lower_is_better else "maximize",
                pruner=self._pruner(),
                load_if_exists=True,
            )
        except (KeyError, TypeError, ValueError):  # a line is valid JSON, but not a record of Optuna
            raise UserError(f"{out / JOURNAL} is damaged; choose another --out") from None

    def _pruner(self) -> Any:
        """The rule by which trials stop early."""
        pruners, prune = self._optuna.pruners, self._tune.prune
        if isinstance(prune, Halving):
            return pruners.SuccessiveHalvingPruner(prune.min_rounds, prune.reduction)
        return pruners.MedianPruner(STARTUP_TRIALS) if prune else pruners.NopPruner()

    def identify(self, search: Values, out: Path) -> None:
        """Record the settings of a new search in the journal, or :meth:`check` that the journal has the same ones.

        ``search`` holds the settings, and ``out`` is the folder of the search, for messages.
        """
        if SEARCH not in self._study.user_attrs:
            self._study.set_user_attr(SEARCH, _through_json(search))
        self.check(search, out)

    def check(self, search: Values, out: Path) -> None:
        """Raise a ``UserError`` if the journal belongs to another search or has more trials than requested."""
        if SEARCH not in self._study.user_attrs:
            return
        differing = _difference(self._study.user_attrs[SEARCH], _through_json(search))
        if differing:
            raise UserError(
                f"{out} holds a search with other settings ({differing}), whose trials cannot be compared with these; "
                "choose another --out, or restore the file"
            )
        if self.count() > self._tune.trials:
            raise UserError(
                f"{out} already holds {self.count()} trials, more than the {self._tune.trials} requested; "
                f"choose another --out, or request {self.count()} or more"
            )

    def count(self) -> int:
        """Number of trials, finished or not."""
        return len(self._study.trials)

    def unfinished(self) -> list[int]:
        """Numbers of the trials that are running or were abandoned."""
        return [trial.number for trial in self._study.trials if not trial.state.is_finished()]

    def ask(self) -> int:
        """Create a trial and return its number."""
        return int(self._study.ask().number)

    def values(self, number: int, space: Space) -> Values:
        """The values of the settings in ``space`` that trial ``number`` tries; drawn on the first call."""
        stored = self._study.trials[number]
        if stored.state.is_finished():
            return {name: stored.params[name] for name in space if name in stored.params}
        trial = self._optuna.trial.Trial(self._study, stored._trial_id)
        drawn: Values = {}
        for name, values in space.items():
            self._study.sampler = self._sampler(f"trial {number}: {name}")
            drawn[name] = trial._suggest(name, self._distribution(values))
        return drawn

    def valid_values(
        self, number: int, space: Space, applies: Callable[[str, Values], bool], accepts: Callable[[Values], bool]
    ) -> Values:
        """Like ``values``, for a space in which not every combination is valid and not every setting always matters.

        Args:
            number: the trial.
            space: what to draw, in this order.
            applies: whether a setting matters, given its name and the values drawn before it; otherwise, none is drawn.
            accepts: whether the drawn values can be combined; otherwise, all are drawn again.
        """
        stored = self._study.trials[number]
        if stored.params and stored.params.keys() == {name for name in space if applies(name, stored.params)}:
            return dict(stored.params)  # drawn before; a killed process may have stored only some of the values
        for attempt in range(MAX_DRAWS):
            sampler = self._sampler(f"trial {number}, attempt {attempt}", group=True)
            joint_space = sampler.infer_relative_search_space(self._study, stored)
            joint_values = sampler.sample_relative(self._study, stored, joint_space)
            drawn: Values = {}
            for name, values in space.items():
                if name in joint_values and applies(name, drawn):
                    drawn[name] = joint_values[name]
                elif applies(name, drawn):
                    drawn[name] = sampler.sample_independent(self._study, stored, name, self._distribution(values))
            if accepts(drawn):
                break
        else:
            raise UserError(
                f"{MAX_DRAWS} draws from the space gave no valid combination; remove choices that exclude each other"
            )
        for name, value in drawn.items():
            distribution = self._distribution(space[name])
            self._storage.set_trial_param(stored._trial_id, name, distribution.to_internal_repr(value), distribution)
        return drawn

    def _sampler(self, purpose: str, group: bool = False) -> Any:
        """A sampler seeded by its purpose (trial and setting), so that its draw does not depend on earlier draws.

        Args:
            purpose: the trial and what is drawn for it.
            group: learn the joint distribution of settings, separately for settings that only some trials have.
        """
        seed = int(generator(self._tune.sampler_seed, purpose).integers(2**31))
        samplers = self._optuna.samplers
        if self._tune.sampler == "random":
            return samplers.RandomSampler(seed)
        if not group:
            return samplers.TPESampler(seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=False)

    def _distribution(self, values: SearchRange | list[Any]) -> Any:
        """Optuna's distribution of one setting."""
        distributions = self._optuna.distributions
        if isinstance(values, list):
            return distributions.CategoricalDistribution(values)
        if values.whole:
            low, high, step = int(values.low), int(values.high), int(values.step or 1)
            return distributions.IntDistribution(low, high, values.log, step)
        return distributions.FloatDistribution(values.low, values.high, values.log, values.step)

    def should_prune(self, number: int, rounds: int, score: float, is_last: bool) -> bool:
        """Report a trial's score after ``rounds`` rounds; returns whether the trial should stop.

        Successive halving never stops a trial after its last round (``is_last``), when all rounds have been trained.
        """
        stored = self._study.trials[number]
        trial = self._optuna.trial.Trial(self._study, stored._trial_id)
        if rounds not in stored.intermediate_values:  # a resumed trial repeats rounds
            trial.report(score, rounds)
        return bool(trial.should_prune()) and not (is_last and isinstance(self._tune.prune, Halving))

    def record_result(self, number: int, score: float | None, state: str) -> None:
        """Record the result of a trial; ``state`` is complete, pruned or failed."""
        states = self._optuna.trial.TrialState
        by_name = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        self._study.tell(number, score, by_name[state])

    def candidates(self) -> list[Values]:
        """All trials: number, state, drawn values, score, and the scores during training by number of rounds."""
        states = {"fail": "failed", "running": "unfinished", "waiting": "unfinished"}
        return [
            {
                "trial": trial.number,
                "state": states.get(trial.state.name.lower(), trial.state.name.lower()),
                "values": dict(trial.params),
                # Optuna repeats a pruned trial's last score as its value.
                "score": trial.value if trial.state.name == "COMPLETE" else None,
                "scores": {int(rounds): score for rounds, score in trial.intermediate_values.items()},
            }
            for trial in self._study.trials
        ]

    def importance(self, names: Sequence[str], scores: Mapping[int, float]) -> dict[str, float] | None:
        """How much of the variance of scores each setting explains (fANOVA); None without scikit-learn.

        Args:
            names: settings that all trials have.
            scores: the score of each trial to include, by its number; at least two.
        """
        with suppress(ImportError):
            from optuna.importance import FanovaImportanceEvaluator, get_param_importances

            study = self._optuna.create_study(direction="maximize")
            for trial in self._study.trials:
                if trial.number in scores:
                    params = {name: trial.params[name] for name in names}
                    distributions = {name: trial.distributions[name] for name in names}
                    score = scores[trial.number]
                    study.add_trial(
                        self._optuna.trial.create_trial(params=params, distributions=distributions, value=score)
                    )
            return dict(get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0)))
        return None

    def best(self) -> tuple[int, float] | None:
        """Number and score of the best trial (of equally good ones, the first); None if no trial has completed."""
        if not any(trial.state == self._optuna.trial.TrialState.COMPLETE for trial in self._study.trials):
            return None
        return int(self._study.best_trial.number), float(self._study.best_value)


def _through_json(search: Values) -> Values:
    """The settings of a search as they will be read from the journal, which is JSON: tuples as lists, paths as text."""
    values: Values = json.loads(json.dumps(search, default=str))
    return values


def _difference(recorded: Values, current: Values) -> str:
    """The settings in which two searches differ, as text; empty if they are the same search.

    A setting of runs that only one of the two searches has is ignored: it belongs to another version of fedflat.
    """
    differing = []
    for name in {**recorded, **current}:
        is_comparable = name.startswith("tune.") or (name in recorded and name in current)
        if is_comparable and recorded.get(name) != current.get(name):
            differing.append(f"{name}={_shown(recorded.get(name))} instead of {_shown(current.get(name))}")
    return ", ".join(differing)


def _shown(value: Any) -> str:
    """A setting as a file writes it, without the defaults of a range.

    >>> _shown({"low": 0.0, "high": 1.0, "log": False, "step": None}), _shown([1, None]), _shown(None)
    ('{low: 0.0, high: 1.0}', '[1, none]', 'none')
    """
    if isinstance(value, dict):
        given = {key: entry for key, entry in value.items() if entry is not None and entry is not False}
        return "{" + ", ".join(f"{key}: {_shown(entry)}" for key, entry in given.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return write_value(value)


class _Journal:
    """Optuna's journal file, with clear errors; a killed process or a full disk leaves no half line in it.

    Args:
        optuna: the imported package.
        path: the file.
        lock: the file through which processes lock it.
    """

    def __init__(self, optuna: Any, path: Path, lock: Path) -> None:
        self._path = path
        self._lock = FileLock(lock)  # released when its process dies, unlike Optuna's lock file
        with explain_os_error(path):
            with self._lock:
                self._remove_incomplete_line()
            self._file = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=self._lock)

    def read_logs(self, log_number_from: int) -> Any:
        """The records from a number on."""
        return self._file.read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records; if that fails, none of them is left incomplete."""
        with explain_os_error(self._path), self._lock:
            try:
                self._file.append_logs(logs)
            except OSError:
                self._remove_incomplete_line()
                raise

    def _remove_incomplete_line(self) -> None:
        """Cut the file after its last newline."""
        if self._path.exists():
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)


def _check_journal(path: Path) -> None:
    """Raise a ``UserError`` that names the first line of the journal that is not a record of Optuna."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            is_record = isinstance(json.loads(line)["op_code"], int)
        except (ValueError, TypeError, KeyError):
            is_record = False
        if not is_record:
            raise UserError(
                f"{path} is damaged: line {number} is not a record of a trial; remove the line, or choose another --out"
            )


def _import_optuna() -> Any:
    """Import Optuna and silence its messages; raises a ``UserError`` if it is not installed."""
    try:
        import optuna
        import optuna.storages.journal
    except ImportError:
        raise UserError("a search needs Optuna 4 or later; install it with pip install 'fedflat[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Pruned(Exception):
    """Raised to stop a trial whose score is too low compared with the others after the same round."""


class OutOfTime(Exception):
    """Raised to pause a trial when the time of the search is over."""


class DeadlineCallback(Callback):
    """Pauses a trial at ``deadline``, a time of ``time.monotonic``."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def round_done(self, run: RunView) -> None:
        if time.monotonic() >= self._deadline:
            raise OutOfTime


class PruningCallback(Callback):
    """Reports a trial's validation metric and stops the trial if the study says so."""

    def __init__(self, study: Study, number: int) -> None:
        self._study, self._number = study, number

    def evaluated(self, run: RunView) -> None:
        validation = run.history[-1]["validation"]
        scores = validation.get(run.primary, validation["server"])  # an average may not have started yet
        score = scores.get(run.metric)
        is_last = run.rounds >= run.config.training.rounds
        if score is not None and self._study.should_prune(self._number, run.rounds, score, is_last):
            raise Pruned
