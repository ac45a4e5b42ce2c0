"""The ledger: every measured cell of the papers, with its verdict.

An entry holds the published number and up to three others: measured with the paper's settings, measured with the
authors' released code, and measured with tuned hyperparameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config
from fedflat.papers.cells import Cell
from fedflat.papers.document import outcome_row, outcomes_document, shown_values
from fedflat.papers.library import find_cell, find_table, papers, slug
from fedflat.papers.numbers import Gain
from fedflat.papers.outcome import CellOutcome, RunNumber, gain_outcome, judge
from fedflat.papers.plan import EVALUATION_INTERVAL, Deviations
from fedflat.papers.protocol import protocol_hash, protocol_of
from fedflat.papers.results import StoredResult, cell_key
from fedflat.text import parse

ENOUGH_SEEDS = 3
"""Number of seeds from which a spread is meaningful."""
LEDGER_COLUMNS = (
    "table",
    "cell",
    "published",
    "measured",
    "seeds",
    "difference",
    "verdict",
    "released",
    "tuned",
    "minutes",
    "remark",
)
SUMMARY_COLUMNS = (
    "paper",
    "measured cells",
    "distinct",
    "published cells",
    "with 3 seeds",
    "verdicts",
    "runs",
    "device minutes",
)
UNKNOWN_PROTOCOL = Deviations(changed_settings=("other settings",))


@dataclass(frozen=True)
class LedgerEntry:
    """A measured cell.

    Attributes:
        cell: the cell.
        outcome: measured values and verdict.
        released: numbers of the authors' code, one per seed.
        tuned: numbers with tuned hyperparameters, one per seed.
        notes: remarks on released and tuned numbers.
        results: all runs of the experiment, even those that do not count, e.g. because they are shorter than others.
        counted: those of ``results`` that the measured value comes from, one per seed; of the best algorithm, if the
            paper reports the best of several.
    """

    cell: Cell
    outcome: CellOutcome
    released: tuple[float, ...] = ()
    tuned: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    results: tuple[StoredResult, ...] = ()
    counted: tuple[StoredResult, ...] = ()

    @property
    def dataset(self) -> str:
        """Name of the dataset."""
        return parse(self._source.configs[0].data.dataset)[0].name

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the method: its row in the table, without the dataset, and its algorithms in fedflat."""
        algorithms = (parse(config.algorithm)[0].name for config in self._source.configs)
        row = self.cell.name.split("/")[0]
        first, _, rest = row.partition("-")
        return rest if _normal(first) == _normal(self.dataset) else row, *algorithms

    @property
    def number_key(self) -> Any:
        """Identifies the measured number: cells of several tables that repeat one have the same key."""
        files = frozenset(result.file for result in self.counted)
        return files, self.cell.statistic.text, self.cell.evaluated, tuple(self.outcome.by_seed.items())

    @property
    def _source(self) -> Cell:
        """The cell itself, or for a gain the cell that another one is subtracted from."""
        return find_table(self.cell.table).sources(self.cell)[0]

    @property
    def seeds(self) -> int:
        """Number of seeds, including those without a value, e.g. because they diverged."""
        return len(self.counted) or len(self.outcome.values)

    @property
    def minutes(self) -> float:
        """Device minutes of its runs, which may measure other cells as well."""
        return sum(result.device_seconds for result in self.results) / 60

    def row(self) -> list[str]:
        """Return the entry as texts, in the columns ``LEDGER_COLUMNS``."""
        name, published, measured, _, difference, _, verdict, remark = outcome_row(self.outcome)
        others = [shown_values(values, self.cell.unit) for values in (self.released, self.tuned)]
        minutes = f"{self.minutes:.1f}" if self.results else ""
        with_value = len(self.outcome.values)
        is_partial = 0 < with_value < self.seeds and "seeds" not in remark
        seed_count = f"mean over {with_value} of {self.seeds} seeds" if is_partial else ""
        remarks = "; ".join(filter(None, (remark, seed_count, *self.notes)))
        return [
            self.cell.table,
            name,
            published,
            measured,
            str(self.seeds),
            difference,
            verdict,
            *others,
            minutes,
            remarks,
        ]

    def document(self) -> dict[str, Any]:
        """Return the entry as JSON-compatible values."""
        return {
            "table": self.cell.table,
            **outcomes_document([self.outcome])[0],
            "by_seed": dict(self.outcome.by_seed),
            "dataset": self.dataset,
            "released": list(self.released),
            "tuned": list(self.tuned),
            "notes": list(self.notes),
            "minutes": round(self.minutes, 1),
            "files": [result.file for result in self.results],
        }


