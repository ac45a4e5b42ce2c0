"""fedflat flatness stability: twin runs that differ in one training example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedflat.cli.flatness.common import OutputFlags, evenly_spaced, mean, print_table, three_digits
from fedflat.cli.shared.completion import complete_algorithm
from fedflat.cli.shared.flags import CONFIG, JSON, QUIET, SET, optional, with_settings
from fedflat.cli.shared.screen import status_line

MEASUREMENTS = 20
"""Approximate number of measurements without --eval-every."""


@with_settings("eval_every", "flatness", "save_every", "workers")
def stability(
    settings: dict[str, Any],  # values of the flags that with_settings adds, such as --rounds
    algorithm: str | None = typer.Argument(
        None,
        metavar="ALGORITHM",
        help="for example fedsam or fedmoswa",
        show_default=False,
        autocompletion=complete_algorithm,
    ),
    twins: int = typer.Option(
        3, "--twins", min=1, metavar="N", help="number of twins; each replaces a different example and costs a full run"
    ),
    client: int | None = optional(
        "--client", "client whose example is replaced", "drawn from the first cohort", metavar="I", min=0
    ),
    draw: int = typer.Option(
        0, "--draw", min=0, metavar="SEED", help="seed of the replaced examples and their replacements"
    ),
    eval_every: int | None = optional("--eval-every", "rounds between measurements", "about 20 measurements", min=1),
    examples: int = typer.Option(
        500, "--examples", min=1, metavar="N", help="test examples on which losses are compared"
    ),
    config: Path | None = CONFIG,
    assignments: list[str] = SET,
    out: Path | None = optional(
        "--out", "output folder for numbers and figure", "runs/stability-ALGORITHM-DATA-seedSEED", metavar="FOLDER"
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Measure empirical uniform stability: how far runs that differ in one training example diverge.

    Example: fedflat flatness stability fedmoswa --rounds 30 --twins 3
    """
    from fedflat.cli.experiments.run import RUNS, run_slug
    from fedflat.cli.shared.screen import fetch_if_missing
    from fedflat.experiment.analysis.stability import Twins
    from fedflat.experiment.make_config import make_config
    from fedflat.reporting.figures.clients import twins_picture

    if algorithm is not None:
        settings = settings | {"algorithm": algorithm}
    run_config = make_config(config, settings, assignments)
    output, rounds = OutputFlags(out, as_json, quiet), run_config.training.rounds
    fetch_if_missing(run_config, output.silent)
    measurements = []
    with status_line(output.silent) as progress:
        twin_runs = Twins(run_config, twins, client=client, seed=draw, examples=examples)
        for measurement in twin_runs.train(eval_every or max(1, rounds // MEASUREMENTS)):
            measurements.append(measurement)
            distance = three_digits(mean(measurement["distance"]))
            progress(f"round {measurement['round']} of {rounds}: twins are {distance} apart")
    document = {
        "algorithm": run_config.algorithm,
        "seed": run_config.seed,
        "swaps": [vars(swap) for swap in twin_runs.swaps],
        "rounds": measurements,
        "config": run_config.model_dump(mode="json"),
    }
    run_name = f"{run_config.algorithm}   {run_config.data.dataset}, seed {run_config.seed}"
    title = f"{run_name}, {twins} twins that differ in one example"

    def show() -> None:
        columns = ("round", "weight distance", "relative", "mean loss difference", "largest loss difference")
        print_table(title, columns, [_row(measurement) for measurement in evenly_spaced(measurements)], text_columns=0)

    figure = twins_picture(measurements, title, run_config.algorithm)
    folder = RUNS / f"stability-{run_slug(run_config)}"
    swaps = ", ".join(
        f"example {swap.position} of client {swap.client} "
        + ("(never used)" if swap.first_round is None else f"(first in round {swap.first_round})")
        for swap in twin_runs.swaps
    )
    equal = sum(swap.first_round is None for swap in twin_runs.swaps)
    values = "means over twins" + (f", of which {equal} always equal the run; train for more rounds" if equal else "")
    notes = {"replaced": swaps, "values": values}
    output.publish(folder, document, show, figure, notes, name="stability")


def _row(measurement: dict[str, Any]) -> tuple[object, ...]:
    """Return the table row of a round: distances and loss differences between twin runs, as means over twins."""
    distance, norm = mean(measurement["distance"]), measurement["norm"]
    numbers = (
        distance,
        distance / norm if distance is not None and norm else None,
        mean(measurement["mean_loss_difference"]),
        mean(measurement["largest_loss_difference"]),
    )
    return (measurement["round"], *map(three_digits, numbers))
