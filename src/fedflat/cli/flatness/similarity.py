"""fedflat flatness similarity: clients' models compared with the server model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from fedflat.cli.flatness.common import OutputFlags, evenly_spaced, mean, print_table, three_digits
from fedflat.cli.flatness.models import BATCH, DEVICE, EXAMPLES, PRECISION, ModelFlags, default_folder, open_models
from fedflat.cli.shared.completion import complete_run
from fedflat.cli.shared.flags import SEED, no_default, with_flag_groups
from fedflat.cli.shared.screen import status_line

COLUMNS = {
    "overlap_at_server": "overlap at the server model",
    "overlap": "overlap at the client's model",
    "cka": "CKA of features",
}
"""Measures of a client and their titles."""


@with_flag_groups
def similarity(
    run: Path = typer.Argument(
        metavar="RUN", help="folder of a run, or RUN:server@50 for a saved round", autocompletion=complete_run
    ),
    client: list[int] = no_default(
        "--client",
        "client numbers, from 0; comma-separated or repeated [dim](default: the next round's cohort)[/dim]",
        [],
        metavar="I,...",
    ),
    eigenvectors: int = typer.Option(10, "--eigenvectors", metavar="K", min=1, help="dimension of the eigenspaces"),
    examples: int | None = EXAMPLES,
    seed: int = SEED,
    batch_size: int | None = BATCH,
    device: str = DEVICE,
    precision: str | None = PRECISION,
    *,
    output: OutputFlags,
) -> None:
    """Compare clients with the server model: overlap of top eigenspaces, and CKA of features.

    It replays the round that follows the server model to obtain the clients' models.

    Example: fedflat flatness similarity runs/fedavg-digits-seed0 --eigenvectors 10 --examples 500
    """
    from fedflat.experiment.analysis.reopen import parse_reference
    from fedflat.experiment.analysis.similarity import client_similarity

    reference = parse_reference(str(run))
    text = str(replace(reference, model=reference.model or "server"))
    with status_line(output.silent) as progress:
        opened = open_models([text], output.silent, ModelFlags(device, precision, None, None, None))
        (server,) = opened.values()
        clients = client_similarity(
            server,
            client or None,
            eigenvectors=eigenvectors,
            examples=examples,
            batch_size=batch_size,
            seed=seed,
            progress=progress,
        )
    expected = eigenvectors / server.problem.layout.size
    document = {"model": server.label, "eigenvectors": eigenvectors, "expected_of_random": expected, "clients": clients}

    def show() -> None:
        rows = [(row["client"], *(three_digits(row[name]) for name in COLUMNS)) for row in evenly_spaced(clients)]
        rows.append(("mean", *(three_digits(mean(row[name] for row in clients)) for name in COLUMNS)))
        note = f"overlap of the top {eigenvectors} eigenvectors with those of the global loss; random: {expected:.2g}"
        print_table(f"Clients of {server.label}, {server.description}", ("client", *COLUMNS.values()), rows, note)

    output.publish(default_folder(opened, "similarity"), document, show)
