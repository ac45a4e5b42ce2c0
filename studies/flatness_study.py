"""Does flatness predict generalisation in federated learning? The study registered in docs/flatness-study.md.

    python studies/flatness_study.py --dataset digits
    python studies/flatness_study.py --dataset fashion_mnist --model lenet5 --data-dir ~/data --device cuda
    python studies/flatness_study.py --dataset digits --analyse-only

Trains all algorithms with all seeds at both levels of heterogeneity, measures every model twice, after the last round
and at equal training loss, and writes the models with their measures to OUT/models.jsonl. Runs whose models are in that
file are not repeated, so that an interrupted study continues with the same command, and a published one can be extended
from studies/results/flatness_study.jsonl. The analysis is written to OUT/analysis.json and OUT/analysis.md, with
figures. To divide the work among processes, give each its own --alphas, --seeds and --out, and concatenate their
models.jsonl before --analyse-only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flat_minima import SETTINGS
from flatness_analysis import ALPHAS, COMPARISONS, MODELS, SEEDS, analyse, key_of, read_models
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


def target_loss(baseline: Mapping[str, Any]) -> float:
    """The training loss to reach at equal loss, given FedAvg's last model; NaN if that has no loss or diverged."""
    loss = baseline.get("train_loss")
    return math.nan if baseline["excluded"] or loss is None else LOSS_MARGIN * loss


def measured_model(record: Record, number: int | None, missing: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A run's primary model after round ``number`` with losses and measures, or with the reason why it is excluded."""
    name = primary_model(record)
    document = {"model": name, "round": number, "excluded": ""}
    if record.status == "diverged":
        document["excluded"] = "diverged"
    elif number is None:
        document["excluded"] = missing
    else:
        document |= losses_of(record, name)[number]
        precision = measuring_precision(arguments.precision)
        opened = open_model(record, name=name, rounds=number, device=arguments.device, precision=precision)
        objective = opened.objective("train")
        sample = objective.subset(min(arguments.examples, objective.examples), seed=0)  # the same for all models
        try:
            document["measures"] = measures_of(sample, seed=0)
        except fedflat.UserError as error:  # e.g. a product that is not finite
            document["excluded"] = str(error)
    return document


def run_study(arguments: argparse.Namespace) -> None:
    """Train and measure whatever is missing in OUT/models.jsonl."""
    create_folder(arguments.out)
    models = {key_of(model): model for model in read_models(arguments.out)}
    every = max(arguments.rounds // CHECKPOINTS, 1)
    families = {name: family for family, names in FAMILIES.items() for name in names}
    chosen = [BASELINE, *(name for name in arguments.algorithms or families if name != BASELINE)]
    for alpha, seed, name in itertools.product(arguments.alphas, arguments.seeds, chosen):
        labels = {"dataset": arguments.dataset, "alpha": alpha, "algorithm": name, "family": families[name]}
        labels |= {"seed": seed}
        at_rounds, at_loss = ({**labels, "comparison": comparison} for comparison in COMPARISONS)
        if key_of(at_rounds) in models and key_of(at_loss) in models:
            continue
        with stage(f"{arguments.dataset}, alpha {alpha:g}, {name}, seed {seed}"):
            settings = {**SETTINGS[arguments.dataset], **common_settings(arguments), "seed": seed}
            settings |= {"partition": f"dirichlet(alpha={alpha})", "local_epochs": LOCAL_EPOCHS[arguments.dataset]}
            settings |= {"eval_every": every, "save_every": every, "flatness": f"every={every},what=gap"}
            record = trained(name, arguments.out / "runs" / f"alpha{alpha:g}", **settings)
            rows = losses_of(record, primary_model(record))
            at_rounds |= measured_model(record, max(rows, default=None), "no logged training loss", arguments)
            models[key_of(at_rounds)] = at_rounds
            target = target_loss(models[key_of({**at_rounds, "algorithm": BASELINE})])
            reason = f"never reached a training loss of {target:.4g}"
            missing = "FedAvg has no final training loss" if math.isnan(target) else reason
            at_loss |= measured_model(record, round_at_loss(rows, target), missing, arguments)
            models[key_of(at_loss)] = at_loss
        lines = (json.dumps(plain(model), allow_nan=False) + "\n" for model in models.values())
        write_atomically(arguments.out / MODELS, "".join(lines))


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
    for comparison in COMPARISONS:
        figure = correlation_figure(document["cells"], comparison)
        if figure is not None:
            write_figure(figure, arguments.out / f"correlations at {comparison}".replace(" ", "-"))
    print((arguments.out / "analysis.md").read_text())


if __name__ == "__main__":
    main()
