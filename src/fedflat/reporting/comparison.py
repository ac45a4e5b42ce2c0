"""A comparison of several runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedflat.display import column_format, counted, html_table, with_unit
from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config
from fedflat.experiment.make_config import as_path
from fedflat.experiment.stopping import check_target
from fedflat.experiment.store.run_collection import runs_below
from fedflat.experiment.store.run_folder import Record, load_record
from fedflat.reporting.distinct import drop_repeated
from fedflat.reporting.row import LabelledRow, Row, differing_names, rows_of, user_settings
from fedflat.reporting.tables.summary import seed_statistics, summarise
from fedflat.reporting.tables.targets import MedianRounds, costs_to_target
from fedflat.setting_names import flat

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fedflat.reporting.result import Result


class Comparison:
    """A comparison of several runs; those that differ only in their seed are averaged.

    Copies and other repetitions of a run (same settings, seed and user-supplied objects) are left out, with a warning.

    Args:
        records: the runs, as results or as records.
    """

    def __init__(self, records: Iterable[Record | Result]) -> None:
        runs: list[Any] = [records] if isinstance(records, str | Path) else list(records)
        runs = [getattr(run, "record", run) for run in runs]
        for run in runs:
            if not isinstance(run, Record):
                raise UserError(
                    f"{run!r} is not a run; expected results, e.g. of fedflat.run; use Comparison.load(FOLDER) to read "
                    "all runs in a folder"
                )
        if not runs:
            raise UserError("no runs to compare")
        self.records, repeated = drop_repeated(runs)
        for _, reason in repeated:
            warnings.warn(f"left out: {reason}", stacklevel=2)

    @classmethod
    def load(cls, folder: str | Path) -> Comparison:
        """Load all runs at or below a folder, such as the output folder of a comparison or a sweep."""
        path = as_path("folder", folder)
        runs = runs_below(path)
        if not runs:
            raise UserError(f"no runs in {path}; expected a folder written by fedflat compare, sweep or run")
        return cls(map(load_record, runs))

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.records)

    def __iter__(self) -> Iterator[Result]:
        """Iterate over the runs as results."""
        from fedflat.reporting.result import Result

        return map(Result, self.records)

    def __repr__(self) -> str:
        labels = ", ".join(dict.fromkeys(row.label for row in self.rows()))
        return f"Comparison({self._title()}: {labels})"

    def _repr_html_(self) -> str:
        """Return an HTML table of the rows, which notebooks show."""
        columns = ("algorithm", "mean of the last evaluations", "last", "seeds")
        table, rows = self.table(), []
        number_format = column_format(row["last"].mean for row in table if row["last"].count)
        for row, labelled in zip(table, self._labelled_rows(), strict=True):
            shown = [row[name].shown(self.metric, number_format) for name in ("mean_last", "last")]
            rows.append((labelled.label, *shown, row["seeds"]))
        return html_table(f"{self._title()}, test {with_unit(self.metric)}", columns, rows)

    def _title(self) -> str:
        seeds = {record.config.seed for record in self.records}
        return f"{counted(len(self.records), 'run')} with {counted(len(seeds), 'seed')}"

    @property
    def metric(self) -> str:
        """Name of the primary metric of the runs, e.g. ``accuracy``."""
        return next((record.metric for record in self.records if record.history), "accuracy")

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of the primary metric are better."""
        return next((record.lower_is_better for record in self.records if record.history), False)

    def rows(self) -> list[Row]:
        """Return the rows of the comparison, one for each algorithm (with its settings) and evaluated model.

        A row combines runs that differ only in their seed. Runs that differ only in averages share the server's row.
        """
        return [labelled.row for labelled in self._labelled_rows()]

    def differing_settings(self) -> list[dict[str, Any]]:
        """Return, for every row, its values of the settings in which rows differ, except algorithm and seed."""
        return [labelled.settings for labelled in self._labelled_rows()]

    def _labelled_rows(self) -> list[LabelledRow]:
        """Return the rows of evaluated runs, labelled with the settings in which they differ."""
        rows = rows_of(self.records, _settings_of)
        return [labelled for labelled in rows if any(record.history for record in labelled.row.records)]

    def table(self, targets: float | Sequence[float] = ()) -> list[dict[str, Any]]:
        """Return one dictionary per row, with statistics of the primary metric over seeds, and mean costs.

        ``settings`` has the row's values of the settings in which rows differ, except algorithm and seed. ``last``,
        ``mean_last`` and ``best`` are ``SeedStatistics``; if all runs of the row diverged or are unfinished, their
        ``count`` is 0 and ``shown`` returns "–".

        Args:
            targets: one or several values of the metric. For each, ``rounds to TARGET`` has the ``median`` number of
                rounds, how many runs ``reached`` it and the number of ``runs``. The entries ``virtual seconds to
                TARGET`` and ``bytes to TARGET`` are medians, or None.
        """
        targets = (targets,) if isinstance(targets, int | float | str) else targets
        for target in targets:
            check_target(target, self.metric)
        return [self._table_row(labelled, targets) for labelled in self._labelled_rows()]

    def _table_row(self, labelled: LabelledRow, targets: Sequence[float]) -> dict[str, Any]:
        """Aggregate a row over its seeds; means exclude diverged and unfinished runs, costs only unfinished ones."""
        row = labelled.row
        values: dict[str, Any] = {
            "algorithm": row.algorithm,
            "model": row.model,
            "label": row.label,
            "settings": labelled.settings,
            "seeds": len(row.records),
            "diverged": sum(record.status == "diverged" for record in row.records),
            "unfinished": len(row.records) - len(row.ended),
        }
        model, metric, lower_is_better = row.model, self.metric, self.lower_is_better
        summaries = [summarise(record.history, model, metric, lower_is_better) for record in row.averaged]
        evaluated = [summary for summary in summaries if summary]
        for name in ("last", "mean_last", "best", "at_best_validation"):
            known = [value for summary in evaluated if (value := getattr(summary, name)) is not None]
            if known or name != "at_best_validation":  # only runs with a validation split have the latter
                values[name] = seed_statistics(known)
        if evaluated:
            values["mean_counts"] = sorted({summary.mean_count for summary in evaluated})
        for target in targets:
            needed = costs_to_target(row, metric, target, lower_is_better)
            values[f"rounds to {target:g}"] = MedianRounds(needed.median, needed.reached, len(needed.rounds))
            values[f"virtual seconds to {target:g}"] = needed.seconds
            values[f"bytes to {target:g}"] = needed.bytes
        runs = row.ended or row.records
        last_entries = [record.history[-1] for record in runs if record.history]
        for cost in ("backward_passes", "bytes_up", "bytes_down", "samples"):
            values[cost] = fmean(float(entry[cost]) for entry in last_entries) if last_entries else None
        values["seconds"] = fmean(record.seconds for record in runs)
        return values

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with one row per evaluation of every run.

        It has columns for algorithm, seed, and every other setting in which runs differ, e.g. ``training.lr``.
        """
        import pandas as pd

        settings = [{**_settings_of(record.config), **user_settings(record)} for record in self.records]
        differing = differing_names(settings)
        frames = []
        for record, values in zip(self.records, settings, strict=True):
            frame = pd.json_normalize(record.history).assign(algorithm=record.config.algorithm, seed=record.config.seed)
            for name in differing:
                frame[name] = [values.get(name)] * len(frame)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def plot(self, metric: str | None = None, over: str = "round") -> Figure:
        """Plot a test metric of every algorithm: the mean over seeds as a line, with a band of one standard deviation.

        Diverged runs are left out, unless all runs of an algorithm diverged; the legend states their number.

        Args:
            metric: name of the metric; default: the primary one.
            over: horizontal axis: ``round``, or a cost such as ``backward_passes``.
        """
        from fedflat.reporting.figures.curves import curves

        entries = (entry for record in self.records for entry in record.history)
        metrics = dict.fromkeys(name for entry in entries for values in entry["test"].values() for name in values)
        if metric is not None and metric not in metrics:
            raise one_of("metric", metric, metrics)
        lines = [
            (label + _diverged_share(row), [record.history for record in row.drawn], row.model)
            for label, row, _ in self._labelled_rows()
        ]
        metric = metric or self.metric
        return curves(lines, metric, over, self.lower_is_better if metric == self.metric else None)


def _settings_of(config: Config) -> dict[str, Any]:
    """Return all settings except algorithm and seed."""
    return {name: value for name, value in flat(config.model_dump()) if name not in ("algorithm", "seed")}


def _diverged_share(row: Row) -> str:
    """Return how many runs of a row diverged, for its label in the legend; empty if none did."""
    runs, diverged = len(row.records), sum(record.status == "diverged" for record in row.records)
    share = "" if diverged == runs else f"{diverged} of {runs} "
    return f" ({share}diverged)" if diverged else ""
