"""Measurements of runs as plain values: flatness over rounds, spectra, landscapes, clients, forgetting."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedflat.display import is_share
from fedflat.errors import UserError
from fedflat.experiment.analysis.landscapes import load_landscapes
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.figures.flatness_log import label_of, logged
from fedflat.reporting.figures.style import algorithm_of
from fedflat.reporting.page.gather import relative_paths

if TYPE_CHECKING:
    from fedflat.flatness.landscapes.grid import Landscape
    from fedflat.reporting.page.gather import Group

MAX_EIGENVALUES = 50
MAX_ROUNDS = 60
"""Maximum number of rounds in a client view; more are subsampled."""
MAX_VIEWS = 24
"""Maximum number of spectra, and of client views, on one page."""
MAX_LANDSCAPES = 6

Values = dict[str, Any]


def views_of(group: Group) -> Values:
    """Collect the flatness measurements of a group's runs: values over rounds, spectra and views of clients.

    ``more`` is the number of spectra and client views beyond ``MAX_VIEWS``, which the page omits.
    """
    spectra, clients = _spectra(group), _client_views(group.records)
    return {
        "log": _flatness_log(group),
        "spectra": spectra[:MAX_VIEWS],
        "clients": clients[:MAX_VIEWS],
        "more": max(0, len(spectra) - MAX_VIEWS) + max(0, len(clients) - MAX_VIEWS),
    }


def landscapes_of(group: Group) -> dict[str, Landscape]:
    """Load up to ``MAX_LANDSCAPES`` two-dimensional landscapes of a group's runs, by name; skip unreadable files."""
    landscapes: dict[str, Landscape] = {}
    for _, path in _measurement_files(group.records, "landscape.json"):
        with _left_out_if_damaged(path):
            for name, landscape in load_landscapes(path).items():
                if landscape.dimensions == 2 and len(landscapes) < MAX_LANDSCAPES:
                    label = name if name not in landscapes else f"{name} ({relative_paths(str(path.parent))})"
                    landscapes[label] = landscape
    return landscapes


def _measurement_files(records: Sequence[Record], name: str) -> Iterator[tuple[Record, Path]]:
    """Yield each file of this name below a run's ``flatness`` folder, together with the run."""
    for record in records:
        if record.folder is not None:
            for path in sorted((record.folder.path / "flatness").rglob(name)):
                yield record, path


@contextmanager
def _left_out_if_damaged(path: Path) -> Iterator[None]:
    """Turn an error that a measurement file causes into a warning, so that the report does not fail because of it."""
    try:
        yield
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError):
        file = relative_paths(str(path))
        warnings.warn(f"{file} is damaged or of another version, and left out; measure again", stacklevel=3)


def _flatness_log(group: Group) -> Values:
    """Average every quantity that was logged during training over seeds, for plots with one line per row of the report.

    The result holds, for each quantity, its label (``words``) and its lines.
    """
    lines: dict[str, list[Values]] = {}
    for number, (_, row, _) in enumerate(group.rows):
        runs = [record for record in row.records if any("flatness" in entry for entry in record.history)]
        logs = [logged(record, row.model) for record in runs]
        for name in dict.fromkeys(name for log in logs for name in log):
            means = _mean_over_runs([dict(log[name]) for log in logs if name in log])
            if means:
                lines.setdefault(name, []).append({"row": number, "x": list(means), "y": list(means.values())})
    return {name: {"words": label_of(name), "lines": lines[name]} for name in lines}


