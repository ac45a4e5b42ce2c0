"""fedflat flatness norms: flatness relative to the size of the weights."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.common import OutputFlags, Progress, estimate_text, plus_minus, print_table
from fedflat.cli.flatness.models import MODELS, DataFlags, ModelFlags, default_folder, measure_models, test_column
from fedflat.cli.shared.flags import optional, with_flag_groups
from fedflat.cli.shared.screen import shown_seconds

if TYPE_CHECKING:
    from fedflat.flatness import Norms, Objective


@with_flag_groups
def norms(
    models: list[str] = MODELS,
    layer: str | None = optional(
        "--layer", "weights whose relative flatness is computed", "the last weight matrix", metavar="NAME"
    ),
    rise: float = typer.Option(0.1, "--rise", help="accepted rise of the loss under the noise of PAC-Bayes sharpness"),
    draws: int = typer.Option(30, "--draws", min=2, help="random vectors for relative flatness"),
    directions: int = typer.Option(10, "--directions", min=1, help="antithetic pairs of noise for PAC-Bayes sharpness"),
    *,
    data: DataFlags,
    opening: ModelFlags,
    output: OutputFlags,
) -> None:
    """Compute flatness relative to the size of the weights: relative flatness, Fisher-Rao norm, PAC-Bayes sharpness.

    Example: fedflat flatness norms runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --examples 500
    """
    from fedflat.flatness import norms_of

    def measure(objective: Objective, progress: Progress) -> Norms:
        progress("norms")
        return norms_of(objective, layer=layer, rise=rise, draws=draws, directions=directions, seed=data.seed)

    start = time.monotonic()
    measured = measure_models(models, data, opening, output, measure)
    results = measured.results
    values = {name: {"subsets": [result.document() for result in subsets]} for name, subsets in results.items()}
    document = measured.document(values)

    def show() -> None:
        _print_norms(results, document, measured.examples, time.monotonic() - start)
        measured.print_caveats(lambda result: result.loss)

    output.publish(default_folder(measured.models, "norms"), document, show)


def _print_norms(results: dict[str, list[Norms]], document: dict[str, Any], examples: str, seconds: float) -> None:
    """Print one row per model.

    Args:
        results: by model, the norms on each subset of examples.
        document: the data and, for each model, its test metric.
        examples: text on the number of examples and subsets, and on the precision.
        seconds: duration of the measurement.
    """

    def sigma_text(values: list[float]) -> str | None:
        """Return mean and standard deviation of one value per subset as text; None if one was not found."""
        return None if any(map(math.isnan, values)) else plus_minus(values)

    metric, shown_tests = test_column(document)
    rows = []
    for name, per_subset in results.items():
        rows.append(
            {
                "model": name,
                "loss": plus_minus([result.loss for result in per_subset]),
                metric: shown_tests[name],
                "relative flatness": estimate_text([result.relative_flatness for result in per_subset]),
                "Fisher-Rao norm": plus_minus([result.fisher_rao for result in per_subset]),
                "sigma": sigma_text([result.sigma for result in per_subset]),
                "magnitude-aware sigma": sigma_text([result.magnitude_sigma for result in per_subset]),
            }
        )
    first_per_subset = next(iter(results.values()))
    first = first_per_subset[0]
    has_subsets = len(first_per_subset) > 1
    interval = "standard deviation over subsets" if has_subsets else "95 % confidence interval of relative flatness"
    note = f"± {interval}; sigma: noise that raises the loss by {first.rise:g}; {shown_seconds(seconds)}"
    heading = f"Norms on {document['on']}, {examples}, relative flatness of {first.layer}"
    print_table(heading, list(rows[0]), [list(row.values()) for row in rows], note)
