"""fedflat flatness sharpness: rise of the loss around models."""

from __future__ import annotations

import time
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
from fedflat.cli.shared.flags import JSON, QUIET
from fedflat.cli.shared.screen import print_json, shown_count, shown_seconds
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.flatness import Sharpness

RHO = {"sam": 0.05, "asam": 0.5, "average": 0.05}
"""Default radii, as in the papers."""


def sharpness(
    models: list[str] = MODELS,
    kind: str = typer.Option(
        "sam,asam,average", "--kind", metavar="KIND,...", help="comma-separated: sam, asam, average"
    ),
    rho: list[float] = typer.Option(
        [],
        "--rho",
        metavar="RADIUS",
        help="radius; repeatable [dim](default: 0.05, asam 0.5)[/dim]",
        show_default=False,
    ),
    steps: int = typer.Option(
        1, "--ascent-steps", min=1, help="ascent steps of sam and asam; 1 is the first-order direction used in training"
    ),
    eta: float = typer.Option(0.0, "--eta", help="offset of asam's scale |w| + eta; 0 is scale-invariant"),
    scope: str = typer.Option(
        "weight", "--scope", metavar="WHICH", help="tensors that asam scales: weight (not biases) or all"
    ),
    directions: int = typer.Option(20, "--directions", min=2, help="antithetic pairs of random directions for average"),
    on: str = ON,
    client: int | None = CLIENT,
    examples: int | None = EXAMPLES,
    subsets: int | None = SUBSETS,
    seed: int = SEED,
    batch: int | None = BATCH,
    device: str = DEVICE,
    precision: str | None = PRECISION,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Compute the rise of the loss around models: SAM's and ASAM's worst case, and the average case.

    Example: fedflat flatness sharpness runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --rho 0.05 --ascent-steps 10
    """
    from fedflat.flatness import sharpness_of

    kinds = [word.strip() for word in kind.split(",") if word.strip()]
    if not kinds:
        raise UserError("--kind is empty; expected sam, asam or average, separated by commas")
    count = number_of_subsets(subsets, examples)
    wanted = [(name, radius) for name in kinds for radius in (rho or [RHO.get(name, 0.05)])]
    results: dict[str, dict[tuple[str, float], list[Sharpness]]] = {}
    begun = time.monotonic()
    with status_line(quiet or as_json) as progress:
        chosen = opened_models(models, quiet or as_json, device, precision)
        for name, model in zip(short_names(chosen), chosen, strict=True):
            parts = model.objectives(on, client=client, examples=examples, subsets=count, seed=seed, batch=batch)
            results[name] = {}
            for which, radius in wanted:
                progress(f"{name}: {which} within {radius:g}")
                options: dict[str, Any] = {
                    "steps": steps,
                    "eta": eta,
                    "scope": scope,
                    "directions": directions,
                    "seed": seed,
                }
                results[name][which, radius] = [sharpness_of(part, which, rho=radius, **options) for part in parts]
    where = f"client {client}" if client is not None else on
    document = {
        "on": where,
        "seed": seed,
        "ascent_steps": steps,
        "eta": eta,
        "scope": scope,
        "models": {
            name: {
                "model": model.label,
                "sharpness": [[subset.document() for subset in subsets] for subsets in results[name].values()],
            }
            for name, model in zip(results, chosen, strict=True)
        },
    }
    files = write_results(out or folder_for(chosen[0], "sharpness"), "sharpness", document)
    if as_json:
        print_json({"files": files, **document})
        return
    _print(results, where, steps, time.monotonic() - begun)
    print_files(files)


def _print(
    results: dict[str, dict[tuple[str, float], list[Sharpness]]], where: str, steps: int, seconds: float
) -> None:
    first = next(iter(results.values()))
    parts = next(iter(first.values()))
    columns = ("model", "loss", *(f"{kind}, rho {rho:g}" for kind, rho in first))
    data = f"{len(parts)} subsets of " if len(parts) > 1 else ""
    rows = [
        (
            name,
            plus_minus([subset.loss for subset in next(iter(values.values()))]),
            *(_cell(subset) for subset in values.values()),
        )
        for name, values in results.items()
    ]
    meaning = "standard deviation over subsets" if len(parts) > 1 else "95 % confidence interval of the average"
    worst = "first-order direction" if steps == 1 else f"{steps} ascent steps"
    heading = f"Rise of the loss on {where}, {data}{shown_count(parts[0].examples)} examples"
    print_table(heading, columns, rows, f"± {meaning}; worst case: {worst}; {shown_seconds(seconds)}")


def _cell(subset: list[Sharpness]) -> str:
    interval = subset[0].interval
    if len(subset) == 1 and interval is not None:
        return f"{interval.value:.4g} ± {interval.half_width:.2g}"
    return plus_minus([result.value for result in subset])
