"""A row of a comparison: the runs of one algorithm that differ only in their seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedflat.engines.problem.task import TASK_TARGETS
from fedflat.errors import MAX_SHOWN
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import is_user_supplied
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.provenance import recorded_data
from fedflat.experiment.store.run_folder import Record
from fedflat.text import show_value

WORSE_THAN_MEAN = "R² is not above 0, so these models are no better than predicting the mean of the targets"
"""Warning about rows with ``is_worse_than_mean``."""
MIXED_PLUGINS = "Runs of one row began with different plugins, or versions of one, so its mean may mix different code"
"""Warning about rows with ``mixed_plugins``."""
MIXED_DATA = "Runs began with different versions of their data, so their values are not comparable"
"""Warning about the datasets that ``mixed_data`` returns."""


def mixed_data(records: Iterable[Record]) -> list[str]:
    """The datasets, as in the runs' configs, whose content differs between runs.

    Classification and regression on one dataset have different targets, so only runs of one kind are compared.
    """
    fingerprints: dict[tuple[str, bool], set[str]] = {}
    for record in records:
        if record.folder and (fingerprint := recorded_data(record.folder)):
            is_regression = TASK_TARGETS.get(record.config.training.task) == "numbers"
            fingerprints.setdefault((record.config.data.dataset, is_regression), set()).add(fingerprint)
    return list(dict.fromkeys(dataset for (dataset, _), distinct in fingerprints.items() if len(distinct) > 1))


def user_settings(record: Record) -> dict[str, str]:
    """The user-supplied dataset, model and task of a run, with fingerprints, by the names of the settings they replace.

    The config has at most their names, which others may share: every ``nn.Sequential`` is ``custom:Sequential``.
    """
    inputs, dataset = record.input_fingerprints, record.config.data.dataset
    objects = {"model": inputs.get("model"), "training.task": inputs.get("task")}
    if is_user_supplied(dataset) and "data" in inputs:
        objects["data.dataset"] = f"{dataset.partition(':')[2]} {inputs['data']}"
    return {name: _shortened(text) for name, text in objects.items() if text is not None}


def _shortened(text: str) -> str:
    """Replace all after the class name in a long fingerprint, e.g. of a task with many attributes, by a hash."""
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text.partition('(')[0]} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Row:
    """One row of a comparison: one model of an algorithm, over all runs that differ only in their seed."""

    algorithm: str
    """The algorithm with its parameters and averages, in its canonical spelling."""
    model: str
    """Name of the evaluated model: ``server``, or an average such as ``wima(window=50)``."""
    records: tuple[Record, ...]
    """The runs of this row, one per seed."""

    @property
    def averaged(self) -> list[Record]:
        """The runs that means over seeds include: those that neither diverged nor are unfinished."""
        return [record for record in self.records if record.status in ("finished", "stopped")]

    @property
    def drawn(self) -> list[Record]:
        """The runs of the mean curve. Diverged runs would cut it short, so they are used only if all runs diverged."""
        evaluated = [record for record in self.records if record.history]
        return [record for record in evaluated if record.status != "diverged"] or evaluated

    @property
    def ended(self) -> list[Record]:
        """The runs that finished, stopped early or diverged; the others are unfinished."""
        return [record for record in self.records if record.status in ENDED_STATUSES]

    @property
    def is_worse_than_mean(self) -> bool:
        """Whether a run's last evaluation has an R² of at most 0, i.e. predicting the mean target would be as good."""
        last = [record.history[-1]["test"].get(self.model, {}).get("r2") for record in self.records if record.history]
        return any(r2 is not None and r2 <= 0 for r2 in last)  # None if all test targets are equal

    @property
    def last_metrics(self) -> dict[str, dict[int, float]]:
        """The last values of all metrics of the model, by name and seed, for the runs that means include."""
        metrics: dict[str, dict[int, float]] = {}
        for record in self.averaged:
            last = record.history[-1]["test"].get(self.model, {}) if record.history else {}
            for name, value in last.items():
                if value is not None:
                    metrics.setdefault(name, {})[record.config.seed] = float(value)
        return metrics

    @property
    def mixed_plugins(self) -> list[str]:
        """File names of plugins that were not used with the same content by all runs."""
        used = [record.folder.plugins() for record in self.records if record.folder]
        of_all_runs = set.intersection(*(set(plugins.values()) for plugins in used)) if used else set()
        mixed = (Path(path).name for plugins in used for path, digest in plugins.items() if digest not in of_all_runs)
        return list(dict.fromkeys(mixed))

    @property
    def label(self) -> str:
        """The algorithm as trained, plus the evaluated average if the row has one.

        Other averages of the algorithm do not affect training and are left out.
        """
        averages = self.records[0].averages
        trained = self.algorithm.removesuffix("".join(f"+{average}" for average in averages))
        if self.model == "server":
            return trained
        # Other models, such as the plain mean of the clients' models, are named in parentheses.
        return f"{trained}+{self.model}" if self.model in averages else f"{trained} ({self.model})"


class LabelledRow(NamedTuple):
    """A row with the settings that distinguish it from others."""

    label: str
    """The label of the row, followed by these settings."""
    row: Row
    settings: dict[str, Any]
    """The settings in which it differs from other rows, by full name."""


def rows_of(records: Iterable[Record], settings_of: Callable[[Config], Mapping[str, Any]]) -> list[LabelledRow]:
    """Combine runs that differ only in their seed into rows, one row for each model that they evaluated.

    Runs that have not been evaluated yet have a row for the server model. Runs that differ only in averages train the
    same server model, so it has a single row, with the runs of the algorithm that has the most ended ones.

    Args:
        records: the runs.
        settings_of: returns the settings that distinguish rows, by full name and without algorithm and seed.
    """
    experiments: dict[tuple[str, str], tuple[dict[str, Any], list[Record]]] = {}
    for record in records:
        settings = {**settings_of(record.config), **user_settings(record)}
        experiments.setdefault((record.config.algorithm, str(settings)), (settings, []))[1].append(record)
    differing = differing_names([settings for settings, _ in experiments.values()])
    rows: dict[str, LabelledRow] = {}
    for values, runs in experiments.values():
        by_seed = tuple(sorted(runs, key=lambda record: record.config.seed))
        distinguishing = {name: values[name] for name in differing}
        for model in dict.fromkeys(name for record in runs for name in record.evaluated) or ("server",):
            row = Row(runs[0].config.algorithm, model, by_seed)
            label = ", ".join([row.label, *assignments(distinguishing)])
            if label not in rows or len(row.ended) > len(rows[label].row.ended):
                rows[label] = LabelledRow(label, row, distinguishing)
    return list(rows.values())


def differing_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings in which several experiments differ.

    >>> differing_names([{"training.lr": 0.1, "seed": 0}, {"training.lr": 0.2, "seed": 0}])
    ['training.lr']
    """
    names = dict.fromkeys(name for values in settings for name in values)
    return [name for name in names if len({str(values.get(name)) for values in settings}) > 1]


def assignments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as short assignments.

    >>> assignments({"training.lr": 0.1, "data.clients": None})
    ['lr=0.1', 'clients=none']
    """
    return [f"{name.rpartition('.')[2]}={show_value(value)}" for name, value in settings.items()]
