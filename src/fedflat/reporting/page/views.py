"""Measurements of runs as plain values: flatness over rounds, spectra, landscapes, clients, forgetting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedflat.errors import UserError
from fedflat.experiment.analysis.landscapes import load_landscapes
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.figures.flatness_log import QUANTITIES, logged
from fedflat.reporting.page.gather import where

if TYPE_CHECKING:
    from fedflat.flatness.landscapes.grid import Landscape
    from fedflat.reporting.page.gather import Group

MOST_EIGENVALUES = 50
MOST_LOOKS = 60
MOST_VIEWS = 24
"""Maximum number of spectra and client views on one page."""
MOST_LANDSCAPES = 6

Values = dict[str, Any]


def views_of(group: Group) -> Values:
    """All measurements of a group's runs."""
    spectra, clients = _spectra(group), _clients(group.records)
    return {
        "log": _log(group),
        "spectra": spectra[:MOST_VIEWS],
        "clients": clients[:MOST_VIEWS],
        "more": max(0, len(spectra) - MOST_VIEWS) + max(0, len(clients) - MOST_VIEWS),
    }


def landscapes_of(group: Group) -> dict[str, Landscape]:
    """Two-dimensional landscapes, by name."""
    found: dict[str, Landscape] = {}
    for record, path in _files(group.records, "landscape.json"):
        try:
            read = load_landscapes(path)
        except UserError:
            continue
        for name, landscape in read.items():
            if landscape.dimensions == 2 and len(found) < MOST_LANDSCAPES:
                found[name if name not in found else f"{name} (in {where(record)})"] = landscape
    return found


def _files(records: Sequence[Record], name: str) -> Iterator[tuple[Record, Path]]:
    for record in records:
        if record.folder is not None and (record.folder.path / "flatness").is_dir():
            for path in sorted((record.folder.path / "flatness").rglob(name)):
                yield record, path


def _read(path: Path) -> Values | None:
    """A JSON file; None if it is damaged, so that a report does not fail because of it."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _log(group: Group) -> Values:
    """The mean over seeds of every logged quantity, per row."""
    lines: dict[str, list[Values]] = {}
    for number, (_, row, _) in enumerate(group.rows):
        runs = [record for record in row.records if any("flatness" in entry for entry in record.history)]
        found = [logged(record, row.model) for record in runs]
        for name in QUANTITIES:
            points = _mean([one[name] for one in found if name in one])
            if points:
                lines.setdefault(name, []).append(
                    {"row": number, "x": [x for x, _ in points], "y": [y for _, y in points]}
                )
    return {name: {"words": QUANTITIES[name][0], "lines": some} for name, some in lines.items()}


def _mean(runs: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Means over the rounds that all runs have."""
    if not runs:
        return []
    known = [dict(points) for points in runs]
    common = [rounds for rounds, _ in runs[0] if all(rounds in one for one in known)]
    return [(rounds, float(f"{fmean(one[rounds] for one in known):.5g}")) for rounds in common]


def _spectra(group: Group) -> list[Values]:
    """Every model of every spectrum file; a file may contain models of other runs.

    A model has the number (and colour) of the row with its name, or an unused one.
    """
    found: dict[str, Values] = {}
    for _, path in _files(group.records, "spectrum.json"):
        document = _read(path) or {}
        for name, model in document.get("models", {}).items():
            if model.get("subsets"):
                label = name if name not in found else f"{name} ({model.get('model')})"
                found[label] = _spectrum(label, model["subsets"], document)
    numbers = {label: number for number, (label, _, _) in enumerate(group.rows)}
    for place, (label, spectrum) in enumerate(found.items()):
        spectrum["row"] = numbers.get(label, len(numbers) + place)
    return list(found.values())


def _spectrum(label: str, subsets: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> Values:
    most = min(MOST_EIGENVALUES, *(len(one["eigenvalues"]) for one in subsets))
    values = [fmean(one["eigenvalues"][place] for one in subsets) for place in range(most)]
    traces = [one["trace"]["value"] for one in subsets if one.get("trace")]
    return {
        "label": label,
        "on": document.get("on", ""),
        "examples": subsets[0].get("examples"),
        "subsets": len(subsets),
        "eigenvalues": [float(f"{value:.5g}") for value in values],
        "lambda_max": fmean(one["lambda_max"] for one in subsets),
        "lambda_min": _mean_or_none(subsets, "lambda_min"),
        "ratio": _mean_or_none(subsets, "lambda_max_over_lambda_5"),
        "trace": fmean(traces) if traces else None,
    }


def _mean_or_none(subsets: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [one[name] for one in subsets if isinstance(one.get(name), (int, float))]
    return fmean(known) if known else None


def _clients(records: Sequence[Record]) -> list[Values]:
    """Accuracies per class and client over rounds, and forgetting per class."""
    found = []
    for record, path in _files(records, "clients.json"):
        document = _read(path) or {}
        looks = document.get("models", [])
        if not looks or "accuracy" not in looks[-1]:
            continue
        step = -(-len(looks) // MOST_LOOKS)
        kept = looks[::-1][::step][::-1]
        found.append(
            {
                "label": f"{record.config.algorithm}, seed {record.config.seed}",
                "rounds": [look["round"] for look in kept],
                "classes": _matrix(kept, "classes"),
                "clients": _matrix(kept, "clients"),
                "forgetting": document.get("forgetting", {}),
            }
        )
    return found


def _matrix(looks: Sequence[Mapping[str, Any]], part: str) -> Values:
    names = list(looks[-1]["accuracy"].get(part, {}))
    return {name: [_rounded(look["accuracy"][part].get(name)) for look in looks] for name in names}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