class Ledger:
    """Every cell that stored results measure, in the order of the papers."""

    def __init__(self, results: Iterable[StoredResult]) -> None:
        self.results = tuple(results)
        measured: dict[Cell, list[StoredResult]] = {}  # the results that measure each cell
        for result in self.results:
            for key in result.cells:
                measured.setdefault(find_cell(result.paper, key), []).append(result)
        self.entries: list[LedgerEntry] = []
        measured_tables = {cell.table for cell in measured}
        all_tables = (table for paper in papers().values() for table in paper.tables.values())
        for table in (table for table in all_tables if table.full_name in measured_tables):
            entries = {cell: _entry(cell, measured[cell]) for cell in table.cells.values() if cell in measured}
            # A gain has no runs itself; a printed one is computed if both cells that it derives from are measured.
            for cell in table.cells.values():
                if isinstance(cell.statistic, Gain) and cell.published is not None:
                    sources = [entries[source].outcome for source in table.sources(cell) if source in entries]
                    if len(sources) == 2:
                        entries[cell] = LedgerEntry(cell, gain_outcome(cell, cell.statistic, *sources))
            self.entries += [entries[cell] for cell in table.cells.values() if cell in entries]

    def choose(
        self, name: str | None = None, dataset: str | None = None, method: str | None = None
    ) -> list[LedgerEntry]:
        """Return the entries that match all given filters.

        Args:
            name: a paper or table, e.g. ``fedswa`` or ``fedswa/table2``.
            dataset: a dataset, in any spelling.
            method: a method, or a pattern such as ``fed*swa``.
        """
        chosen = self.entries
        if name is not None:
            chosen = [entry for entry in chosen if f"{entry.cell.table}/".startswith(f"{name.strip('/').lower()}/")]
            if not chosen:
                tables = ", ".join(dict.fromkeys(entry.cell.table for entry in self.entries))
                raise UserError(f"no cell of {name} is measured; measured tables: {tables or 'none'}")
        if dataset is not None:
            known = {_normal(entry.dataset): entry.dataset for entry in chosen}
            if _normal(dataset) not in known:
                raise one_of("measured dataset", dataset, sorted(known.values()))
            chosen = [entry for entry in chosen if _normal(entry.dataset) == _normal(dataset)]
        if method is not None:
            pattern = method.lower()
            matching = [entry for entry in chosen if any(fnmatchcase(name, pattern) for name in entry.methods)]
            if not matching:
                raise one_of("measured method", method, sorted({name for entry in chosen for name in entry.methods}))
            chosen = matching
        return chosen

    def summary(self) -> list[list[str]]:
        """Return one row per paper and one for all, in the columns ``SUMMARY_COLUMNS``."""
        measured = [entry for entry in self.entries if entry.outcome.verdict != "not run"]  # e.g. only released code
        rows = []
        for row, names in ({name: [name] for name in papers()} | {"all": list(papers())}).items():
            tables = [table for name in names for table in papers()[name].tables.values()]
            printed = sum(bool(cell.published) for table in tables for cell in table.cells.values())
            entries = [entry for entry in measured if entry.cell.table.partition("/")[0] in names]
            results = [result for result in self.results if result.paper in names]
            enough = sum(entry.seeds >= ENOUGH_SEEDS for entry in entries)
            counts = Counter(entry.outcome.verdict for entry in entries)
            verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
            minutes = sum(result.device_seconds for result in results) / 60
            distinct = len({entry.number_key for entry in entries})
            numbers = (len(entries), distinct, printed, enough, verdicts, len(results), f"{minutes:.0f}")
            rows.append([row, *map(str, numbers)])
        return rows


