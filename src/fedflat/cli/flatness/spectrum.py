"""fedflat flatness spectrum: the curvature of the loss around models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
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
    short_names,
    told,
)
from fedflat.cli.shared.flags import JSON, QUIET, optional
from fedflat.cli.shared.screen import facts, print_json, screen, shown_count, shown_seconds, table

if TYPE_CHECKING:
    from fedflat.flatness import Spectrum

HOW = "How it is computed"


def spectrum(
    models: list[str] = MODELS,
    eigenvalues: int | None = optional("--eigenvalues", "how many eigenvalues", "50", metavar="K", min=1),
    by: str = typer.Option(
        "value", "--by", metavar="ORDER", help="the largest by value (and the smallest one), or by magnitude"
    ),
    density: bool = typer.Option(False, "--density", help="also the density of all eigenvalues"),
    on: str = ON,
    client: int | None = CLIENT,
    examples: int | None = EXAMPLES,
    subsets: int | None = SUBSETS,
    seed: int = SEED,
    method: str = typer.Option(
        "lanczos",
        "--method",
        metavar="NAME",
        help="lanczos, or power: deflated power iteration, as published",
        rich_help_panel=HOW,
    ),
    tolerance: float = typer.Option(
        1e-3, "--tolerance", help="largest residual of an eigenvalue, as a share of it, by Lanczos", rich_help_panel=HOW
    ),
    iterations: int = typer.Option(
        20, "--iterations", min=1, help="products per eigenvalue by power iteration", rich_help_panel=HOW
    ),
    trace_draws: int = typer.Option(
        30, "--trace-draws", min=0, help="random vectors for the trace; 0 leaves it out", rich_help_panel=HOW
    ),
    density_draws: int = typer.Option(
        5, "--density-draws", min=1, help="random vectors for the density", rich_help_panel=HOW
    ),
    density_steps: int = typer.Option(
        80, "--density-steps", min=1, help="products for each of them", rich_help_panel=HOW
    ),
    batch: int | None = BATCH,
    compile: str = typer.Option(
        "auto",
        "--compile",
        metavar="WHEN",
        help="Hessian products: on, off, or auto, where it pays on a GPU",
        rich_help_panel=HOW,
    ),
    device: str = DEVICE,
    precision: str | None = PRECISION,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """The curvature of the loss around models: eigenvalues of its Hessian, lambda_max / lambda_5, the most negative one, trace, density.

    Example: fedflat flatness spectrum runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --examples 500 --subsets 3
    """
    from fedflat.cli.shared.one_run import write_figure
    from fedflat.experiment.store.atomic_files import create_folder, write_whole
    from fedflat.flatness import spectrum_of
    from fedflat.reporting.figures.spectrum import spectrum_picture

    count = number_of_subsets(subsets, examples)
    found: dict[str, list[Spectrum]] = {}
    with told(quiet or as_json) as progress:
        chosen = opened_models(models, quiet or as_json, device, precision)
        for name, model in zip(short_names(chosen), chosen, strict=True):
            parts = model.objectives(on, client=client, examples=examples, subsets=count, seed=seed, batch=batch)
            found[name] = [
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
                    progress=partial(_tell, progress, name),
                )
                for objective in parts
            ]
    where = f"client {client}" if client is not None else on
    of = {name: model.objective(on, client=client).examples for name, model in zip(found, chosen, strict=True)}
    document = {
        "on": where,
        "seed": seed,
        "models": {
            name: {"model": model.label, "examples_of": of[name], "subsets": [one.document() for one in found[name]]}
            for name, model in zip(found, chosen, strict=True)
        },
    }
    folder = out or folder_for(chosen[0], "spectrum")
    create_folder(folder)
    files = {"numbers": folder / "spectrum.json", "picture": folder / "spectrum.png"}
    write_whole(files["numbers"], json.dumps(document, indent=2) + "\n")
    write_figure(spectrum_picture(found), files["picture"])
    if as_json:
        print_json({"files": files, **document})
    else:
        _print(found, where, of, files)


def _tell(progress: Callable[[str], None], name: str, text: str) -> None:
    progress(f"{name}: {text}")


def _print(found: dict[str, list[Spectrum]], where: str, of: dict[str, int], files: dict[str, Path]) -> None:
    console, first = screen(), next(iter(found.values()))
    several = len(first) > 1
    one = first[0]
    columns = ("model", "loss", "lambda_max", "lambda_max / lambda_5", "lambda_min", "trace", "products", "time")
    whole = next(iter(of.values()))
    data = (
        f"{len(first)} subsets of {shown_count(one.examples)} of {shown_count(whole)}"
        if several
        else shown_count(one.examples)
    )
    spread = "standard deviation over subsets" if several else "of the trace, 95 % confidence"
    console.print()
    console.print(
        f"Curvature on {where}, {data} examples, {one.precision}, by {one.method}", style="bold", markup=False
    )
    console.print()
    console.print(table(columns, [_row(name, spectra) for name, spectra in found.items()], numbers=columns[1:]))
    if several or one.trace:
        console.print(f"± {spread}", style="dim")
    for name, spectra in found.items():
        if not all(spectrum.converged for spectrum in spectra):
            worst = max(r / abs(v) for s in spectra for v, r in zip(s.eigenvalues, s.residuals, strict=True) if v)
            console.print(
                f"Not all eigenvalues of {name} have converged: residuals up to {100 * worst:.3g} % of them.",
                markup=False,
            )
    console.print()
    console.print(facts(files))


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
