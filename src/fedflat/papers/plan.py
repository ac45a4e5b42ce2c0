"""The runs that cells need: each distinct experiment once, in a folder named after the first cell that needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedflat.experiment.campaign.compare import folder_name
from fedflat.experiment.campaign.estimate import is_available
from fedflat.experiment.campaign.planned_run import PlannedRun
from fedflat.experiment.config import Config
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
    """The folder of the datasets."""
    change: Callable[[Config], Config] = _unchanged
    """Applies the user's settings."""
    changed: tuple[str, ...] = ()
    """The user's settings that change results, as ``name=value``."""
    weights: bool = False
    """Whether the user supplies initial weights."""

    def of(self, config: Config) -> tuple[Config, tuple[str, ...]]:
        """Return a config at this scale, and its stand-ins."""
        scaled, stand_ins = small(config, self.folder) if self.small else (config, ())
        if self.rounds is not None:
            training = scaled.training.model_copy(update={"rounds": self.rounds})
            scaled = scaled.model_copy(update={"training": training})
        if self.folder is not None:
            data = scaled.data.model_copy(update={"dir": self.folder})
            scaled = scaled.model_copy(update={"data": data})
        return self.change(scaled), stand_ins

    def obstacle(self, cell: Cell) -> str:
        """Return why a cell cannot be judged; empty if it can."""
        if self.small:
            return SMALL_SCALE
        # Statistics of the last model do not depend on how often models are evaluated.
        uses_last_only = isinstance(cell.statistic, (Last, ModelStatistic))
        changed = [text for text in self.changed if not (uses_last_only and text.startswith("evaluation.every="))]
        if changed:
            return "other settings"
        return "other initial weights" if self.weights and not cell.weights else ""


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
        """Return the runs of a cell, one list with all seeds per experiment."""
        keys = [_key(self.scale.of(config)[0]) for config in cell.configs]
        return [[run for run in self.runs if run.key == key] for key in keys]


def make_plan(
    table: PaperTable, cells: Sequence[Cell], seeds: Sequence[int], out: Path, scale: ReproductionScale
) -> ReproductionPlan:
    """Plan the runs of some cells, and of those that gains are computed from, in folders below ``out``."""
    sources = dict.fromkeys(source for cell in cells for source in table.sources(cell))
    obstacles = {cell.name: _obstacle(cell, scale) for cell in sources}
    lacking = {name: reason for name, reason in obstacles.items() if reason}
    configs: dict[str, Config] = {}  # this and the following by key; dictionaries serve as ordered sets
    cell_names: dict[str, dict[str, None]] = {}
    stand_ins: dict[str, dict[str, None]] = {}
    queries: dict[str, dict[ModelQuery, None]] = {}
    for cell in sources:
        for config in cell.configs if cell.name not in lacking else ():
            scaled, replaced = scale.of(config)
            key = _key(scaled)
            configs[key] = scaled
            cell_names.setdefault(key, {})[cell.name] = None
            stand_ins.setdefault(key, {}).update(dict.fromkeys(replaced))
            queries.setdefault(key, {})
            if isinstance(cell.statistic, ModelStatistic):
                queries[key][ModelQuery(cell.statistic, cell.evaluated)] = None
            if scale.small and isinstance(cell.statistic, Corrupted):
                stand_ins[key][f"{CORRUPTIONS} for published corruptions"] = None
    folders = _experiment_folders(table.paper, scale)
    runs = [
        PlannedExperiment(
            config.model_copy(update={"seed": seed}),
            out / folders[key] / f"seed-{seed}",
            key,
            tuple(cell_names[key]),
            tuple(stand_ins[key]),
            tuple(queries[key]),
        )
        for seed in seeds
        for key, config in configs.items()
    ]
    return ReproductionPlan(table, tuple(cells), scale, tuple(seeds), tuple(runs), lacking)


def _obstacle(cell: Cell, scale: ReproductionScale) -> str:
    """Return why a cell cannot be run, empty if it can; at small scale, stand-ins replace whatever is missing."""
    if scale.small:
        return ""
    obstacles = [cell.needs] if cell.needs else []
    if cell.weights and not scale.weights:
        obstacles.append(f"{cell.weights}: supply them with --set init=FILE")
    corrupted_images = f"{cell.configs[0].data.dataset}_c"
    if isinstance(cell.statistic, Corrupted) and not is_available(corrupted_images, scale.folder):
        obstacles.append(f"{corrupted_images} is not downloaded: fedflat data get {corrupted_images}")
    return ", ".join(obstacles)


@cache
def _experiment_folders(paper: Paper, scale: ReproductionScale) -> dict[str, str]:
    """Return the folder of every experiment by key, independent of the chosen cells, so that tables share runs."""
    folders: dict[str, str] = {}
    for table in paper.tables.values():
        for cell in table.cells.values():
            for config in cell.configs:
                subfolder = f"/{folder_name(config.algorithm)}" if len(cell.configs) > 1 else ""
                folders.setdefault(_key(scale.of(config)[0]), f"{table.name}/{cell.name}{subfolder}")
    return folders


def _key(config: Config) -> str:
    """Return a text that identifies a config."""
    return config.model_dump_json()
