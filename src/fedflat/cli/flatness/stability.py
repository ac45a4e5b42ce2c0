"""fedflat flatness stability: twins of a run that differ from it in one example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.clients import LISTED, mean, shown, write
from fedflat.cli.flatness.flags import told
from fedflat.cli.shared.flags import CONFIG, JSON, QUIET, SET, optional, with_settings
from fedflat.cli.shared.screen import facts, print_json, screen, table

if TYPE_CHECKING:
    from fedflat.experiment.config import Config


@with_settings("every", "flatness", "save_every", "workers")
def stability(
    settings: dict[str, Any],
    algorithm: str | None = typer.Argument(
        None, metavar="ALGORITHM", help="for example fedsam or fedmoswa", show_default=False
    ),
    twins: int = typer.Option(
        3, "--twins", min=1, metavar="N", help="twins, each with another example replaced; each costs a whole run"
    ),
    client: int | None = optional("--client", "whose example", "drawn from the first cohort", metavar="I", min=0),
    draw: int = typer.Option(
        0, "--draw", min=0, metavar="SEED", help="seed of which examples are replaced, and by which"
    ),
    every: int | None = optional("--every", "rounds between looks", "about twenty looks", min=1),
    examples: int = typer.Option(500, "--examples", min=1, metavar="N", help="test examples whose losses are compared"),
    config: Path | None = CONFIG,
    assignments: list[str] = SET,
    out: Path | None = optional(
        "--out", "where numbers and picture go", "runs/stability-ALGORITHM-DATA-seedSEED", metavar="FOLDER"
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Empirical uniform stability: how far runs drift apart, in weights and losses, that differ in a single training example.

    Example: fedflat flatness stability fedmoswa --rounds 30 --twins 3
    """
    from fedflat.api import make_config
    from fedflat.cli.shared.downloads import fetch_if_missing
    from fedflat.experiment.analysis.stability import Twins
    from fedflat.reporting.figures.clients import twins_picture

    made = make_config(config, settings | ({} if algorithm is None else {"algorithm": algorithm}), assignments)
    fetch_if_missing(made, quiet or as_json)
    rounds = made.training.rounds
    looks = []
    with told(quiet or as_json) as progress:
        pairs = Twins(made, twins, client=client, seed=draw, examples=examples)
        for look in pairs.go(every or max(1, rounds // 20)):
            looks.append(look)
            progress(f"round {look['round']} of {rounds}: twins are {shown(mean(look['distance']))} apart")
    document = {
        "algorithm": made.algorithm,
        "seed": made.seed,
        "swaps": [vars(swap) for swap in pairs.swaps],
        "rounds": looks,
        "config": made.model_dump(mode="json"),
    }
    title = f"{made.algorithm}   {made.data.dataset}, seed {made.seed}, {twins} twins that differ in one example"
    files = write(_folder(made) if out is None else out, "stability", document, twins_picture(looks, title))
    if as_json:
        print_json({"files": files, **document})
        return
    console = screen()
    console.print(f"\n{title}\n", style="bold", markup=False)
    columns = ("round", "distance of weights", "of their norm", "mean loss difference", "largest loss difference")
    step = -(-len(looks) // LISTED)
    rows = [_row(look) for place, look in enumerate(looks) if (len(looks) - 1 - place) % step == 0]
    console.print(table(columns, rows, numbers=columns))
    swaps = ", ".join(
        f"example {swap.position} of client {swap.client} (first in round {swap.first_round})" for swap in pairs.swaps
    )
    console.print()
    console.print(facts({"replaced": swaps, "figures": "means over the twins", **files}))


def _row(look: dict[str, Any]) -> tuple[object, ...]:
    distance = mean(look["distance"])
    relative = None if distance is None or not look["norm"] else distance / look["norm"]
    return (
        look["round"],
        shown(distance),
        shown(relative),
        shown(mean(look["mean_loss_difference"])),
        shown(mean(look["largest_loss_difference"])),
    )


def _folder(config: Config) -> Path:
    from fedflat.cli.experiments.run import RUNS, data_slug

    slug = re.sub(r"[^a-z0-9.]+", "-", config.algorithm.lower()).strip("-")
    return RUNS / f"stability-{slug}-{data_slug(config)}-seed{config.seed}"