def _entry(cell: Cell, results: Sequence[StoredResult]) -> LedgerEntry:
    """Judge the stored numbers of a cell: compare those of runs with the paper's settings with the published one."""
    paper_runs = [result for result in results if result.kind == "paper"]
    experiments = _experiments(cell, paper_runs)
    if paper_runs and len(experiments) < len(cell.configs):  # the best is unknown until all algorithms are measured
        values = _values(cell, experiments[0]) if len(experiments) == 1 else {}
        measured = f"{len(experiments)} of {len(cell.configs)} algorithms measured"
        outcome = CellOutcome(cell, values, "ran", measured)
    else:
        deviations = (deviations_of(cell, result) for runs in experiments for result in runs)
        numbers = [{result.seed: _run_number(cell, result) for result in runs} for runs in experiments] or [{}]
        outcome = judge(cell, numbers, max(deviations, key=_severity, default=Deviations()), max(map(len, numbers)))
    counted = max(experiments, key=lambda runs: fmean(_values(cell, runs).values() or [-math.inf]), default=[])
    others = {kind: [r for r in results if r.kind == kind] for kind in ("released", "tuned")}
    notes = dict.fromkeys(
        f"{kind}: {note}" for kind, runs in others.items() for r in runs if (note := r.selection or r.reason)
    )
    if any(paper_config(cell, r) for r in others["tuned"]):  # a number of its own would only repeat a seed
        notes["the search selects the settings of the paper's runs"] = None
        others["tuned"] = []
    values_by_kind = {kind: tuple(_values(cell, runs).values()) for kind, runs in others.items()}
    return LedgerEntry(
        cell, outcome, **values_by_kind, notes=tuple(notes), results=tuple(paper_runs), counted=tuple(counted)
    )


def _experiments(cell: Cell, results: Sequence[StoredResult]) -> list[list[StoredResult]]:
    """Group results by experiment; there are several if the paper reports the best of several.

    The precision and the number of rounds may differ within an experiment. Results with other settings than the
    paper's count only if there are no others.
    """
    groups: dict[Config | str, list[StoredResult]] = {}
    for result in results:
        groups.setdefault(paper_config(cell, result) or result.protocol_hash, []).append(result)
    of_paper = [_one_per_seed(runs, config) for config, runs in groups.items() if isinstance(config, Config)]
    return of_paper or [_one_per_seed(runs, None) for runs in groups.values()]


def _one_per_seed(results: Sequence[StoredResult], config: Config | None) -> list[StoredResult]:
    """Return the runs of an experiment with the paper's rounds, or else the most rounds, one per seed, by seed.

    Of several runs with a seed, the newest with the evaluation interval of ``config`` counts, or else the newest.
    """
    lengths = {run.protocol["rounds"] for run in results}
    rounds, every = (config.training.rounds, config.evaluation.every) if config else (None, None)
    if rounds not in lengths:
        rounds = max(lengths)
    ordered = sorted(results, key=lambda run: (run.protocol["eval_every"] == every, run.date))
    by_seed = {run.seed: run for run in ordered if run.protocol["rounds"] == rounds}
    return [by_seed[seed] for seed in sorted(by_seed)]


def _severity(deviations: Deviations) -> tuple[bool, bool, bool]:
    """Rank deviations: none, another evaluation interval, another number of rounds, other settings."""
    return deviations == UNKNOWN_PROTOCOL, deviations.rounds is not None, bool(deviations.changed_settings)


def deviations_of(cell: Cell, result: StoredResult) -> Deviations:
    """Return how the run of a result deviates from the paper's experiment.

    Another floating-point precision does not count as a deviation. If settings other than the number of rounds and the
    evaluation interval differ, the result is ``UNKNOWN_PROTOCOL``, which does not say which ones.
    """
    config = paper_config(cell, result)
    if config is None:
        return UNKNOWN_PROTOCOL
    every, rounds = result.protocol["eval_every"], result.protocol["rounds"]
    changed = () if every == config.evaluation.every else (f"{EVALUATION_INTERVAL}{every}",)
    return Deviations(rounds=None if rounds == config.training.rounds else rounds, changed_settings=changed)


def paper_config(cell: Cell, result: StoredResult) -> Config | None:
    """Return the experiment of a cell that a result belongs to; None if it was run with other settings."""
    may_differ = {key: result.protocol.get(key) for key in ("rounds", "eval_every", "precision")}
    for config in cell.configs:
        if protocol_hash(protocol_of(config) | may_differ) == result.protocol_hash:
            return config
    return None


def _values(cell: Cell, results: Sequence[StoredResult]) -> dict[int, float]:
    """Return the measured values of a cell by seed, without seeds that have none."""
    values = {result.seed: result.cells[cell_key(cell)].measured for result in results}
    return {seed: value for seed, value in values.items() if value is not None}


def _run_number(cell: Cell, result: StoredResult) -> RunNumber:
    return RunNumber(result.cells[cell_key(cell)].measured, result.status, int(result.protocol["rounds"]))


def _normal(dataset: str) -> str:
    """Return a dataset's name without case, hyphens and underscores, so that CIFAR-10 means cifar10."""
    return slug(dataset.replace("_", "-")).replace("-", "")
