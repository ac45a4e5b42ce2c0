"""fedflat flatness log: flatness measured while runs trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedflat.cli.flatness.common import OUT, OutputFlags, evenly_spaced, print_table, three_digits
from fedflat.cli.shared.completion import complete_run
from fedflat.cli.shared.flags import JSON, optional


def log(
    runs: list[Path] = typer.Argument(
        metavar="RUN...", help="folders of runs started with --flatness every=N", autocompletion=complete_run
    ),
    average: str | None = optional(
        "--average", "model to show: server, or an average", "the primary model", metavar="NAME"
    ),
    out: Path | None = OUT,
    as_json: bool = JSON,
) -> None:
    """Show flatness measured during training (run --flatness every=N): curvature, gap, drift and noise over rounds.

    Example: fedflat flatness log runs/fedavg-digits-seed0 runs/fedsam-digits-seed0
    """
    from fedflat.experiment.analysis.reopen import primary_model, require_model
    from fedflat.experiment.store.run_folder import load_record
    from fedflat.reporting.figures.flatness_log import log_picture, logged, sample_text

    logs, seconds, descriptions, examples = {}, {}, {}, {}
    document: dict[str, Any] = {"runs": {}}
    for run in dict.fromkeys(runs):  # a run that is listed twice is shown once
        record = load_record(run)
        model_name = primary_model(record) if average is None else require_model(record, average)
        name = f"{record.config.algorithm}, seed {record.config.seed}"
        if name in logs:
            name = f"{name} ({run})"
        logs[name], descriptions[name] = logged(record, model_name), f"{model_name} model"
        examples[name] = record.config.flatness.examples
        seconds[name] = record.folder.flatness_seconds() if record.folder else 0.0
        document["runs"][name] = {"run": str(run), "examples": examples[name], "log": logs[name]}
    figure = log_picture(logs, descriptions=descriptions)

    def show() -> None:
        for name, quantities in logs.items():
            # A quantity is a list of pairs (round, value); not every quantity was measured in every round.
            by_round = [dict(points) for points in quantities.values()]
            rounds = sorted(set().union(*by_round))
            rows = []
            for number in evenly_spaced(rounds):
                rows.append((number, *(three_digits(values.get(number)) for values in by_round)))
            note = f"{len(rounds)} measurements took {seconds[name]:.1f} s"
            subtitle = sample_text([examples[name]])
            print_table(name, ("round", *quantities), rows, note, text_columns=0, subtitle=subtitle)

    OutputFlags(out, as_json, quiet=True).publish(runs[0] / "flatness" / "log", document, show, figure)
