"""Measurements of runs as plain values: flatness over rounds, spectra, landscapes, clients, forgetting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil, isfinite, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedflat.display import is_share
from fedflat.experiment.analysis.landscapes import load_landscapes
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.figures.flatness_log import label_of, logged, sample_text
from fedflat.reporting.page.measurements import (
    distinct_label,
    left_out_if_damaged,
    mean_of_numbers,
    measurement_files,
    measurements_of,
    models_in_files,
    spread_over_subsets,
    styles_of,
)

if TYPE_CHECKING:
    from fedflat.flatness.landscapes.grid import Landscape
    from fedflat.reporting.page.gather import Group
    from fedflat.reporting.page.over_seeds import Measured

MAX_EIGENVALUES = 50
MAX_ROUNDS = 60
"""Maximum number of rounds in a client view; more are subsampled."""
MAX_VIEWS = 24
"""Maximum number of spectra, and of client views, on one page."""
MAX_LANDSCAPES = 6
SPECTRUM_KEYS = {
    "loss": "loss",
    "lambda_max": "lambda_max",
    "ratio": "lambda_max_over_lambda_5",
    "lambda_min": "lambda_min",
}
"""Quantities of the table of spectra, with their names in files of spectra."""
SEED_QUANTITIES = {
    "lambda_max": "lambda_max",
    "trace": "trace",
    "ratio": "lambda_max / lambda_5",
    "lambda_min": "lambda_min",
}
"""Quantities of spectra in the table of means over seeds, with their headings."""

Values = dict[str, Any]


def views_of(group: Group) -> Values:
    """Collect the flatness measurements of a group's runs: values over rounds, spectra, views of clients and tables.

    ``landscapes`` holds only the losses of the models; the page draws the landscapes separately. ``more`` is the number
    of spectra and client views beyond ``MAX_VIEWS``, which the page omits.
    """
    (spectra, measured), clients = _spectra(group), _client_views(group.records)
    return {
        "log": _flatness_log(group),
        "log_sample": sample_text(record.config.flatness.examples for record in group.records),
        "spectra": spectra[:MAX_VIEWS],
        "clients": clients[:MAX_VIEWS],
        "landscapes": _landscape_losses(group),
        **measurements_of(group, measured),
        "more": max(0, len(spectra) - MAX_VIEWS) + max(0, len(clients) - MAX_VIEWS),
    }


def landscapes_of(group: Group) -> dict[str, Landscape]:
    """Load up to ``MAX_LANDSCAPES`` two-dimensional landscapes of a group's runs, by name; skip unreadable files."""
    landscapes: dict[str, Landscape] = {}
    for _, path in measurement_files(group.records, "landscape.json"):
        with left_out_if_damaged(path):
            for name, landscape in load_landscapes(path).items():
                if landscape.dimensions == 2 and len(landscapes) < MAX_LANDSCAPES:
                    landscapes[distinct_label(name, landscapes, path)] = landscape
    return landscapes


def _landscape_losses(group: Group) -> list[Values]:
    """Return label, training loss and size of each model around which a landscape was measured."""
    centres: list[Values] = [
        {
            "label": name,
            "on": "train",
            "loss": landscape.marks[0].values.get("train_loss", nan),
            "parameters": landscape.metadata.get("parameters"),
        }
        for name, landscape in landscapes_of(group).items()
        if landscape.kind == "around" and landscape.marks
    ]
    return [centre for centre in centres if isfinite(centre["loss"])]


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


def _spectra(group: Group) -> tuple[list[Values], list[Measured]]:
    """Collect the spectra of all models in the runs' spectrum files; a file may also contain models of other runs.

    Returns:
        The spectra, and their values for means over seeds.
    """
    spectra: dict[str, Values] = {}
    measured = []
    for name, model, path in models_in_files(group, "spectrum.json", ()):
        with left_out_if_damaged(path):
            matrix = model["subsets"][0].get("matrix", "hessian")
            suffix = "" if matrix == "hessian" else f", {matrix}"
            label = distinct_label(name + suffix, spectra, path)
            values = _spectrum_values(label, model["subsets"], model["on"] or "")
            about = {"described": model.get("described", ""), "parameters": model.get("parameters"), "matrix": matrix}
            spectra[label] = {**values, **about}
            means = {"loss": values["loss"]} | {f"{key}{suffix}": values[name] for name, key in SEED_QUANTITIES.items()}
            measured.append(model["measured"](values["examples"], means))
    styles = styles_of(group, spectra)
    listed = [{**spectrum, "style": styles[label]} for label, spectrum in spectra.items()]
    return listed, [each for each in measured if each is not None]


def _spectrum_values(label: str, subsets: Sequence[Mapping[str, Any]], on: str) -> Values:
    """Average the spectra of one model over subsets of examples, with the spread of each quantity (``spread``).

    The spread is the standard deviation over subsets. For one subset, only the trace has one: its confidence interval.

    Args:
        label: label of the model.
        subsets: the spectrum on each subset, as ``Spectrum.document`` returns it.
        on: name of the data, e.g. ``train``.
    """
    shown = min(MAX_EIGENVALUES, *(len(subset["eigenvalues"]) for subset in subsets))
    eigenvalues = [fmean(subset["eigenvalues"][index] for subset in subsets) for index in range(shown)]
    traces = [subset["trace"] for subset in subsets if subset.get("trace")]
    quantities = {name: [subset.get(key) for subset in subsets] for name, key in SPECTRUM_KEYS.items()}
    quantities["trace"] = [trace["value"] for trace in traces]
    spread = {name: spread_over_subsets(values) for name, values in quantities.items()}
    spread["trace"] = spread_over_subsets(quantities["trace"], traces)
    return {
        "label": label,
        "on": on,
        "examples": subsets[0].get("examples"),
        "subsets": len(subsets),
        "eigenvalues": [_rounded(eigenvalue) for eigenvalue in eigenvalues],
        **{name: mean_of_numbers(values) for name, values in quantities.items()},
        "spread": spread,
    }


def _client_views(records: Sequence[Record]) -> list[Values]:
    """Collect, for each measured run, the accuracy of every class and client over rounds, and forgetting."""
    views = []
    for record, path in measurement_files(records, "clients.json"):
        with left_out_if_damaged(path):
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
