"""The runs that cells need: each distinct experiment once, in a folder named after the first cell that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedflat.experiment.campaign.compare import folder_name
from fedflat.experiment.campaign.estimate import PlannedRun, is_available
from fedflat.experiment.config import Config
from fedflat.papers.cells import Cell
from fedflat.papers.library import Paper, PaperTable
from fedflat.papers.numbers import Corrupted, Last, ModelStatistic
from fedflat.papers.post_hoc import ModelQuery
from fedflat.papers.small import CORRUPTIONS, small

SMALL_SCALE = "small scale"
"""The remark on every outcome at small scale."""
EVALUATION_INTERVAL = "evaluation.every="


def _unchanged(config: Config) -> Config:
    return config


@dataclass(frozen=True)
class Deviations:
    """How runs deviate from the paper: small scale, other rounds, other settings; by default not at all.

    Attributes:
        small: run at small scale, where stand-ins replace large datasets and models.
        rounds: number of rounds; None keeps the paper's.
        data_dir: folder of the datasets; None is the default folder.
        apply_settings: applies the user's settings to a config.
        changed_settings: those of the user's settings that change results, as ``name=value``.
        has_initial_weights: whether the user supplies initial weights.
    """

    small: bool = False
    rounds: int | None = None
    data_dir: Path | None = None
    apply_settings: Callable[[Config], Config] = _unchanged
    changed_settings: tuple[str, ...] = ()
    has_initial_weights: bool = False

    def apply(self, config: Config) -> tuple[Config, tuple[str, ...]]:
        """Return the paper's config with these deviations, and its stand-ins, such as ``digits for cifar10``."""
        changed, stand_ins = small(config, self.data_dir) if self.small else (config, ())
        if self.rounds is not None:
            changed = changed.changed(training={"rounds": self.rounds})
        if self.data_dir is not None:
            changed = changed.changed(data={"dir": self.data_dir})
        return self.apply_settings(changed), stand_ins

    def reason_for_no_verdict(self, cell: Cell) -> str:
        """Return why the measured number of a cell cannot be compared with the published one; empty if it can."""
        if self.small:
            return SMALL_SCALE
        others = [setting for setting in self.changed_settings if not setting.startswith(EVALUATION_INTERVAL)]
        if others:
            return ", ".join(others)
        # Statistics of the last model do not depend on how often models are evaluated.
        if self.changed_settings and not isinstance(cell.statistic, (Last, ModelStatistic)):
            return f"evaluated every {self.changed_settings[-1].removeprefix(EVALUATION_INTERVAL)} rounds"
        if self.has_initial_weights and not cell.weights:
            return "other initial weights"
        paper_rounds = cell.configs[0].training.rounds
        return "" if self.rounds in (None, paper_rounds) else f"{self.rounds} rounds instead of {paper_rounds}"


@dataclass(frozen=True)
class PlannedExperiment(PlannedRun):
    """An experiment with one seed."""

    key: str
    """The config with seed 0 as JSON; ``ReproductionPlan.runs_of`` finds the runs of a cell by it."""
    cells: tuple[str, ...]
    """Names of the chosen cells that need it."""
    stand_ins: tuple[str, ...]
    """What replaces data or models of the paper at small scale, such as ``digits for cifar10``."""
    queries: tuple[ModelQuery, ...] = ()
    """The statistics to measure on its models when it has finished."""


@dataclass(frozen=True)
class ReproductionPlan:
    """The runs that reproduce the chosen cells of a table.

    Attributes:
        table: the published table.
        cells: the chosen cells.
        deviations: how the runs deviate from the paper.
        seeds: the seeds of every experiment.
        runs: every distinct experiment with every seed.
        not_runnable: by the name of a cell, the reason why it cannot be run.
        skipped: the runs that only cells in ``not_runnable`` need.
    """

    table: PaperTable
    cells: tuple[Cell, ...]
    deviations: Deviations
    seeds: tuple[int, ...]
    runs: tuple[PlannedExperiment, ...]
    not_runnable: dict[str, str]
    skipped: tuple[PlannedExperiment, ...] = ()

    def runs_of(self, cell: Cell) -> list[list[PlannedExperiment]]:
        """Return one list per experiment of a cell: its runs with all seeds."""
        keys = [self.key(config) for config in cell.configs]
        return [[run for run in self.runs if run.key == key] for key in keys]

    def key(self, paper_config: Config) -> str:
        """Return the key of the runs that stand for a config of the paper."""
        return _key(self.deviations.apply(paper_config)[0])


