"""Does flatness predict generalisation in federated learning? The study registered in docs/flatness-study.md.

    python studies/flatness_study.py --dataset digits
    python studies/flatness_study.py --dataset fashion_mnist --model lenet5 --data-dir ~/data --device cuda
    python studies/flatness_study.py --dataset digits --analyse-only

Trains all algorithms with all seeds at both levels of heterogeneity, measures every model twice, after the last round
and at equal training loss, and writes one JSON file per model to OUT/models. Finished runs and measured models are not
repeated, so an interrupted study continues with the same command. The analysis is written to OUT/analysis.json and
OUT/analysis.md, with a figure. To divide the work among processes, give each its own --alphas, --seeds and --out, and
copy the files of all OUT/models to one directory before --analyse-only.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flat_minima import SETTINGS
from flatness_analysis import ALPHAS, COMPARISONS, SEEDS, analyse
from flatness_study_figure import correlation_figure
from study import common_arguments, common_settings, measuring_precision, plain, stage, trained, write_figure

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
LOSS_MARGIN = 1.1
"""At equal loss, a run is measured once its training loss is at most this times that of FedAvg's last model."""
LOCAL_EPOCHS = {"digits": 5, "fashion_mnist": 2, "cifar10": 2}
CHECKPOINTS = 20
"""Evaluated and saved models per run."""
RESAMPLES = 10_000


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
    rounds = (max(rows, default=None), round_at_loss(rows, target))
    for comparison, number in zip(COMPARISONS, rounds, strict=True):
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
    for alpha in arguments.alphas:
        settings = {**SETTINGS[arguments.dataset], **common_settings(arguments)}
        settings |= {"partition": f"dirichlet(alpha={alpha})", "local_epochs": LOCAL_EPOCHS[arguments.dataset]}
        settings |= {"eval_every": every, "save_every": every, "flatness": f"every={every},what=gap"}
        for seed in arguments.seeds:
            target = math.nan
            for name in chosen:
                labels = {"dataset": arguments.dataset, "alpha": alpha, "algorithm": name, "seed": seed}
                with stage(" ".join(map(str, labels.values()))):
                    record = trained(name, arguments.out / "runs" / f"alpha{alpha:g}", **{**settings, "seed": seed})
                    if name == BASELINE and record.status != "diverged":
                        target = target_loss(losses_of(record, primary_model(record)))
                    measure_run(record, {**labels, "family": families[name]}, target, arguments)


def main(words: Sequence[str] | None = None) -> None:
    """Run the study, or with --analyse-only its analysis."""
    parser = common_arguments(__doc__ or "", rounds=200, out="runs/flatness-study")
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=range(SEEDS), metavar="SEED", help="seeds of the runs")
    add("--alphas", type=float, nargs="+", default=ALPHAS, metavar="ALPHA", help="levels of heterogeneity")
    add("--algorithms", nargs="+", default=None, metavar="NAME", help="some of the algorithms")
    add("--resamples", type=int, default=RESAMPLES, help="bootstrap resamples")
    add("--analyse-only", action="store_true", help="analyse the models measured so far")
    arguments = parser.parse_args(words)
    if not arguments.analyse_only:
        run_study(arguments)
    document = analyse(arguments.out, arguments.resamples)
    if document["cells"]:
        write_figure(correlation_figure(document["cells"]), arguments.out / "correlations")
    print((arguments.out / "analysis.md").read_text())


if __name__ == "__main__":
    main()
