"""Does flatness predict generalisation in federated learning? The study registered in docs/flatness-study.md.

    python studies/flatness_study.py --dataset digits --device cpu
    python studies/flatness_study.py --dataset fashion_mnist --data-dir ~/data --device cuda --precision tf32
    python studies/flatness_study.py --dataset digits --analyse-only

Trains all algorithms with all seeds at both levels of heterogeneity, measures every model twice, after the last round
and at equal training loss, and writes one JSON file per model to OUT/models. Finished runs and measured models are not
repeated, so an interrupted study continues with the same command. The analysis is written to OUT/analysis.json and
OUT/analysis.md.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flat_minima import SETTINGS
from scipy.stats import rankdata
from study import common_arguments, common_settings, measuring_precision, plain, stage, trained

import fedflat
from fedflat.experiment.analysis.reopen import primary_model
from fedflat.experiment.analysis.run_model import open_model
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.experiment.store.run_folder import Record
from fedflat.flatness import Objective, norms_of, sharpness_of, spectrum_of

FAMILIES = {
    "server optimiser": ("fedavg", "fedavgm", "fedadam", "fedyogi", "fedexp"),
    "drift correction": ("fedprox", "scaffold", "feddyn", "feddc", "fednova"),
    "client momentum": ("fedcm", "fedacg", "mimelite", "fedhbm"),
    "sharpness-aware": ("fedsam", "fedasam", "mofedsam", "fedgamma", "fedspeed", "fedsmoo", "fedlesam", "fednsam"),
    "weight averaging": ("fedavg+wima", "fedavg+ema", "fedavg+swa", "fedsam+swa", "fedswa", "fedmoswa"),
}
"""The 28 algorithms by family, with their default parameters."""
BASELINE = "fedavg"
ALPHAS = (0.1, 1.0)
"""Concentrations of the Dirichlet partition, the two levels of heterogeneity."""
COMPARISONS = ("equal rounds", "equal loss")
LOSS_MARGIN = 1.1
"""At equal loss, a run is measured once its training loss is at most this times that of FedAvg's last model."""
CHECKPOINTS = 20
"""Evaluated and saved models per run."""
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
SEEDS = 3
"""Registered number of seeds."""
RESAMPLES = 10_000
LEVEL = 0.05
SMALLEST_FAMILY = 3
"""Number of algorithms below which a family has no correlation of its own."""


def measures_of(objective: Objective, seed: int) -> dict[str, float]:
    """All measures at a model; larger values mean a sharper minimum."""
    hessian = spectrum_of(objective, min(5, objective.size), lambda_min=False, tolerance=0.005, seed=seed)
    fisher = spectrum_of(objective, 1, matrix="gauss-newton", lambda_min=False, tolerance=0.005, seed=seed)
    norms = norms_of(objective, seed=seed)
    assert hessian.trace and fisher.trace and hessian.lambda_max is not None and fisher.lambda_max is not None
    return {
        "lambda_max": hessian.lambda_max,
        "lambda_ratio": hessian.ratio or math.nan,
        "trace": hessian.trace.value,
        "fisher_lambda_max": fisher.lambda_max,
        "fisher_trace": fisher.trace.value,
        "sam": sharpness_of(objective, "sam", rho=0.05, steps=10, seed=seed).value,
        "m_sharpness": sharpness_of(objective, "sam", rho=0.05, m=32, seed=seed).value,
        "asam": sharpness_of(objective, "asam", rho=0.5, steps=10, seed=seed).value,
        "average": sharpness_of(objective, "average", rho=1.0, seed=seed).value,
        "relative_flatness": norms.relative_flatness.value,
        "fisher_rao": norms.fisher_rao,
        "pac_bayes": norms.sigma**-2,
        "magnitude_pac_bayes": norms.magnitude_sigma**-2,
        "weight_norm": float(objective.weights.norm()),
        "gradient_norm": float(objective.gradient().norm()),
    }


def losses_of(record: Record, model: str) -> dict[int, dict[str, float | None]]:
    """Gap, losses and test error of a model at every evaluated round after which it exists, by round."""
    rows = {}
    for entry in record.history:
        logged = entry.get("flatness", {}).get("models", {})
        if model in logged and model in entry["test"]:
            rows[entry["round"]] = {**logged[model], "test_error": 1 - entry["test"][model]["accuracy"]}
    return rows


def round_at_loss(rows: Mapping[int, Mapping[str, float | None]], target: float) -> int | None:
    """The first evaluated round after round 0 with a training loss of at most ``target``; None if there is none."""
    losses = ((number, row["train_loss"]) for number, row in rows.items() if number > 0)
    return min((number for number, loss in losses if loss is not None and loss <= target), default=None)


def target_loss(rows: Mapping[int, Mapping[str, float | None]]) -> float:
    """The training loss to reach at equal loss, given the rows of FedAvg; NaN if its last model has no loss."""
    last = rows[max(rows)]["train_loss"] if rows else None
    return math.nan if last is None else LOSS_MARGIN * last


