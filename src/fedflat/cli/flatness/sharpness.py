"""fedflat flatness sharpness: how much the loss rises around models."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

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
from fedflat.cli.shared.flags import JSON, QUIET
from fedflat.cli.shared.screen import facts, print_json, screen, shown_count, shown_seconds, table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.flatness import Sharpness

RHO = {"sam": 0.05, "asam": 0.5, "average": 0.05}
"""The radius unless another is said: the papers' usual ones."""


def sharpness(
    models: list[str] = MODELS,
    kind: str = typer.Option(
        "sam,asam,average", "--kind", metavar="KIND,...", help="sam, asam, average, joined by commas"
    ),
    rho: list[float] = typer.Option(
        [],
        "--rho",
        metavar="RADIUS",
        help="radius; may be repeated [dim](default: 0.05, for asam 0.5)[/dim]",
        show_default=False,
    ),
    steps: int = typer.Option(
        1, "--ascent-steps", min=1, help="steps to the worst point; 1 is the first-order direction of training"
    ),
    eta: float = typer.Option(0.0, "--eta", help="added to |w| in asam's scale; scale-invariant at 0"),
    scope: str = typer.Option(
        "weight", "--scope", metavar="WHICH", help="what asam scales: weight (not biases), or all"
    ),
    directions: int = typer.Option(20, "--directions", min=2, help="pairs of random directions for the average"),
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
    """How much the loss rises around models: in SAM's worst direction, in ASAM's scale-invariant one, and on average.

    Example: fedflat flatness sharpness runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --rho 0.05 --ascent-steps 10
    """
    from fedflat.experiment.store.atomic_files import create_folder, write_whole
    from fedflat.flatness import sharpness_of

    kinds = [word.strip() for word in kind.split(",") if word.strip()]
    if not kinds:
        raise UserError("no kind of sharpness is asked for; expected sam, asam or average, joined by commas")
    count = number_of_subsets(subsets, examples)
    wanted = [(one, radius) for one in kinds for radius in (rho or [RHO.get(one, 0.05)])]
    found: dict[str, dict[tuple[str, float], list[Sharpness]]] = {}
    begun = time.monotonic()
    with told(quiet or as_json) as progress:
        chosen = opened_models(models, quiet or as_json, device, precision)
        for name, model in zip(short_names(chosen), chosen, strict=True):
            parts = model.objectives(on, client=client, examples=examples, subsets=count, seed=seed, batch=batch)
            found[name] = {}
            for which, radius in wanted:
                progress(f"{name}: {which} within {radius:g}")
                options = {"steps": steps, "eta": eta, "scope": scope, "directions": directions, "seed": seed}
                found[name][which, radius] = [sharpness_of(part, which, rho=radius, **options) for part in parts]  # type: ignore[arg-type]
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
                "sharpness": [[one.document() for one in subset] for subset in found[name].values()],
            }
            for name, model in zip(found, chosen, strict=True)
        },
    }
    folder = out or folder_for(chosen[0], "sharpness")
    create_folder(folder)
    file = folder / "sharpness.json"
    write_whole(file, json.dumps(document, indent=2) + "\n")
    if as_json:
        print_json({"files": {"numbers": file}, **document})
        return
    _print(found, where, steps, time.monotonic() - begun, file)


def _print(
    found: dict[str, dict[tuple[str, float], list[Sharpness]]], where: str, steps: int, seconds: float, file: Path
) -> None:
    console, first = screen(), next(iter(found.values()))
    parts = next(iter(first.values()))
    columns = ("model", "loss", *(f"{kind}, rho {rho:g}" for kind, rho in first))
    data = f"{len(parts)} subsets of " if len(parts) > 1 else ""
    console.print()
    console.print(
        f"Rise of the loss on {where}, {data}{shown_count(parts[0].examples)} examples", style="bold", markup=False
    )
    console.print()
    rows = [
        (
            name,
            plus_minus([one.loss for one in next(iter(values.values()))]),
            *(_cell(subset) for subset in values.values()),
        )
        for name, values in found.items()
    ]
    console.print(table(columns, rows, numbers=columns[1:]))
    meaning = "standard deviation over subsets" if len(parts) > 1 else "of the average, 95 % confidence"
    worst = "first-order direction" if steps == 1 else f"{steps} steps of ascent"
    console.print(f"± {meaning}; worst cases by {worst}; {shown_seconds(seconds)}", style="dim")
    console.print()
    console.print(facts({"numbers": file}))


def _cell(subset: list[Sharpness]) -> str:
    interval = subset[0].interval
    if len(subset) == 1 and interval is not None:
        return f"{interval.value:.4g} ± {interval.half_width:.2g}"
    return plus_minus([one.value for one in subset])
