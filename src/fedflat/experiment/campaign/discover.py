"""Search the space of algorithms: one choice per slot, scored on validation data, confirmed on unseen seeds.

The search over slots and the tuning of each baseline are searches like those of ``fedflat tune``, with the same number
of candidates. Invalid combinations are those that the algorithm's own composition rules reject.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedflat.algorithms import algorithm
from fedflat.algorithms.composition import PART_REGISTRIES
from fedflat.engines.problem.kernels import KernelError
from fedflat.errors import UserError
from fedflat.experiment.campaign.compare import existing_run, folder_name, run_each
from fedflat.experiment.campaign.optuna_study import Study
from fedflat.experiment.campaign.space_file import NONE, SpaceFile, check_file, fill, make_part
from fedflat.experiment.campaign.sweep import make_run_config
from fedflat.experiment.campaign.sweep_file import (
    PLACEHOLDER,
    SETTINGS,
    Halving,
    Space,
    SweepFile,
    Tune,
    Values,
    all_placeholders,
    check_names,
    extreme_values,
    flat_base,
    with_full_names,
)
from fedflat.experiment.campaign.tune import Search, Trial, check_scoring, open_study, run_search_in_parallel
from fedflat.experiment.config import Config, describe_difference
from fedflat.experiment.setup.engine import check_precision
from fedflat.experiment.setup.problem import build_problem, check_new_run, device_of
from fedflat.experiment.store.cleanup import Keep, remove_locked
from fedflat.experiment.store.files import DamagedFile, create_folder, locked, write_atomically
from fedflat.experiment.store.run_folder import Record
from fedflat.setting_names import flat
from fedflat.text import parse_one

SEARCH, CONFIRM, CLOCK = "search", "confirm", "clock.json"
"""Folders of the search and of the confirmation, and the file with the seconds that each search has taken."""


@dataclass(frozen=True)
class SlotSearch(Search):
    """A search whose space has slots of the algorithm, by name of the slot, and then settings and placeholders."""

    example: Values = field(default_factory=dict)
    """A valid draw."""

    def text(self, values: Values) -> str:
        """The algorithm of a draw; its placeholders are not filled in."""
        chosen = [values[slot] for slot in PART_REGISTRIES if values.get(slot, NONE) != NONE]
        return "+".join([str(self.base.get("algorithm", "fedavg")), *chosen])

    def changed(self, settings: Values) -> SlotSearch:
        """The same search with other settings of all runs, by full name."""
        return replace(self, base={**self.base, **settings})

    def config(self, values: Values, seed: int) -> Config:
        settings = {name: value for name, value in values.items() if name not in PART_REGISTRIES}
        return make_run_config({**self.base, "algorithm": self.text(values), "seed": seed}, settings)

    def example_config(self) -> Config:
        return self.config(self.example, self.tune.seeds[0])

    def values(self, study: Study, number: int) -> Values:
        return study.valid_values(number, self.space, self.applies, self.accepts)

    def applies(self, name: str, drawn: Values) -> bool:
        """Whether a draw needs a value for ``name``: a slot, a setting, or a placeholder in a text drawn before."""
        texts = [*self.base.values(), *drawn.values()]
        return name in PART_REGISTRIES or name in SETTINGS or name in all_placeholders(texts)

    def accepts(self, drawn: Values) -> bool:
        """Whether the parts and settings can be combined."""
        try:
            self.config(drawn, self.tune.seeds[0])
        except UserError:
            return False
        return True


@dataclass(frozen=True)
class Discovery:
    """A checked space; make one with :func:`plan_discovery`."""

    file: SpaceFile
    out: Path
    searches: dict[str, SlotSearch]
    """The search over slots under ``SEARCH``, and the tuning of every baseline under its text."""
    combinations: int
    """Number of combinations of choices that are valid."""
    excluded: int
    """Number of combinations that the composition rules exclude."""

    @property
    def slots(self) -> list[str]:
        """The slots and settings that every candidate has a value for."""
        return [name for name in self.searches[SEARCH].space if name in PART_REGISTRIES or name in SETTINGS]

    @property
    def rungs(self) -> list[int]:
        """The rounds after which successive halving compares candidates."""
        search = self.searches[SEARCH]
        halving = search.tune.prune
        assert isinstance(halving, Halving)
        rungs = (halving.min_rounds * halving.reduction**power for power in itertools.count())
        return list(itertools.takewhile(lambda rung: rung < search.example_config().training.rounds, rungs))


def plan_discovery(file: SpaceFile, out: Path) -> Discovery:
    """Check a space and plan its searches, without writing anything.

    Raises:
        UserError: the space contradicts itself, or no combination is valid.
    """
    base = flat_base(file.base)
    parameters = with_full_names(file.parameters, "parameters")
    check_file(file)
    rounds = make_run_config({**base, "algorithm": "fedavg"}, extreme_values(parameters)[0]).training.rounds
    halving = file.halving or Halving(min_rounds=max(1, rounds // 9))

    keep = Keep(checkpoint=False, snapshots=False, models=False)
    runs = SweepFile(keep=keep, jobs=file.jobs, devices=file.devices)

    def search(name: str, search_base: Values, slots: dict[str, list[str]]) -> SlotSearch:
        """A search over some slots and all parameters that matter for them."""
        used = all_placeholders([*search_base.values(), *itertools.chain(*slots.values())])
        space: Space = {slot: list(choices) for slot, choices in slots.items()}
        space |= {key: values for key, values in parameters.items() if key in SETTINGS or key in used}
        tune = Tune(
            trials=file.candidates if space else 1,
            space=space,
            seeds=file.seeds,
            sampler=file.sampler,
            sampler_seed=file.sampler_seed,
            prune=halving,
        )
        return SlotSearch(search_base, space, tune, runs, out / folder_name(name))

    searches = {SEARCH: search(SEARCH, base, file.slots)}
    valid, excluded, example = _count_combinations(searches[SEARCH])
    searches[SEARCH] = replace(searches[SEARCH], example=example)
    for text in file.baselines:
        tuning = search(text, {**base, "algorithm": text}, {})
        searches[text] = replace(tuning, example=extreme_values(tuning.space)[0])
    for tuning, end in itertools.product(searches.values(), (0, 1)):  # both ends of every range
        slots = {name: value for name, value in tuning.example.items() if name in PART_REGISTRIES}
        values = _applicable(tuning, {**extreme_values(tuning.space)[end], **slots})
        check_scoring(tuning.config(values, file.seeds[0]))
    discovery = Discovery(file, out, searches, valid, excluded)
    _check_problems(discovery)
    return discovery


def _check_problems(discovery: Discovery) -> None:
    """Raise a ``UserError`` if a problem of the confirmation is invalid, or the same as another one."""
    search = discovery.searches[SEARCH]
    known = {"the search": search.example_config()}
    for problem, changes in list(problems(discovery).items())[1:]:
        try:
            config = search.changed(changes).example_config()
        except UserError as error:
            raise UserError(f"confirm.also, {problem}: {error}") from None
        for other, existing in known.items():
            if not describe_difference(config, existing):
                raise UserError(f"confirm.also: {problem} is the same problem as that of {other}; remove it")
        known[problem] = config


def _applicable(search: SlotSearch, values: Values) -> Values:
    """The values that matter for the algorithm of a draw."""
    drawn: Values = {}
    for name in search.space:
        if search.applies(name, drawn):
            drawn[name] = values[name]
    return drawn


def _count_combinations(search: SlotSearch) -> tuple[int, int, Values]:
    """Count the valid and the invalid combinations of choices, and return a valid draw.

    Parameters have the smallest or first of their values.

    Raises:
        UserError: a choice has an invalid parameter, or no combination is valid.
    """
    first, last = extreme_values(search.space)
    start = algorithm(fill(search.text({}), {**search.base, **first}))
    slots = [slot for slot in PART_REGISTRIES if slot in search.space]
    choices = [[(slot, str(choice)) for choice in search.tune.space[slot]] for slot in slots]
    for values in (last, first):  # parts with the largest values are only checked
        parts = {choice: make_part(*choice, {**search.base, **values}) for choice in itertools.chain(*choices)}
    example: Values = {}
    valid, excluded, reason = 0, 0, ""
    for combination in itertools.product(*choices):
        filled = {slot: parts[slot, choice] for slot, choice in combination if choice != NONE}
        if "averages" in filled:
            filled["averages"] = (*start.averages, filled["averages"])
        conflict = replace(start, **filled).conflict()
        if conflict is not None:
            excluded, reason = excluded + 1, reason or conflict
            continue
        valid, example = valid + 1, example or _applicable(search, {**first, **dict(combination)})
    if not valid:
        raise UserError(f"no combination of the slots' choices is valid, e.g. because {reason}; list other parts")
    return valid, excluded, example


def run_searches(
    discovery: Discovery, minutes: float | None = None, jobs: int | None = None
) -> Iterator[tuple[str, Trial]]:
    """Evaluate the missing candidates of all searches; yields each with the name of its search.

    Every search has the same share of the time. Time before an interruption counts.

    Args:
        discovery: the planned searches.
        minutes: time limit of all searches together; default: as in the file.
        jobs: number of concurrent candidates; default: as in the file.
    """
    limit = minutes or discovery.file.minutes
    share = 60 * limit / len(discovery.searches) if limit else math.inf
    create_folder(discovery.out)
    for name, search in discovery.searches.items():
        spent = seconds_spent(discovery).get(name, 0.0)
        began = time.monotonic()
        limited = replace(search, seconds=share - spent)
        try:
            for trial in run_search_in_parallel(limited, jobs):
                _save_seconds(discovery, name, spent + time.monotonic() - began)
                yield name, trial
        finally:
            _save_seconds(discovery, name, spent + time.monotonic() - began)


def seconds_spent(discovery: Discovery) -> dict[str, float]:
    """Seconds that each search has taken so far, by name."""
    with suppress(OSError, ValueError):
        return dict(json.loads((discovery.out / CLOCK).read_text(encoding="utf-8")))
    return {}


def _save_seconds(discovery: Discovery, name: str, seconds: float) -> None:
    with locked(discovery.out, wait=True):
        known = seconds_spent(discovery)
        known[name] = max(seconds, known.get(name, 0.0))
        write_atomically(discovery.out / CLOCK, json.dumps(known, indent=1) + "\n")


@dataclass(frozen=True)
class Finalist:
    """A candidate to confirm."""

    search: str
    """Name of its search: ``SEARCH``, or the text of a baseline."""
    values: Values
    label: str
    """``SEARCH`` for the winner, the text of a baseline, or ``without PART`` for an ablation of the winner."""
    trial: int | None = None
    score: float | None = None
    """Validation metric in the search, averaged over its seeds; None for an ablation."""

    @property
    def is_ablation(self) -> bool:
        """Whether it is the winner without one of its parts."""
        return self.score is None


def finalists(discovery: Discovery) -> list[Finalist]:
    """The best candidate of every search, the winner of the search over slots first, then its ablations."""
    best = []
    for name, search in discovery.searches.items():
        study = open_study(search)
        chosen = study.best()
        if chosen is None:
            raise UserError(
                f"no candidate in {search.out} finished with a score; allow more minutes, or see why with "
                f"fedflat show {search.out}"
            )
        best.append(Finalist(name, search.values(study, chosen[0]), name, *chosen))
    return best + (_ablations(discovery.searches[SEARCH], best[0]) if discovery.file.confirm.ablation else [])


def _ablations(search: SlotSearch, winner: Finalist) -> list[Finalist]:
    """The winner without each of its parts in turn, as far as the other parts do not require it."""
    ablations = []
    for slot, choice in winner.values.items():
        if slot in PART_REGISTRIES and choice != NONE:
            values = {**winner.values, slot: NONE}
            if search.accepts(values):
                ablations.append(Finalist(SEARCH, values, f"without {parse_one(PLACEHOLDER.sub('1', choice)).name}"))
    return ablations


def settings_text(settings: Values) -> str:
    """Settings as text, without their groups.

    >>> settings_text({"training.lr": 0.1, "data.dataset": "cifar10"})
    'lr=0.1, dataset=cifar10'
    """
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in settings.items())


def problems(discovery: Discovery) -> dict[str, Values]:
    """The problems of the confirmation: the settings that differ from ``base``, by a name for the problem."""
    named: dict[str, Values] = {SEARCH: {}}
    chosen = {"algorithm", "seed", "data.validation", *itertools.chain(*(s.space for s in discovery.searches.values()))}
    for changes in discovery.file.confirm.also:
        settings = dict(flat(changes))
        check_names(dict.fromkeys(settings, "confirm.also"), set())
        for name in settings.keys() & chosen:
            raise UserError(f"confirm.also cannot change {name}, which is the same on all problems; remove it")
        named[settings_text(settings)] = settings
    if len(named) <= len(discovery.file.confirm.also) or {} in list(named.values())[1:]:
        raise UserError("confirm.also has an entry that is empty or occurs twice; list each problem once")
    return named


def check_setup(discovery: Discovery) -> None:
    """Raise a ``UserError`` if a problem cannot be trained here, or has another metric than the search; loads data."""
    search, metric = discovery.searches[SEARCH], ""
    engine = search.example_config().engine
    if device_of(search.example_config()).type == "cpu" and engine.name != "ray":
        check_precision(engine.precision, on_gpu=False)
    for problem, changes in problems(discovery).items():
        config = search.changed(changes).example_config()
        try:
            built, partition = build_problem(config.changed(engine={"device": "cpu"}))
            check_new_run(config, built.task.metric, partition)
        except UserError as error:
            raise UserError(f"confirm.also, {problem}: {error}" if changes else str(error)) from None
        metric = metric or built.task.metric
        if built.task.metric != metric:
            raise UserError(
                f"confirm.also has a problem with another metric ({problem}: {built.task.metric} instead of {metric}), "
                "so results could not be compared; remove it"
            )


def confirm(
    discovery: Discovery, best: list[Finalist], jobs: int | None = None
) -> Iterator[tuple[str, Finalist, Record]]:
    """Train the best candidate of every search with the unseen seeds; yields problem, finalist and record of each run.

    Ablations are trained only on the problem of the search. Finished runs are loaded; they keep no checkpoint.

    Raises:
        UserError: the seeds have already been used to confirm another candidate, so they are no longer unseen.
    """
    runs: list[tuple[str, Finalist]] = []
    configs: list[Config] = []
    folders: list[Path] = []
    for problem, changes in problems(discovery).items():
        folder = discovery.out / CONFIRM / folder_name(problem)
        for seed, finalist in itertools.product(discovery.file.confirm.seeds, best):
            if finalist.is_ablation and problem != SEARCH:
                continue
            search = discovery.searches[finalist.search]
            runs.append((problem, finalist))
            configs.append(search.changed(changes).config(finalist.values, seed))
            folders.append(folder / folder_name(finalist.label) / f"seed-{seed}")
            try:
                existing_run(configs[-1], folders[-1])
            except (DamagedFile, KernelError):
                raise
            except UserError as error:
                raise UserError(
                    f"these seeds have confirmed another candidate; choose new confirm.seeds ({error})"
                ) from None
    create_folder(discovery.out / CONFIRM)
    with locked(discovery.out / CONFIRM, wait=True):
        run_of = dict(zip(folders, runs, strict=True))
        for record in run_each(configs, folders, (), jobs or discovery.file.jobs):  # without runs that failed
            assert record.folder is not None
            problem, finalist = run_of[record.folder.path]
            remove_locked(record.folder.path, ["checkpoint"])
            yield problem, finalist, record
