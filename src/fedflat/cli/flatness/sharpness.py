"""fedflat flatness sharpness: rise of the loss around models."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.common import OutputFlags, Progress, estimate_text, plus_minus, print_table
from fedflat.cli.flatness.models import MODELS, DataFlags, ModelFlags, default_folder, measure_models, test_column
from fedflat.cli.shared.flags import no_default, with_flag_groups
from fedflat.cli.shared.screen import shown_seconds
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.flatness import Objective, Sharpness

    Results = dict[str, dict[tuple[str, float], list[Sharpness]]]  # by model, then by name of the kind and radius

DEFAULT_RHO = {"sam": 0.05, "asam": 0.5, "average": 0.05}
"""Default radii, as in the papers."""


@with_flag_groups
def sharpness(
    models: list[str] = MODELS,
    kind: str = typer.Option(
        "sam,asam,average", "--kind", metavar="KIND,...", help="comma-separated: sam, asam, average"
    ),
    rho: list[float] = no_default(
        "--rho",
        "radii for every kind; comma-separated or repeated [dim](default: 0.05, asam 0.5)[/dim]",
        [],
        metavar="RADIUS,...",
    ),
    steps: int = typer.Option(
        1, "--ascent-steps", min=1, help="ascent steps of sam and asam; 1 is the first-order direction used in training"
    ),
    eta: float = typer.Option(0.0, "--eta", help="offset of asam's scale |w| + eta"),
    scope: str = typer.Option(
        "weight",
        "--scope",
        metavar="WHICH",
        help="tensors that asam scales: weight (not biases), or all (invariant to rescaling if eta is 0)",
    ),
    m: int | None = no_default(
        "--m", "m-sharpness: mean worst case of groups of at most M examples", None, metavar="M", min=1
    ),
    directions: int = typer.Option(20, "--directions", min=2, help="antithetic pairs of random directions for average"),
    *,
    data: DataFlags,
    opening: ModelFlags,
    output: OutputFlags,
) -> None:
    """Compute how much the loss rises around models: in the worst case (SAM, ASAM) and on average.

    Example: fedflat flatness sharpness runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --rho 0.05 --ascent-steps 10
    """
    from fedflat.flatness import sharpness_of
    from fedflat.flatness.sharpness import describe_kind
    from fedflat.reporting.figures.sharpness import sharpness_picture

    kinds = [name.strip() for name in kind.split(",") if name.strip()]
    if not kinds:
        raise UserError("--kind is empty; expected sam, asam or average, separated by commas")
    measures = [(name, radius) for name in kinds for radius in rho or [DEFAULT_RHO.get(name, 0.05)]]
    options: dict[str, Any] = {"steps": steps, "eta": eta, "scope": scope, "directions": directions, "seed": data.seed}

    def measure(objective: Objective, progress: Progress) -> tuple[float, list[Sharpness]]:
        """Return the norm of the gradient, and the sharpness of every kind and radius."""
        per_measure = []
        for name, radius in measures:
            progress(f"{name} within {radius:g}")
            group_size = None if name == "average" else m
            per_measure.append(sharpness_of(objective, name, rho=radius, m=group_size, **options))
        return float(objective.gradient().norm()), per_measure

    start = time.monotonic()
    measured = measure_models(models, data, opening, output, measure)
    described = [(describe_kind(name, scope, eta), radius) for name, radius in measures]
    results: Results = {
        name: {kind: [per_measure[i] for _, per_measure in subsets] for i, kind in enumerate(described)}
        for name, subsets in measured.results.items()
    }
    values = {
        name: {
            "gradient_norm": [norm for norm, _ in measured.results[name]],
            "sharpness": [[result.document() for result in per_subset] for per_subset in by_measure.values()],
        }
        for name, by_measure in results.items()
    }
    document = measured.document(values, ascent_steps=steps, eta=eta, scope=scope, m=m)
    descriptions = {name: model.description for name, model in measured.models.items()}
    curves = sharpness_picture(results, descriptions) if len(rho) > 1 else None

    def show() -> None:
        _print_results(results, document, measured.examples, time.monotonic() - start)
        measured.print_caveats(lambda subset: subset[1][0].loss)

    output.publish(default_folder(measured.models, "sharpness"), document, show, curves)


def _print_results(results: Results, document: dict[str, Any], examples: str, seconds: float) -> None:
    """Print one row per model and one column per measure and radius.

    Args:
        results: by model, then by measure and radius, the sharpness on each subset of examples.
        document: the data, the ascent steps of the worst-case measures and, for each model, its test metric and the
            norm of its gradient on each subset.
        examples: text on the number of examples and subsets, and on the precision.
        seconds: duration of the measurement.
    """
    measures, steps = list(next(iter(results.values()))), document["ascent_steps"]
    metric, shown_tests = test_column(document)
    rows = []
    for name, by_measure in results.items():
        losses = [result.loss for result in by_measure[measures[0]]]
        rises = [_shown_rise(per_subset) for per_subset in by_measure.values()]
        gradient_norm = plus_minus(document["models"][name]["gradient_norm"])
        rows.append((name, plus_minus(losses), shown_tests[name], gradient_norm, *rises))
    columns = ("model", "loss", metric, "gradient norm", *(f"{kind}, rho {rho:g}" for kind, rho in measures))
    # All models and measures have the same subsets.
    subset_results = next(iter(results.values()))[measures[0]]
    interval = "95 % confidence interval of the mean over random directions"
    if len(subset_results) > 1:
        interval = "standard deviation over subsets"
    if document["m"]:
        interval = f"{interval} or groups of {document['m']} examples"
    notes = [f"± {interval}"] if any("±" in cell for row in rows for cell in row[1:]) else []
    worst_case = ", ".join(dict.fromkeys(kind for kind, _ in measures if kind != "average"))
    if worst_case:
        search = "the first-order direction" if steps == 1 else f"{steps} ascent steps"
        notes.append(f"{worst_case}: lower bound from {search}; raise --ascent-steps until it stops changing")
    note = "\n".join(notes) + f"; {shown_seconds(seconds)}"
    print_table(f"Rise of the loss on {document['on']}, {examples}", columns, rows, note)


def _shown_rise(per_subset: list[Sharpness]) -> str:
    """Return the rise of the loss as text, given the sharpness on each subset of examples.

    Only measures that average over random directions have a confidence interval.
    """
    intervals = [result.interval for result in per_subset if result.interval]
    if len(intervals) == len(per_subset):
        return estimate_text(intervals)
    return plus_minus([result.value for result in per_subset])