def make_plan(
    table: PaperTable, cells: Sequence[Cell], seeds: Sequence[int], out: Path, deviations: Deviations
) -> ReproductionPlan:
    """Plan the runs behind the chosen cells, each distinct experiment once per seed, in folders below ``out``.

    Several cells can need the same experiment, for example its accuracy and its rounds to a target. A gain has no
    experiment itself; the cells it is computed from are planned instead.
    """
    sources = dict.fromkeys(source for cell in cells for source in table.sources(cell))
    reasons = {cell.name: _reason_not_runnable(cell, deviations) for cell in sources}
    not_runnable = {name: reason for name, reason in reasons.items() if reason}
    runs = _planned_runs([cell for cell in sources if cell.name not in not_runnable], table, seeds, out, deviations)
    needed = {run.key for run in runs}
    skipped = _planned_runs([cell for cell in sources if cell.name in not_runnable], table, seeds, out, deviations)
    skipped = [run for run in skipped if run.key not in needed]
    return ReproductionPlan(table, tuple(cells), deviations, tuple(seeds), tuple(runs), not_runnable, tuple(skipped))


def _planned_runs(
    cells: Iterable[Cell], table: PaperTable, seeds: Sequence[int], out: Path, deviations: Deviations
) -> list[PlannedExperiment]:
    """Return the runs that cells of a table need, each distinct experiment once per seed."""
    # By key: the config of an experiment, and the cells that need it with its stand-ins.
    experiments: dict[str, tuple[Config, list[tuple[Cell, tuple[str, ...]]]]] = {}
    for cell in cells:
        for paper_config in cell.configs:
            config, stand_ins = deviations.apply(paper_config)
            if deviations.small and isinstance(cell.statistic, Corrupted):
                stand_ins = (*stand_ins, f"{CORRUPTIONS} for published corruptions")
            experiments.setdefault(_key(config), (config, []))[1].append((cell, stand_ins))
    folders = _experiment_folders(table.paper, deviations)
    return [
        PlannedExperiment(
            config.changed(seed=seed),
            out / folders[key] / f"seed-{seed}",
            key,
            cells=tuple(dict.fromkeys(cell.name for cell, _ in uses)),
            stand_ins=tuple(dict.fromkeys(text for _, stand_ins in uses for text in stand_ins)),
            queries=tuple(dict.fromkeys(query for cell, _ in uses if (query := model_query(cell)) is not None)),
        )
        for seed in seeds
        for key, (config, uses) in experiments.items()
    ]


def model_query(cell: Cell) -> ModelQuery | None:
    """Return what to measure on a model of a run for a cell; None if its number follows from the run's evaluations."""
    return ModelQuery(cell.statistic, cell.evaluated) if isinstance(cell.statistic, ModelStatistic) else None


def _reason_not_runnable(cell: Cell, deviations: Deviations) -> str:
    """Return why a cell cannot be run; empty if it can. At small scale it always can, since stand-ins are used."""
    if deviations.small:
        return ""
    reasons = [cell.needs] if cell.needs else []
    if cell.weights and not deviations.has_initial_weights:
        reasons.append(f"{cell.weights}: supply them with --set init=FILE")
    corrupted_images = f"{cell.configs[0].data.dataset}_c"
    if isinstance(cell.statistic, Corrupted) and not is_available(corrupted_images, deviations.data_dir):
        reasons.append(f"{corrupted_images} is not downloaded: fedflat data get {corrupted_images}")
    return ", ".join(reasons)


@cache
def _experiment_folders(paper: Paper, deviations: Deviations) -> dict[str, str]:
    """Return the folder of every experiment of a paper, by the experiment's key.

    An experiment's folder is named after the first cell of the paper that needs it, whichever cells are chosen, so
    that all tables of the paper share its runs.
    """
    folders: dict[str, str] = {}
    for table in paper.tables.values():
        for cell in table.cells.values():
            for config in cell.configs:
                subfolder = f"/{folder_name(config.algorithm)}" if len(cell.configs) > 1 else ""
                key = _key(deviations.apply(config)[0])
                folders.setdefault(key, f"{table.name}/{cell.name}{subfolder}")
    return folders


def _key(config: Config) -> str:
    """Return a text that identifies a config."""
    return config.model_dump_json()
