"""The runs that cells need: each distinct experiment once, in a folder named after the first cell that needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedflat.experiment.campaign.compare import folder_name
from fedflat.experiment.campaign.estimate import is_available
from fedflat.experiment.config import Config
from fedflat.experiment.store.run_folder import PlannedRun
from fedflat.papers.cells import Cell
from fedflat.papers.library import Paper, PaperTable
from fedflat.papers.numbers import Corrupted, Last, ModelStatistic
from fedflat.papers.post_hoc import ModelQuery
from fedflat.papers.small import CORRUPTIONS, small

SMALL_SCALE = "small scale"
"""The remark on every outcome at that scale."""


def _unchanged(config: Config) -> Config:
    return config


@dataclass(frozen=True)
class ReproductionScale:
    """How a table is reproduced: as in the paper, with fewer rounds, at small scale, or with other settings."""

    small: bool = False
    rounds: int | None = None
    folder: Path | None = None
    """Where datasets lie."""
    change: Callable[[Config], Config] = _unchanged
    """Applies the user's settings."""
    changed: tuple[str, ...] = ()
    """Those settings of the user that change results."""
    weights: bool = False
    """Whether the user supplies initial weights."""

    def of(self, config: Config) -> tuple[Config, tuple[str, ...]]:
        """A config at this scale, and its stand-ins."""
        made, stand_ins = small(config, self.folder) if self.small else (config, ())
        if self.rounds is not None:
            made = made.model_copy(update={"training": made.training.model_copy(update={"rounds": self.rounds})})
        if self.folder is not None:
            made = made.model_copy(update={"data": made.data.model_copy(update={"dir": self.folder})})
        return self.change(made), stand_ins

    def obstacle(self, cell: Cell) -> str:
        """Why a cell cannot be judged; empty if it can."""
        if self.small:
            return SMALL_SCALE
        if self._changes(cell):
            return "other settings"
        return "other initial weights" if self.weights and not cell.weights else ""

    def _changes(self, cell: Cell) -> list[str]:
        """The settings that change a cell's number; how often models are evaluated matters only before the last one."""
        only_last = isinstance(cell.statistic, (Last, ModelStatistic))
        return [text for text in self.changed if not (only_last and text.startswith("evaluation.every="))]


@dataclass(frozen=True)
class PlannedExperiment(PlannedRun):
    """An experiment with one seed."""

    key: str
    """The config with seed 0 as JSON, by which cells find their runs."""
    cells: tuple[str, ...]
    """Names of the chosen cells that need it."""
    stand_ins: tuple[str, ...]
    queries: tuple[ModelQuery, ...] = ()
    """What to measure on its models when it has finished."""


@dataclass(frozen=True)
class ReproductionPlan:
    """The runs that reproduce some cells of a table."""

    table: PaperTable
    cells: tuple[Cell, ...]
    scale: ReproductionScale
    seeds: tuple[int, ...]
    runs: tuple[PlannedExperiment, ...]
    lacking: dict[str, str]
    """Why a cell cannot be run, by name."""

    def runs_of(self, cell: Cell) -> list[list[PlannedExperiment]]:
        """The runs of a cell, one list per experiment."""
        keys = [_key(self.scale.of(config)[0]) for config in cell.configs]
        return [[run for run in self.runs if run.key == key] for key in keys]


def make_plan(
    table: PaperTable, cells: Sequence[Cell], seeds: Sequence[int], out: Path, scale: ReproductionScale
) -> ReproductionPlan:
    """Plan the runs of some cells, and of those that gains are computed from, in folders below ``out``."""
    sources = dict.fromkeys(source for cell in cells for source in table.sources(cell))
    lacking = {cell.name: reason for cell in sources if (reason := _lacks(cell, scale))}
    homes = _homes(table.paper, scale)
    needing: dict[str, list[str]] = {}
    queries: dict[str, list[ModelQuery]] = {}
    configs: dict[str, tuple[Config, tuple[str, ...]]] = {}
    for cell in sources:
        for config in cell.configs if cell.name not in lacking else ():
            scaled, stand_ins = scale.of(config)
            key = _key(scaled)
            known = configs[key][1] if key in configs else ()
            configs[key] = (scaled, tuple(dict.fromkeys((*known, *stand_ins))))
            needing.setdefault(key, []).append(cell.name)
            queries.setdefault(key, [])
            if isinstance(cell.statistic, ModelStatistic):
                queries[key].append(ModelQuery(cell.statistic, cell.evaluated))
    runs = [
        PlannedExperiment(
            config.model_copy(update={"seed": seed}),
            out / homes[key] / f"seed-{seed}",
            key,
            tuple(needing[key]),
            stand_ins + _generated_images(queries[key], scale),
            tuple(dict.fromkeys(queries[key])),
        )
        for seed in seeds
        for key, (config, stand_ins) in configs.items()
    ]
    return ReproductionPlan(table, tuple(cells), scale, tuple(seeds), tuple(runs), lacking)


def _lacks(cell: Cell, scale: ReproductionScale) -> str:
    """Why a cell cannot be run; at small scale, stand-ins replace whatever is missing."""
    if scale.small:
        return ""
    weights = f"{cell.weights}: supply them with --set init=FILE" if cell.weights and not scale.weights else ""
    return ", ".join(filter(None, (cell.needs, weights, _missing_images(cell, scale))))


def _missing_images(cell: Cell, scale: ReproductionScale) -> str:
    """The corrupted test images that a cell needs but that are not downloaded."""
    name = f"{cell.configs[0].data.dataset}_c"
    missing = isinstance(cell.statistic, Corrupted) and not is_available(name, scale.folder)
    return f"{name} is not downloaded: fedflat data get {name}" if missing else ""


def _generated_images(queries: Sequence[ModelQuery], scale: ReproductionScale) -> tuple[str, ...]:
    """The stand-in for corrupted test images, if it is used."""
    used = scale.small and any(isinstance(query.statistic, Corrupted) for query in queries)
    return (f"{CORRUPTIONS} for published corruptions",) if used else ()


@cache
def _homes(paper: Paper, scale: ReproductionScale) -> dict[str, str]:
    """The folder of every experiment of a paper, independent of the chosen cells, so that tables share their runs."""
    homes: dict[str, str] = {}
    for table in paper.tables.values():
        for cell in table.cells.values():
            for config in cell.configs:
                subfolder = f"/{folder_name(config.algorithm)}" if len(cell.configs) > 1 else ""
                homes.setdefault(_key(scale.of(config)[0]), f"{table.name}/{cell.name}{subfolder}")
    return homes


def _key(config: Config) -> str:
    return config.model_dump_json()
