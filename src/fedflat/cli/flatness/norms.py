"""fedflat flatness norms: flatness relative to the size of the weights."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.common import (
    BATCH,
    CLIENT,
    DATASET,
    DEVICE,
    EXAMPLES,
    MODELS,
    MODULE,
    ON,
    OUT,
    PRECISION,
    SUBSETS,
    data_name,
    default_folder,
    number_of_subsets,
    open_models,
    plus_minus,
    print_files,
    print_table,
    result_folder,
    test_column,
    test_metric,
    write_results,
)
from fedflat.cli.shared.flags import DATA_DIR, JSON, QUIET, SEED, optional
from fedflat.cli.shared.screen import print_json, shown_count, shown_seconds, status_line

if TYPE_CHECKING:
    from fedflat.flatness import Norms


def norms(
    models: list[str] = MODELS,
    layer: str | None = optional(
        "--layer", "weights whose relative flatness is computed", "the last weight matrix", metavar="NAME"
    ),
    rise: float = typer.Option(0.1, "--rise", help="accepted rise of the loss under the noise of PAC-Bayes sharpness"),
    draws: int = typer.Option(30, "--draws", min=2, help="random vectors for relative flatness"),
    directions: int = typer.Option(10, "--directions", min=1, help="antithetic pairs of noise for PAC-Bayes sharpness"),
    on: str = ON,
    client: int | None = CLIENT,
    examples: int | None = EXAMPLES,
    subsets: int | None = SUBSETS,
    seed: int = SEED,
    batch: int | None = BATCH,
    device: str = DEVICE,
    precision: str | None = PRECISION,
    module: str | None = MODULE,
    dataset: str | None = DATASET,
    data_dir: Path | None = DATA_DIR,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Compute flatness relative to the size of the weights: relative flatness, Fisher-Rao norm, PAC-Bayes sharpness.

    Example: fedflat flatness norms runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --examples 500
    """
    from fedflat.flatness import norms_of

    count, silent, start = number_of_subsets(subsets, examples), quiet or as_json, time.monotonic()
    results: dict[str, list[Norms]] = {}  # by model, one for each subset of the examples
    with status_line(silent) as progress:
        opened = open_models(models, silent, device, precision, module, dataset, data_dir)
        for name, model in opened.items():
            progress(f"{name}: norms")
            objectives = model.objectives(on, client=client, examples=examples, subsets=count, seed=seed, batch=batch)
            results[name] = [
                norms_of(objective, layer=layer, rise=rise, draws=draws, directions=directions, seed=seed)
                for objective in objectives
            ]
    document: dict[str, Any] = {"on": data_name(on, client), "seed": seed, "models": {}}
    for name, model in opened.items():
        documents = [result.document() for result in results[name]]
        document["models"][name] = {"model": model.label, "test": test_metric(model), "subsets": documents}
    files = write_results(result_folder(out, default_folder(opened, "norms")), "norms", document)
    if as_json:
        print_json({"files": files, **document})
        return
    _print_norms(results, document, time.monotonic() - start)
    print_files(files)


def _print_norms(results: dict[str, list[Norms]], document: dict[str, Any], seconds: float) -> None:
    """Print one row per model.

    Args:
        results: by model, the norms on each subset of examples.
        document: the data and, for each model, its test metric.
        seconds: duration of the measurement.
    """

    def sigma_text(values: list[float]) -> str | None:
        """Return mean and standard deviation of one value per subset as text; None if one was not found."""
        return None if any(map(math.isnan, values)) else plus_minus(values)

    metric, shown_tests = test_column(document)
    rows = []
    for name, per_subset in results.items():
        flatness = per_subset[0].relative_flatness
        relative = f"{flatness.value:.4g} ± {flatness.half_width:.2g}"
        if len(per_subset) > 1:
            relative = plus_minus([result.relative_flatness.value for result in per_subset])
        rows.append(
            (
                name,
                plus_minus([result.loss for result in per_subset]),
                shown_tests[name],
                relative,
                plus_minus([result.fisher_rao for result in per_subset]),
                sigma_text([result.sigma for result in per_subset]),
                sigma_text([result.magnitude_sigma for result in per_subset]),
            )
        )
    columns = ("model", "loss", metric, "relative flatness", "Fisher-Rao norm", "sigma", "magnitude-aware sigma")
    first_per_subset = next(iter(results.values()))
    first = first_per_subset[0]
    examples, interval = f"{shown_count(first.examples)} examples", "95 % confidence interval of relative flatness"
    if len(first_per_subset) > 1:
        examples, interval = f"{len(first_per_subset)} subsets of {examples}", "standard deviation over subsets"
    note = f"± {interval}; sigma: noise that raises the loss by {first.rise:g}; {shown_seconds(seconds)}"
    print_table(f"Norms on {document['on']}, {examples}, relative flatness of {first.layer}", columns, rows, note)
