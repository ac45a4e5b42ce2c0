"""Analysis of the study registered in docs/flatness-study.md: correlations, conclusions, statements, tables."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata
from study import plain, stage

from fedflat.experiment.store.files import write_atomically

ALPHAS = (0.1, 1.0)
"""Concentrations of the Dirichlet partition, the two levels of heterogeneity."""
MODELS = "models.jsonl"
"""File of measured models, one per line."""
COMPARISONS = ("equal rounds", "equal loss")
CONTROLS = ("train_loss", "weight_norm", "gradient_norm")
"""Reported like measures of flatness, for comparison."""
INVARIANT = ("asam", "relative_flatness", "fisher_rao", "magnitude_pac_bayes")
"""Measures that are invariant to rescaling the weights; compared with lambda_max (H3)."""
OUTCOMES = ("gap", "accuracy_gap", "test_error")
"""Test minus training loss (primary), training minus test accuracy, and one minus test accuracy."""
STATEMENTS = (
    ("fedsam", "fedavg", ALPHAS),
    ("fedasam", "fedavg", ALPHAS),
    ("fedavg+swa", "fedavg", ALPHAS),
    ("fedsam+swa", "fedsam", ALPHAS),
    ("fedavg+wima", "fedavg", ALPHAS),
    ("fedswa", "fedsam", ALPHAS[:1]),
    ("fedmoswa", "fedsam", ALPHAS[:1]),
)
"""Statements of the papers: at these alphas, the first has a lower lambda_max and test error than the second."""
DATASETS = ("digits", "fashion_mnist")
"""Registered datasets; CIFAR-10 serves as a check and is not counted for the conclusions."""
SEEDS = 3
"""Registered number of seeds."""
LEVEL = 0.05
SMALLEST_FAMILY = 3
"""Number of algorithms below which a family has no correlation of its own."""


class Cell:
    """The models of one dataset, level of heterogeneity and comparison, as a table of ranks to be correlated."""

    def __init__(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Build the table; rows are models, columns are measures, controls and outcomes."""
        self.measures = [*models[0]["measures"], "train_loss"]
        self.columns = [*self.measures, *OUTCOMES]
        self.values = np.array([[{**row, **row["measures"]}[name] for name in self.columns] for row in models], float)
        self.algorithms = np.array([row["algorithm"] for row in models])
        self.families = np.array([row["family"] for row in models])

    def correlations(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Rank correlations of all measures with all outcomes, [measures, outcomes], of the models ``rows``."""
        outcomes = slice(len(self.measures), None)
        across = _rank_correlation(self.values[rows])
        loss = self.measures.index("train_loss")
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.sqrt(np.outer(1 - across[:, loss] ** 2, 1 - across[:, loss] ** 2))
            partial = (across - np.outer(across[:, loss], across[:, loss])) / scale
        partial[loss] = np.nan  # controlled for itself
        within, weights = [], []
        for family in np.unique(self.families):
            members = rows[self.families[rows] == family]
            if len(np.unique(self.algorithms[self.families == family])) >= SMALLEST_FAMILY and len(members) > 2:
                within.append(_rank_correlation(self.values[members]))
                weights.append(len(members))
        mean = np.full_like(across, np.nan)
        if within:
            stacked = np.ma.masked_invalid(within)
            mean = np.ma.average(stacked, axis=0, weights=np.array(weights)[:, None, None] * np.ones(stacked.shape))
            mean = mean.filled(np.nan)
        tables = {"across": across, "partial": partial, "within": mean}
        return {name: table[: len(self.measures), outcomes] for name, table in tables.items()}

    def analysis(self, resamples: int, seed: int) -> dict[str, Any]:
        """Correlations with bootstrap intervals and Holm's correction, by kind, outcome and measure.

        Algorithms are resampled with replacement, each with all its seeds.
        """
        rng = np.random.default_rng(seed)
        point = self.correlations(np.arange(len(self.values)))
        drawn = [self.correlations(self._resample(rng)) for _ in range(resamples)]
        result: dict[str, Any] = {"models": len(self.values), "algorithms": len(np.unique(self.algorithms))}
        for kind, table in point.items():
            samples = np.array([draw[kind] for draw in drawn])  # [resamples, measures, outcomes]
            for column, outcome in enumerate(OUTCOMES):
                rows = {
                    name: _interval(table[row, column], samples[:, row, column])
                    for row, name in enumerate(self.measures)
                }
                _add_holm(rows)
                result.setdefault(kind, {})[outcome] = rows
        first = self.measures.index("lambda_max")
        gains = {}  # H3
        for name in INVARIANT:
            row = self.measures.index(name)
            difference = [abs(draw["across"][row, 0]) - abs(draw["across"][first, 0]) for draw in drawn]
            observed = abs(point["across"][row, 0]) - abs(point["across"][first, 0])
            gains[name] = _interval(observed, np.array(difference))
        return result | {"gain_over_lambda_max": gains}

    def _resample(self, rng: np.random.Generator) -> np.ndarray:
        """Row numbers of a bootstrap sample of algorithms."""
        names = np.unique(self.algorithms)
        return np.concatenate([np.flatnonzero(self.algorithms == name) for name in rng.choice(names, len(names))])


def _rank_correlation(values: np.ndarray) -> np.ndarray:
    """Spearman's correlation of all pairs of columns; NaN for constant columns."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.atleast_2d(np.corrcoef(rankdata(values, axis=0), rowvar=False))


def _interval(value: float, samples: np.ndarray) -> dict[str, float | None]:
    """A correlation with its 95 % percentile interval and two-sided bootstrap p-value."""
    finite = samples[np.isfinite(samples)]
    if not len(finite) or not np.isfinite(value):
        return {"value": None, "low": None, "high": None, "p": None}
    low, high = np.quantile(finite, [LEVEL / 2, 1 - LEVEL / 2])
    tail = min(np.mean(finite <= 0), np.mean(finite >= 0))
    p = min(1.0, 2 * max(tail, 1 / (len(finite) + 1)))
    return {"value": float(value), "low": float(low), "high": float(high), "p": float(p)}


def _add_holm(rows: dict[str, dict[str, float | None]]) -> None:
    """Add Holm's adjusted p-value over the measures of flatness, without controls."""
    tested = sorted((row["p"], name) for name, row in rows.items() if row["p"] is not None and name not in CONTROLS)
    adjusted = 0.0
    for position, (p, name) in enumerate(tested):
        adjusted = max(adjusted, min(1.0, (len(tested) - position) * float(p or 0.0)))
        rows[name]["holm"] = adjusted


def read_models(out: Path) -> list[dict[str, Any]]:
    """All measured models."""
    path = out / MODELS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(model: Mapping[str, Any]) -> tuple[Any, ...]:
    """What identifies a model of the study."""
    return tuple(model[name] for name in ("dataset", "comparison", "alpha", "algorithm", "seed"))


def is_included(model: Mapping[str, Any]) -> bool:
    """Whether a model meets the registered criteria: measured, every number finite, and trained."""
    if model["excluded"]:
        return False
    numbers = [model["train_loss"], *model["measures"].values(), *(model.get(name) for name in OUTCOMES)]
    untrained = model["test_error"] is not None and model["test_error"] > 0.8
    return None not in numbers and not untrained


def cell_of(row: Mapping[str, Any]) -> tuple[str, float, str]:
    """The dataset, alpha and comparison of a model or statement."""
    return row["dataset"], row["alpha"], row["comparison"]


def analyse(out: Path, resamples: int) -> dict[str, Any]:
    """Analyse all cells; write analysis.json and analysis.md."""
    models = read_models(out)
    included = [model for model in models if is_included(model)]
    cells: dict[str, Any] = {}
    measured, usable = (Counter(map(cell_of, group)) for group in (models, included))
    counted = {key for key in measured if 3 * (measured[key] - usable[key]) <= measured[key]}
    for key in sorted(usable):
        members = [model for model in included if cell_of(model) == key]
        if len({model["algorithm"] for model in members}) >= SMALLEST_FAMILY:
            name = f"{key[0]}, alpha {key[1]:g}, {key[2]}"
            with stage(f"analysis of {name}"):
                cells[name] = Cell(members).analysis(resamples, seed=zlib.crc32(name.encode()))
            cells[name] |= {"dataset": key[0], "alpha": key[1], "comparison": key[2], "counted": key in counted}
    left_out = [model for model in models if not is_included(model)]
    excluded = [
        {**{key: model[key] for key in ("dataset", "alpha", "algorithm", "seed", "comparison")}, "why": why(model)}
        for model in left_out
    ]
    document: dict[str, Any] = {"models": len(models), "excluded": excluded, "resamples": resamples, "cells": cells}
    document["conclusions"] = conclusions(list(cells.values()))
    document["statements"] = [{**row, "counted": cell_of(row) in counted} for row in statements(included)]
    write_atomically(out / "analysis.json", json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    write_atomically(out / "analysis.md", tables(document))
    return document


def conclusions(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The registered conclusion on each measure, from the counted cells at equal rounds.

    H1 is a positive correlation with the gap, H2 the same when controlling for training loss. A measure predicts the
    gap if both are supported in all cells, and in part if both are in at least two and neither is reversed in any.
    """
    used = [cell for cell in cells if cell["comparison"] == COMPARISONS[0] and cell["dataset"] in DATASETS]
    used = [cell for cell in used if cell["counted"]]
    result = {}
    for name in [name for name in used[0]["across"][OUTCOMES[0]] if name not in CONTROLS] if used else ():
        signs = [[_significant_sign(cell[kind][OUTCOMES[0]][name]) for kind in ("across", "partial")] for cell in used]
        supported = sum(sign == [1, 1] for sign in signs)
        verdict = "predicts" if supported == len(DATASETS) * len(ALPHAS) else "does not predict"
        if verdict != "predicts" and supported >= 2 and not any(-1 in sign for sign in signs):
            verdict = "predicts in part"
        within = sum(_significant_sign(cell["within"][OUTCOMES[0]][name]) == 1 for cell in used)
        counts = {"H1": sum(sign[0] == 1 for sign in signs), "H2": sum(sign[1] == 1 for sign in signs), "H4": within}
        reversed_in = sum(-1 in sign for sign in signs)
        result[name] = {"verdict": verdict, **counts, "both": supported, "reversed": reversed_in, "cells": len(used)}
    return result


def _significant_sign(row: Mapping[str, float | None]) -> int:
    """The sign of a correlation whose adjusted p-value is below the level; otherwise 0."""
    is_significant = row.get("holm") is not None and (row["holm"] or 0.0) < LEVEL
    return int(np.sign(row["value"])) if is_significant and row["value"] is not None else 0


def statements(models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Differences between two algorithms for each seed, for the statements of the papers.

    A statement is supported if the difference is negative for all three seeds, and contradicted if it is positive for
    all three. It is incomplete if a seed of either algorithm is missing or excluded.
    """
    by_key = {key_of(model): model for model in models}
    rows = []
    for first, second, alphas in STATEMENTS:
        for cell in sorted({key[:3] for key in by_key if key[2] in alphas}):
            seeds = [key[4] for key in by_key if key[:4] == (*cell, first) and (*cell, second, key[4]) in by_key]
            pairs = [(by_key[*cell, first, seed], by_key[*cell, second, seed]) for seed in seeds]
            differences = {
                "lambda_max": [a["measures"]["lambda_max"] - b["measures"]["lambda_max"] for a, b in pairs],
                "test_error": [a["test_error"] - b["test_error"] for a, b in pairs],
            }
            for name, values in differences.items():
                verdict = "mixed" if values else "not measured"
                if 0 < len(values) < SEEDS:
                    verdict = "incomplete"
                elif values and len(set(np.sign(values))) == 1 and values[0]:
                    verdict = "supported" if values[0] < 0 else "contradicted"
                about = {"statement": f"{first} has a lower {name} than {second}", "dataset": cell[0], "alpha": cell[2]}
                rows.append({**about, "comparison": cell[1], "differences": values, "verdict": verdict})
    return rows


def why(model: Mapping[str, Any]) -> str:
    """Why a model is excluded."""
    return str(model["excluded"]) or "a number is not finite, or the test error is above 80 %"


def tables(document: Mapping[str, Any]) -> str:
    """A Markdown table per cell: correlation with the gap, with intervals; * where Holm's p-value is below 5 %."""
    lines = [f"{document['models']} models, {len(document['excluded'])} excluded; outcome: test minus training loss"]
    for name, cell in document["cells"].items():
        counts = f"{cell['models']} models, {cell['algorithms']} algorithms{_not_counted(cell)}"
        lines += ["", f"**{name}** ({counts})", ""]
        lines += ["| measure | across | controlling for training loss | within families |", "|---|---|---|---|"]
        for measure in cell["across"]["gap"]:
            shown = [_shown(cell[kind]["gap"][measure]) for kind in ("across", "partial", "within")]
            lines.append(f"| {measure} | {' | '.join(shown)} |")
    lines += ["", "| measure | conclusion | H1 | H2 | both | reversed | H4 |", "|---|---|---|---|---|---|---|"]
    for measure, row in document["conclusions"].items():
        counts = (f"{row[key]} of {row['cells']}" for key in ("H1", "H2", "both", "reversed", "H4"))
        lines.append(f"| {measure} | {row['verdict']} | {' | '.join(counts)} |")
    lines += ["", "| statement | dataset | alpha | comparison | verdict |", "|---|---|---|---|---|"]
    for row in document["statements"]:
        verdict = row["verdict"] + _not_counted(row)
        words = (row["statement"], row["dataset"], f"{row['alpha']:g}", row["comparison"], verdict)
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _not_counted(row: Mapping[str, Any]) -> str:
    return "" if row["counted"] else "; not counted: more than a third excluded"


def _shown(row: Mapping[str, float | None]) -> str:
    if row["value"] is None:
        return "–"
    mark = "*" if _significant_sign(row) else ""
    return f"{row['value']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]{mark}"
