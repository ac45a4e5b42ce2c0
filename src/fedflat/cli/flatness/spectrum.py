"""fedflat flatness spectrum: curvature of the loss around models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.common import MAX_LISTED, OutputFlags, Progress, estimate_text, plus_minus, print_table
from fedflat.cli.flatness.models import MODELS, DataFlags, ModelFlags, default_folder, measure_models, test_column
from fedflat.cli.shared.flags import optional, with_flag_groups
from fedflat.cli.shared.screen import screen, shown_count, shown_seconds

if TYPE_CHECKING:
    from fedflat.flatness import LayerCurvature, Objective, Spectrum

MATRICES = ("hessian", "gauss-newton", "empirical-fisher")
"""For completion; ``fedflat.flatness`` is not imported here, because torch takes seconds to import."""
METHOD = "Method"
"""Help panel."""
_method_option = partial(typer.Option, rich_help_panel=METHOD)


@with_flag_groups
def spectrum(
    models: list[str] = MODELS,
    eigenvalues: int | None = optional("--eigenvalues", "number of eigenvalues", "50", metavar="K", min=1),
    by: str = typer.Option("value", "--by", metavar="ORDER", help="value (largest eigenvalues) or magnitude"),
    lambda_min: bool = typer.Option(
        True, "--lambda-min/--no-lambda-min", help="by value: also compute the smallest eigenvalue"
    ),
    matrix: str = typer.Option(
        "hessian",
        "--matrix",
        metavar="NAME",
        help="hessian, gauss-newton (for cross-entropy, the Fisher matrix) or empirical-fisher",
        autocompletion=lambda: list(MATRICES),
    ),
    per_layer: bool = typer.Option(
        False, "--per-layer", help="also compute the largest eigenvalue and trace of each parameter's diagonal block"
    ),
    density: bool = typer.Option(False, "--density", help="also estimate the spectral density"),
    *,
    data: DataFlags,
    method: str = _method_option(
        "lanczos", "--method", metavar="NAME", help="lanczos, or power (deflated power iteration, as in the ECCV paper)"
    ),
    tolerance: float = _method_option(
        1e-3, "--tolerance", help="Lanczos: maximum relative residual (lambda_min: relative to lambda_max)"
    ),
    iterations: int = _method_option(20, "--iterations", min=1, help="power iteration: products per eigenvalue"),
    trace_draws: int = _method_option(30, "--trace-draws", min=0, help="products for the trace; 0 skips it"),
    trace_estimator: str = _method_option(
        "hutchinson",
        "--trace-estimator",
        metavar="NAME",
        help="hutchinson or hutch++",
        autocompletion=lambda: ["hutchinson", "hutch++"],
    ),
    density_draws: int = _method_option(5, "--density-draws", min=1, help="random vectors for the density"),
    density_steps: int = _method_option(80, "--density-steps", min=1, help="products per random vector"),
    compile: str = _method_option(
        "auto",
        "--compile",
        metavar="WHEN",
        help="compile Hessian-vector products: on, off, or auto (where it pays off on a GPU)",
    ),
    opening: ModelFlags,
    output: OutputFlags,
) -> None:
    """Compute the spectrum of the Hessian (or Fisher matrix) of the loss around models: eigenvalues, trace and density.

    Example: fedflat flatness spectrum runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --examples 500 --subsets 3
    """
    from fedflat.flatness import spectrum_of
    from fedflat.reporting.figures.spectrum import spectrum_picture

    def measure(objective: Objective, progress: Progress) -> Spectrum:
        return spectrum_of(
            objective,
            eigenvalues,
            matrix=matrix,
            per_layer=per_layer,
            method=method,
            by=by,
            lambda_min=lambda_min,
            tolerance=tolerance,
            iterations=iterations,
            trace_draws=trace_draws,
            trace_estimator=trace_estimator,
            density_draws=density_draws if density else 0,
            density_steps=density_steps,
            compile=compile,
            seed=data.seed,
            progress=progress,
        )

    measured = measure_models(models, data, opening, output, measure)
    opened, spectra = measured.models, measured.results
    values = {
        name: {
            "examples_of": model.objective(data.on, client=data.client).examples,
            "subsets": [result.document() for result in spectra[name]],
        }
        for name, model in opened.items()
    }
    document = measured.document(values)
    figure = spectrum_picture(spectra, {name: model.description for name, model in opened.items()})

    def show() -> None:
        _print_spectra(spectra, document, measured.examples, tolerance)
        measured.print_caveats(lambda result: result.loss)

    output.publish(default_folder(opened, "spectrum"), document, show, figure)


def _print_spectra(
    spectra: dict[str, list[Spectrum]], document: dict[str, Any], examples: str, tolerance: float
) -> None:
    """Print one row per model, a short list of eigenvalues, and the residuals of those that have not converged.

    Args:
        spectra: by model, the spectrum on each subset.
        document: the data and, for each model, its test metric.
        examples: text on the number of examples and subsets, and on the precision.
        tolerance: relative residual at which Lanczos accepts an eigenvalue.
    """
    first_per_subset = next(iter(spectra.values()))  # the first model's spectrum on each subset
    first = first_per_subset[0]
    note = "± 95 % confidence interval of the trace" if first.trace else ""
    if len(first_per_subset) > 1:
        note = "± standard deviation over subsets"
    metric, shown_tests = test_column(document)
    matrix = "" if first.matrix == "hessian" else f" ({first.matrix})"
    heading = f"Curvature{matrix} on {document['on']}, {examples}, {first.method}"
    rows = [{"model": name, **_cells(per_subset, metric, shown_tests[name])} for name, per_subset in spectra.items()]
    columns = [title for title in rows[0] if any(row[title] is not None for row in rows)]  # without those not computed
    criterion = f" (tolerance {tolerance:g})" if first.method == "lanczos" else ""
    all_converged = all(result.converged for per_subset in spectra.values() for result in per_subset)
    print_table(
        heading,
        columns,
        [[row[title] for title in columns] for row in rows],
        "; ".join(filter(None, [note, f"all converged{criterion}" * all_converged])),
    )
    if 1 < max(len(per_subset[0].eigenvalues) for per_subset in spectra.values()) <= MAX_LISTED:
        _print_eigenvalues(spectra)
    for name, per_subset in spectra.items():
        layers = [_layer_row(layer) for layer in zip(*(result.layers for result in per_subset), strict=True)]
        if layers:
            print_table(f"Parameters of {name}", ("parameter", "weights", "lambda_max", "trace"), layers, note)
        for result in per_subset:
            if not result.converged:
                message = f"{name}: not converged{criterion}; {result.unconverged}; {_remedy(result)}"
                screen().print(message)


def _print_eigenvalues(spectra: dict[str, list[Spectrum]]) -> None:
    """Print the eigenvalues of models side by side: means with standard deviations over subsets of examples.

    Models with fewer parameters can have fewer eigenvalues.
    """
    by_model = [
        [plus_minus(values) for values in zip(*(result.eigenvalues for result in per_subset), strict=True)]
        for per_subset in spectra.values()
    ]
    rows = [(rank, *values) for rank, values in enumerate(zip_longest(*by_model), 1)]
    print_table("Eigenvalues", ("rank", *spectra), rows, text_columns=0)


def _remedy(result: Spectrum) -> str:
    """Say what to do about eigenvalues that have not converged."""
    if result.method == "power":
        return "raise --iterations or use --method lanczos"
    return "raise --tolerance" + ("" if result.precision == "float64" else " or use --precision float64")


def _layer_row(per_subset: Sequence[LayerCurvature]) -> tuple[object, ...]:
    """Return the table row of a parameter, given its curvature on each subset of examples."""
    largest, trace = (
        plus_minus([each.lambda_max for each in per_subset]),
        estimate_text([each.trace for each in per_subset]),
    )
    return per_subset[0].name, shown_count(per_subset[0].size), largest, trace


def _cells(per_subset: Sequence[Spectrum], metric: str, test_metric: str) -> dict[str, str | None]:
    """Return the table row of a model by column: its test ``metric``, and means with deviations over subsets.

    On a single subset, the trace has the confidence interval of its random estimate instead.
    """

    def mean_text(values: Sequence[float | None]) -> str | None:
        """Return mean and standard deviation of one value per subset as text; None if a subset has no value."""
        numbers = [value for value in values if value is not None]
        return plus_minus(numbers) if len(numbers) == len(values) else None

    traces = [result.trace for result in per_subset if result.trace]
    return {
        "loss": mean_text([result.loss for result in per_subset]),
        metric: test_metric,
        "gradient norm": mean_text([result.gradient_norm for result in per_subset]),
        "lambda_max": mean_text([result.lambda_max for result in per_subset]),
        "lambda_max / lambda_5": mean_text([result.ratio for result in per_subset]),
        "lambda_min": mean_text([result.lambda_min for result in per_subset]),
        "trace": estimate_text(traces) if len(traces) == len(per_subset) else None,
        "products": shown_count(sum(result.products for result in per_subset)),
        "time": shown_seconds(sum(result.seconds for result in per_subset)),
    }
