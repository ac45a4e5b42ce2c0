"""fedflat flatness spectrum: curvature of the loss around models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.flags import (
    BATCH,
    CLIENT,
    DEVICE,
    EXAMPLES,
    MODELS,
    ON,
    OUT,
    PRECISION,
    SEED,
    SUBSETS,
    folder_for,
    number_of_subsets,
    opened_models,
    plus_minus,
    print_files,
    print_table,
    short_names,
    status_line,
    write_results,
)
from fedflat.cli.shared.flags import JSON, QUIET, optional
from fedflat.cli.shared.screen import print_json, screen, shown_count, shown_seconds

if TYPE_CHECKING:
    from fedflat.flatness import Spectrum

METHOD = "Method"


def spectrum(
    models: list[str] = MODELS,
    eigenvalues: int | None = optional("--eigenvalues", "number of eigenvalues", "50", metavar="K", min=1),
    by: str = typer.Option(
        "value", "--by", metavar="ORDER", help="value (largest eigenvalues and the smallest one) or magnitude"
    ),
    density: bool = typer.Option(False, "--density", help="also estimate the spectral density"),
    on: str = ON,
    client: int | None = CLIENT,
    examples: int | None = EXAMPLES,
    subsets: int | None = SUBSETS,
    seed: int = SEED,
    method: str = typer.Option(
        "lanczos",
        "--method",
        metavar="NAME",
        help="lanczos, or power (deflated power iteration, as in the ECCV paper)",
        rich_help_panel=METHOD,
    ),
    tolerance: float = typer.Option(
        1e-3, "--tolerance", help="Lanczos: maximum relative residual", rich_help_panel=METHOD
    ),
    iterations: int = typer.Option(
        20, "--iterations", min=1, help="power iteration: products per eigenvalue", rich_help_panel=METHOD
    ),
    trace_draws: int = typer.Option(
        30, "--trace-draws", min=0, help="random vectors for the trace; 0 skips it", rich_help_panel=METHOD
    ),
    density_draws: int = typer.Option(
        5, "--density-draws", min=1, help="random vectors for the density", rich_help_panel=METHOD
    ),
    density_steps: int = typer.Option(
        80, "--density-steps", min=1, help="products per random vector", rich_help_panel=METHOD
    ),
    batch: int | None = BATCH,
    compile: str = typer.Option(
        "auto",
        "--compile",
        metavar="WHEN",
        help="compile Hessian-vector products: on, off, or auto (where it pays off on a GPU)",
        rich_help_panel=METHOD,
    ),
    device: str = DEVICE,
    precision: str | None = PRECISION,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Compute the Hessian spectrum of the loss around models: eigenvalues, trace and density.

    Example: fedflat flatness spectrum runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --examples 500 --subsets 3
    """
    from fedflat.flatness import spectrum_of
    from fedflat.reporting.figures.spectrum import spectrum_picture

    count = number_of_subsets(subsets, examples)
    spectra: dict[str, list[Spectrum]] = {}
    with status_line(quiet or as_json) as progress:
        chosen = opened_models(models, quiet or as_json, device, precision)
        for name, model in zip(short_names(chosen), chosen, strict=True):
            parts = model.objectives(on, client=client, examples=examples, subsets=count, seed=seed, batch=batch)
            spectra[name] = [
                spectrum_of(
                    objective,
                    eigenvalues,
                    method=method,
                    by=by,
                    tolerance=tolerance,
                    iterations=iterations,
                    trace_draws=trace_draws,
                    density_draws=density_draws if density else 0,
                    density_steps=density_steps,
                    compile=compile,
                    seed=seed,
                    progress=lambda text, name=name: progress(f"{name}: {text}"),  # type: ignore[misc]
                )
                for objective in parts
            ]
    where = f"client {client}" if client is not None else on
    of = {name: model.objective(on, client=client).examples for name, model in zip(spectra, chosen, strict=True)}
    document = {
        "on": where,
        "seed": seed,
        "models": {
            name: {
                "model": model.label,
                "examples_of": of[name],
                "subsets": [subset.document() for subset in spectra[name]],
            }
            for name, model in zip(spectra, chosen, strict=True)
        },
    }
    files = write_results(out or folder_for(chosen[0], "spectrum"), "spectrum", document, spectrum_picture(spectra))
    if as_json:
        print_json({"files": files, **document})
    else:
        _print(spectra, where, of, files)


def _print(spectra: dict[str, list[Spectrum]], where: str, of: dict[str, int], files: dict[str, Path]) -> None:
    subsets = next(iter(spectra.values()))
    several, first = len(subsets) > 1, subsets[0]
    columns = ("model", "loss", "lambda_max", "lambda_max / lambda_5", "lambda_min", "trace", "products", "time")
    whole = next(iter(of.values()))
    data = shown_count(first.examples)
    if several:
        data = f"{len(subsets)} subsets of {data} of {shown_count(whole)}"
    spread = "standard deviation over subsets" if several else "95 % confidence interval of the trace"
    heading = f"Curvature on {where}, {data} examples, {first.precision}, {first.method}"
    rows = [_row(name, subsets) for name, subsets in spectra.items()]
    print_table(heading, columns, rows, f"± {spread}" if several or first.trace else "")
    for name, subsets in spectra.items():
        if not all(spectrum.converged for spectrum in subsets):
            worst = max(r / abs(v) for s in subsets for v, r in zip(s.eigenvalues, s.residuals, strict=True) if v)
            screen().print(f"{name}: not converged; relative residuals up to {100 * worst:.3g} %", markup=False)
    print_files(files)


def _row(name: str, spectra: Sequence[Spectrum]) -> tuple[object, ...]:
    def over(values: Sequence[float | None]) -> str | None:
        known = [value for value in values if value is not None]
        return plus_minus(known) if len(known) == len(values) else None

    trace: Any = over([s.trace.value if s.trace else None for s in spectra])
    if len(spectra) == 1 and spectra[0].trace:
        trace = f"{spectra[0].trace.value:.4g} ± {spectra[0].trace.half_width:.2g}"
    return (
        name,
        over([s.loss for s in spectra]),
        over([s.lambda_max for s in spectra]),
        over([s.ratio for s in spectra]),
        over([s.lambda_min for s in spectra]),
        trace,
        shown_count(sum(s.products for s in spectra)),
        shown_seconds(sum(s.seconds for s in spectra)),
    )