def measure_run(record: Record, labels: Mapping[str, Any], target: float, arguments: argparse.Namespace) -> None:
    """Measure one run for both comparisons, unless it has been measured; a model that does not exist gets a reason."""
    name = primary_model(record)
    rows = losses_of(record, name)
    rounds = {"equal rounds": max(rows, default=None), "equal loss": round_at_loss(rows, target)}
    for comparison, number in rounds.items():
        file = model_file(arguments.out, labels, comparison)
        if file.exists():
            continue
        document = {**labels, "comparison": comparison, "model": name, "round": number, "excluded": ""}
        if record.status == "diverged":
            document["excluded"] = "diverged"
        elif number is None:
            reason = "FedAvg has no final training loss" if math.isnan(target) else f"never reached {target:.4g}"
            document["excluded"] = f"training loss: {reason}" if rows else "no logged training loss"
        else:
            document |= rows[number]
            precision = measuring_precision(arguments.precision)
            opened = open_model(record, name=name, rounds=number, device=arguments.device, precision=precision)
            objective = opened.objective("train")
            sample = objective.subset(min(arguments.examples, objective.examples), seed=0)  # the same for all models
            try:
                document["measures"] = measures_of(sample, seed=0)
            except fedflat.UserError as error:  # e.g. a product that is not finite
                document["excluded"] = str(error)
        write_atomically(file, json.dumps(plain(document), indent=1, allow_nan=False) + "\n")


def model_file(out: Path, labels: Mapping[str, Any], comparison: str) -> Path:
    """The JSON file of a model."""
    words = (labels["dataset"], f"alpha{labels['alpha']:g}", labels["algorithm"], f"seed{labels['seed']}", comparison)
    return out / "models" / f"{'-'.join(words).replace(' ', '-')}.json"


def run_study(arguments: argparse.Namespace) -> None:
    """Train and measure whatever is missing."""
    create_folder(arguments.out / "models")
    every = max(arguments.rounds // CHECKPOINTS, 1)
    families = {name: family for family, names in FAMILIES.items() for name in names}
    chosen = [BASELINE, *(name for name in arguments.algorithms or families if name != BASELINE)]
    for alpha in ALPHAS:
        settings = {**SETTINGS[arguments.dataset], **common_settings(arguments)}
        settings["partition"] = f"dirichlet(alpha={alpha})"
        settings |= {"eval_every": every, "save_every": every, "flatness": f"every={every},what=gap"}
        for seed in range(arguments.seeds):
            target = math.nan
            for name in chosen:
                labels = {"dataset": arguments.dataset, "alpha": alpha, "algorithm": name, "seed": seed}
                with stage(" ".join(map(str, labels.values()))):
                    record = trained(name, arguments.out / "runs" / f"alpha{alpha:g}", **{**settings, "seed": seed})
                    if name == BASELINE:
                        target = target_loss(losses_of(record, primary_model(record)))
                    measure_run(record, {**labels, "family": families[name]}, target, arguments)


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
    return [json.loads(path.read_text()) for path in sorted((out / "models").glob("*.json"))]


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
            cells[name]["counted"] = key in counted
    left_out = [model for model in models if not is_included(model)]
    excluded = [
        {**{key: model[key] for key in ("dataset", "alpha", "algorithm", "seed", "comparison")}, "why": why(model)}
        for model in left_out
    ]
    document: dict[str, Any] = {"models": len(models), "excluded": excluded, "resamples": resamples, "cells": cells}
    document["statements"] = [{**row, "counted": cell_of(row) in counted} for row in statements(included)]
    write_atomically(out / "analysis.json", json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    write_atomically(out / "analysis.md", tables(document))
    return document


def statements(models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Differences between two algorithms for each seed, for the statements of the papers.

    A statement is supported if the difference is negative for all three seeds, and contradicted if it is positive for
    all three. It is incomplete if a seed of either algorithm is missing or excluded.
    """
    by_key: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for model in models:
        by_key[tuple(model[name] for name in ("dataset", "comparison", "alpha", "algorithm", "seed"))] = model
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
    mark = "*" if row.get("holm") is not None and (row["holm"] or 0.0) < LEVEL else ""
    return f"{row['value']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]{mark}"


def main(words: Sequence[str] | None = None) -> None:
    """Run the study, or with --analyse-only its analysis."""
    parser = common_arguments(__doc__ or "", rounds=200, out="runs/flatness-study")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--algorithms", nargs="+", default=None, metavar="NAME", help="some of the algorithms")
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help="bootstrap resamples")
    parser.add_argument("--analyse-only", action="store_true", help="analyse the models measured so far")
    arguments = parser.parse_args(words)
    if not arguments.analyse_only:
        run_study(arguments)
    analyse(arguments.out, arguments.resamples)
    print((arguments.out / "analysis.md").read_text())


if __name__ == "__main__":
    main()
