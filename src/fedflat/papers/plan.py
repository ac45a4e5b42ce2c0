"""What must be run for some cells of a table: each distinct experiment once, in a folder named by the paper's first cell that needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedflat.experiment.campaign.compare import folder_name
from fedflat.experiment.config import Config
from fedflat.experiment.store.run_folder import Awaited
from fedflat.papers.cells import Cell
from fedflat.papers.library import Paper, Table
from fedflat.papers.numbers import Corrupted, Gain, Last, OfModels
from fedflat.papers.post_hoc import Asked
from fedflat.papers.small import CORRUPTIONS, at_hand, small

SMALL_SCALE = "small scale"
"""The remark on all that was done at that scale."""


def _unchanged(config: Config) -> Config:
    return config


@dataclass(frozen=True)
class Scale:
    """How a table is reproduced: as in the paper, with fewer rounds, small, or with other settings."""

    small: bool = False
    rounds: int | None = None
    folder: Path | None = None
    """Where the datasets lie."""
    change: Callable[[Config], Config] = _unchanged
    """What the user sets besides."""
    changed: tuple[str, ...] = ()
    """The settings among them that change results."""
    weights: bool = False
    """Whether the user brings weights to start from."""

    def of(self, config: Config) -> tuple[Config, tuple[str, ...]]:
        """A config at this scale, and what stands for what in it."""
        made, instead = small(config, self.folder) if self.small else (config, ())
        if self.rounds is not None:
            made = made.model_copy(update={"training": made.training.model_copy(update={"rounds": self.rounds})})
        if self.folder is not None:
            made = made.model_copy(update={"data": made.data.model_copy(update={"folder": self.folder})})
        return self.change(made), instead

    def obstacle(self, cell: Cell) -> str:
        """Why no verdict on a cell can be given, if none can."""
        if self.small:
            return SMALL_SCALE
        if self._changing(cell):
            return "other settings"
        return "other initial weights" if self.weights and not cell.weights else ""

    def _changing(self, cell: Cell) -> list[str]:
        """The settings that change a cell's number; how often models are evaluated on the way is none where the last one counts."""
        last = isinstance(cell.number, (Last, OfModels))
        return [text for text in self.changed if not (last and text.startswith("evaluation.every="))]


@dataclass(frozen=True)
class Planned(Awaited):
    """One experiment with one seed."""

    experiment: str
    """The config with seed 0 as text, by which cells find it."""
    cells: tuple[str, ...]
    """The names of the chosen cells that need it."""
    instead: tuple[str, ...]
    asked: tuple[Asked, ...] = ()
    """What is measured on its models afterwards."""


@dataclass(frozen=True)
class Plan:
    """All that is to be run, and what cannot be."""

    table: Table
    cells: tuple[Cell, ...]
    """The chosen ones."""
    scale: Scale
    seeds: tuple[int, ...]
    runs: tuple[Planned, ...]
    lacking: dict[str, str]
    """By cell, why it cannot be run."""

    def runs_of(self, cell: Cell) -> list[list[Planned]]:
        """The runs of a cell, those of each of its experiments together."""
        wanted = [_as_text(self.scale.of(config)[0]) for config in cell.configs]
        return [[run for run in self.runs if run.experiment == experiment] for experiment in wanted]


def make_plan(table: Table, cells: Sequence[Cell], seeds: Sequence[int], out: Path, scale: Scale) -> Plan:
    """The runs of some cells and of those from which they are formed."""
    wanted = dict.fromkeys(source for cell in cells for source in sources(cell))
    lacking = {cell.name: reason for cell in wanted if (reason := _lacks(cell, scale))}
    homes = _homes(table.paper, scale)
    needing: dict[str, list[str]] = {}
    asked: dict[str, list[Asked]] = {}
    made: dict[str, tuple[Config, tuple[str, ...]]] = {}
    for cell in wanted:
        for config in cell.configs if cell.name not in lacking else ():
            adapted, instead = scale.of(config)
            key = _as_text(adapted)
            made[key] = (adapted, tuple(dict.fromkeys((*made.get(key, (adapted, ()))[1], *instead))))
            needing.setdefault(key, []).append(cell.name)
            asked.setdefault(key, []).extend(
                [Asked(cell.number, cell.evaluated)] if isinstance(cell.number, OfModels) else []
            )
    runs = [
        Planned(
            config.model_copy(update={"seed": seed}),
            out / homes[key] / f"seed-{seed}",
            key,
            tuple(needing[key]),
            instead + _made_images(asked[key], scale),
            tuple(dict.fromkeys(asked[key])),
        )
        for seed in seeds
        for key, (config, instead) in made.items()
    ]
    return Plan(table, tuple(cells), scale, tuple(seeds), tuple(runs), lacking)


def sources(cell: Cell) -> tuple[Cell, ...]:
    """The cells whose runs a cell is formed from: for a gain two others, else itself."""
    return cell.formed_from() if isinstance(cell.number, Gain) else (cell,)


def _lacks(cell: Cell, scale: Scale) -> str:
    """Why a cell cannot be run at this scale; at small scale stand-ins do for whatever is missing."""
    if scale.small:
        return ""
    missing = f"{cell.weights}: bring them with --set init=FILE" if cell.weights and not scale.weights else ""
    return ", ".join(filter(None, (cell.needs, missing, _images(cell, scale))))


def _images(cell: Cell, scale: Scale) -> str:
    """The corrupted test images that a cell needs and that are not here."""
    name = f"{cell.configs[0].data.dataset}_c"
    lacks = isinstance(cell.number, Corrupted) and not at_hand(name, scale.folder)
    return f"{name}, which is not here: fedflat data get {name}" if lacks else ""


def _made_images(asked: Sequence[Asked], scale: Scale) -> tuple[str, ...]:
    """What stands for corrupted test images at small scale."""
    return (
        (f"{CORRUPTIONS} for published corruptions",)
        if scale.small and any(isinstance(one.number, Corrupted) for one in asked)
        else ()
    )


@cache
def _homes(paper: Paper, scale: Scale) -> dict[str, str]:
    """The folder of every experiment of a paper, whichever cells are chosen, so that another choice or another table finds it again."""
    homes: dict[str, str] = {}
    for table in paper.tables.values():
        for cell in table.cells.values():
            for config in cell.configs:
                several = f"/{folder_name(config.algorithm)}" if len(cell.configs) > 1 else ""
                homes.setdefault(_as_text(scale.of(config)[0]), f"{table.name}/{cell.name}{several}")
    return homes


def _as_text(config: Config) -> str:
    return config.model_dump_json()