def _mean_over_runs(runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Average the values of several runs at each round that all runs have; each run maps rounds to values."""
    if not runs:
        return {}
    common_rounds = [number for number in runs[0] if all(number in values for values in runs)]
    return {number: _rounded(fmean(values[number] for values in runs)) for number in common_rounds}


def _spectra(group: Group) -> list[Values]:
    """Collect the spectra of all models in the runs' spectrum files; a file may also contain models of other runs.

    A model has the colour and marker of the report's row with its label, or else of the row with its algorithm if no
    other model has them, or else unused ones.
    """
    spectra: dict[str, Values] = {}
    for _, path in _measurement_files(group.records, "spectrum.json"):
        with _left_out_if_damaged(path):
            document = json.loads(path.read_text())
            for name, model in document.get("models", {}).items():
                if model.get("subsets"):
                    matrix = model["subsets"][0].get("matrix", "hessian")
                    label = name if matrix == "hessian" else f"{name}, {matrix}"
                    label = label if label not in spectra else f"{label} ({relative_paths(str(path.parent))})"
                    values = _spectrum_values(label, model["subsets"], document.get("on", ""))
                    spectra[label] = {**values, "described": model.get("described", "")}
    rows = {label: style.number for label, style in group.styles.items()}
    chosen = {label: rows[label] for label in spectra if label in rows}
    for label in spectra:
        algorithm = rows.get(algorithm_of(label))
        if label not in chosen:
            is_free = algorithm not in chosen.values()
            used = {*rows.values(), *chosen.values()}
            unused = next(number for number in count() if number not in used)
            chosen[label] = algorithm if algorithm is not None and is_free else unused
    return [{**spectrum, "style": chosen[label]} for label, spectrum in spectra.items()]


def _spectrum_values(label: str, subsets: Sequence[Mapping[str, Any]], on: str) -> Values:
    """Average the spectra of one model over subsets of examples.

    Args:
        label: label of the model.
        subsets: the spectrum on each subset, as ``Spectrum.document`` returns it.
        on: name of the data, e.g. ``train``.
    """
    shown = min(MAX_EIGENVALUES, *(len(subset["eigenvalues"]) for subset in subsets))
    eigenvalues = [fmean(subset["eigenvalues"][index] for subset in subsets) for index in range(shown)]
    return {
        "label": label,
        "on": on,
        "examples": subsets[0].get("examples"),
        "subsets": len(subsets),
        "eigenvalues": [_rounded(eigenvalue) for eigenvalue in eigenvalues],
        "lambda_max": _mean_of_numbers(subset["lambda_max"] for subset in subsets),
        "lambda_min": _mean_of_numbers(subset.get("lambda_min") for subset in subsets),
        "ratio": _mean_of_numbers(subset.get("lambda_max_over_lambda_5") for subset in subsets),
        "trace": _mean_of_numbers(subset["trace"]["value"] for subset in subsets if subset.get("trace")),
    }


def _mean_of_numbers(values: Iterable[Any]) -> float | None:
    """Average the values that are numbers; None if there are none."""
    numbers = [value for value in values if isinstance(value, (int, float))]
    return fmean(numbers) if numbers else None


def _client_views(records: Sequence[Record]) -> list[Values]:
    """Collect, for each measured run, the accuracy of every class and client over rounds, and forgetting."""
    views = []
    for record, path in _measurement_files(records, "clients.json"):
        with _left_out_if_damaged(path):
            document = json.loads(path.read_text())
            entries = document.get("models", [])  # measurements of the server model, one entry per measured round
            if not entries or "accuracy" not in entries[-1] or not is_share(record.metric):  # shades are from 0 to 1
                continue
            step = ceil(len(entries) / MAX_ROUNDS)
            last = len(entries) - 1
            shown = entries[last % step :: step]  # always includes the last round
            views.append(
                {
                    "label": f"{record.config.algorithm}, seed {record.config.seed}",
                    "rounds": [entry["round"] for entry in shown],
                    "classes": _accuracies(shown, "classes"),
                    "clients": _accuracies(shown, "clients"),
                    "forgetting": document.get("forgetting", {}),
                }
            )
    return views


def _accuracies(entries: Sequence[Mapping[str, Any]], part: str) -> dict[str, list[float | None]]:
    """Return the accuracies over rounds of each class or client, by its name.

    Args:
        entries: measurements of the server model, one entry per round.
        part: ``classes`` or ``clients``.
    """
    accuracies: dict[str, list[float | None]] = {}
    for name in entries[-1]["accuracy"].get(part, {}):
        values = [entry["accuracy"][part].get(name) for entry in entries]
        accuracies[name] = [None if value is None else _rounded(value, 4) for value in values]
    return accuracies


def _rounded(value: float, digits: int = 5) -> float:
    """Round to significant digits, which keeps the page small."""
    return float(f"{value:.{digits}g}")
