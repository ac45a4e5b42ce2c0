"""fedflat flatness stability: twin runs that differ in one training example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.clients import mean, shown
from fedflat.cli.flatness.flags import print_files, print_table, status_line, thinned, write_results
from fedflat.cli.shared.flags import CONFIG, JSON, QUIET, SET, optional, with_settings
from fedflat.cli.shared.screen import print_json

if TYPE_CHECKING:
    from fedflat.experiment.config import Config


@with_settings("eval_every", "flatness", "save_every", "workers")
def stability(
    settings: dict[str, Any],
    algorithm: str | None = typer.Argument(
        None, metavar="ALGORITHM", help="for example fedsam or fedmoswa", show_default=False
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
    every: int | None = optional("--every", "rounds between measurements", "about 20 measurements", min=1),
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
    from fedflat.api import make_config
    from fedflat.cli.shared.downloads import fetch_if_missing
    from fedflat.experiment.analysis.stability import Twins
    from fedflat.reporting.figures.clients import twins_picture

    made = make_config(config, settings | ({} if algorithm is None else {"algorithm": algorithm}), assignments)
    fetch_if_missing(made, quiet or as_json)
    rounds = made.training.rounds
    measurements = []
    with status_line(quiet or as_json) as progress:
        pairs = Twins(made, twins, client=client, seed=draw, examples=examples)
        for figures in pairs.go(every or max(1, rounds // 20)):
            measurements.append(figures)
            progress(f"round {figures['round']} of {rounds}: twins are {shown(mean(figures['distance']))} apart")
    document = {
        "algorithm": made.algorithm,
        "seed": made.seed,
        "swaps": [vars(swap) for swap in pairs.swaps],
        "rounds": measurements,
        "config": made.model_dump(mode="json"),
    }
    title = f"{made.algorithm}   {made.data.dataset}, seed {made.seed}, {twins} twins that differ in one example"
    files = write_results(out or _folder(made), "stability", document, twins_picture(measurements, title))
    if as_json:
        print_json({"files": files, **document})
        return
    columns = ("round", "weight distance", "relative", "mean loss difference", "largest loss difference")
    print_table(title, columns, [_row(figures) for figures in thinned(measurements)], text_columns=0)
    swaps = ", ".join(
        f"example {swap.position} of client {swap.client} (first in round {swap.first_round})" for swap in pairs.swaps
    )
    print_files({"replaced": swaps, "values": "means over twins", **files})


def _row(figures: dict[str, Any]) -> tuple[object, ...]:
    distance = mean(figures["distance"])
    relative = None if distance is None or not figures["norm"] else distance / figures["norm"]
    return (
        figures["round"],
        shown(distance),
        shown(relative),
        shown(mean(figures["mean_loss_difference"])),
        shown(mean(figures["largest_loss_difference"])),
    )


def _folder(config: Config) -> Path:
    from fedflat.cli.experiments.run import RUNS, data_slug

    slug = re.sub(r"[^a-z0-9.]+", "-", config.algorithm.lower()).strip("-")
    return RUNS / f"stability-{slug}-{data_slug(config)}-seed{config.seed}"
