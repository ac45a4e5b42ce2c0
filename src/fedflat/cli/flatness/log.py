"""fedflat flatness log: what runs logged about flatness while they trained."""

from __future__ import annotations

from pathlib import Path

import typer

from fedflat.cli.flatness.clients import LISTED, shown, write
from fedflat.cli.flatness.flags import OUT
from fedflat.cli.shared.flags import JSON, optional
from fedflat.cli.shared.screen import facts, print_json, screen, table


def log(
    runs: list[Path] = typer.Argument(metavar="RUN...", help="folders of runs that trained with --flatness every=N"),
    model: str | None = optional("--model", "which of their models", "the one that stands for the run", metavar="NAME"),
    out: Path | None = OUT,
    as_json: bool = JSON,
) -> None:
    """What runs logged while they trained (run --flatness every=N): curvature, gap, drift, noise over rounds, one run beside another.

    Example: fedflat flatness log runs/fedavg-digits-seed0 runs/fedsam-digits-seed0
    """
    from fedflat.experiment.analysis.reopen import primary_model, require_model
    from fedflat.experiment.store.record import load_record
    from fedflat.reporting.figures.flatness_log import log_picture, logged

    found, seconds = {}, {}
    for run in runs:
        record = load_record(run)
        chosen = primary_model(record) if model is None else require_model(record, model)
        name = f"{record.config.algorithm}, seed {record.config.seed}"
        label = name if name not in found else f"{name} ({run})"
        found[label] = logged(record, chosen)
        seconds[label] = record.folder.flatness_seconds() if record.folder else 0.0
    document = {"runs": {name: {"run": str(run), "log": found[name]} for name, run in zip(found, runs, strict=True)}}
    files = write(out or runs[0] / "flatness" / "log", "log", document, log_picture(found))
    if as_json:
        print_json({"files": files, **document})
        return
    console = screen()
    for name, quantities in found.items():
        rounds = sorted({rounds for points in quantities.values() for rounds, _ in points})
        step = -(-len(rounds) // LISTED)
        values = {quantity: dict(points) for quantity, points in quantities.items()}
        kept = [rounds_done for place, rounds_done in enumerate(rounds) if (len(rounds) - 1 - place) % step == 0]
        rows = [(at, *(shown(values[quantity].get(at)) for quantity in quantities)) for at in kept]
        console.print(f"\n{name}\n", style="bold", markup=False)
        console.print(table(("round", *quantities), rows, numbers=("round", *quantities)))
        console.print(f"{len(rounds)} looks took {seconds[name]:.1f} s.", style="dim")
    console.print()
    console.print(facts(files))
