"""fedflat flatness gap, bounds: generalisation gaps of a run's models, and theoretical bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedflat.cli.flatness.clients import CLIENTS, EXAMPLES, MODEL, RUN, SEED, heading_of, open_run, shown
from fedflat.cli.flatness.flags import OUT, print_files, print_table, status_line, write_results
from fedflat.cli.shared.flags import JSON, QUIET
from fedflat.cli.shared.screen import print_json


def gap(
    run: Path = RUN,
    examples: int = typer.Option(10_000, "--examples", metavar="N", min=1, help="maximum number of training examples"),
    seed: int = SEED,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Compute the generalisation gap (test minus training loss) of every saved model, and the participation gap.

    Example: fedflat flatness gap runs/fedmoswa-digits-seed0
    """
    from fedflat.reporting.figures.clients import gap_picture

    with status_line(quiet or as_json) as progress:
        opened = open_run(run, quiet or as_json, progress, seed=seed)
        opened.sample.gap_examples = examples
        gaps, metric = opened.gaps(), opened.problem.task.metric
    heading, document = heading_of(opened), {"run": str(run), "models": gaps}
    files = write_results(out or run / "flatness" / "gap", "gap", document, gap_picture(gaps, heading))
    if as_json:
        print_json({"files": files, **document})
        return
    unseen = any("participation_gap" in row for rows in gaps.values() for row in rows)
    columns = ["model", "round", "training loss", "test loss", "gap", f"{metric} gap"] + [
        "unseen loss",
        "participation gap",
    ] * unseen
    keys = ["train_loss", "test_loss", "gap", f"{metric}_gap"] + ["unseen_loss", "participation_gap"] * unseen
    lines = [
        (name, row["round"], *(shown(row.get(key)) for key in keys)) for name, rows in gaps.items() for row in rows
    ]
    print_table(heading, columns, lines)
    print_files(files)


def bounds(
    run: Path = RUN,
    model: str = MODEL,
    examples: int = EXAMPLES,
    clients: int = CLIENTS,
    seed: int = SEED,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Estimate the constants of FedSWA's Theorem 5.1 along a run and evaluate its bounds.

    Example: fedflat flatness bounds runs/fedswa-digits-seed0
    """
    from fedflat.reporting.figures.clients import constants_picture

    with status_line(quiet or as_json) as progress:
        opened = open_run(run, quiet or as_json, progress, examples=examples, clients=clients, seed=seed)
        rounds = [*opened.constants(model), *(opened.logged_constants() if model == "server" else [])]
        rounds.sort(key=lambda point: point["round"])
        theory = opened.theory(rounds)
    heading, document = heading_of(opened), {"run": str(run), "rounds": rounds, **theory.document()}
    files = write_results(out or run / "flatness" / "bounds", "bounds", document, constants_picture(rounds, heading))
    if as_json:
        print_json({"files": files, **document})
        return
    columns = ("after round", "L", "beta", "sigma", "sigma_g", "gradient diversity")
    keys = ("lipschitz", "smoothness", "noise", "heterogeneity")
    rows = [
        (point["round"], *(shown(point["constants"][key]) for key in keys), shown(point["gradients"]["diversity"]))
        for point in rounds
    ]
    print_table(heading, columns, rows, text_columns=0)
    _print_bounds(document)
    print_files({**_premises(document), **files})


def _print_bounds(document: dict[str, Any]) -> None:
    from fedflat.experiment.analysis.theory import TITLES

    heading = "Bounds on the generalisation error, Theorem 5.1 (FedSAM: Theorem I.3), with the largest constants"
    columns = ("algorithm", "as stated", "tightened", "with the run's learning rates")
    kinds = ("as_printed", "tightened", "at_own_rates")
    rows = [(title, *(_bound(document[kind][name]) for kind in kinds)) for name, title in TITLES.items()]
    print_table(heading, columns, rows)


def _bound(bound: dict[str, Any]) -> str:
    value = (
        f"{bound['value']:.3g}" if bound["value"] is not None and bound["value"] < 1e6 else f"10^{bound['log10']:.1f}"
    )
    return f"{value} (vacuous)" if bound["vacuous"] else value


def _premises(document: dict[str, Any]) -> dict[str, object]:
    setting = document["setting"]
    premises: dict[str, object] = {
        "federation": f"m={setting['clients']} clients, n={setting['examples']:.4g} examples, "
        f"K={setting['steps']:.4g} steps (means over clients), T={setting['rounds']} rounds",
        "vacuous": f"at least {document['trivial']:.3g}, the loss of random guessing",
    }
    for condition in document["conditions"]:
        premises[condition["condition"]] = f"{'met' if condition['met'] else 'not met'}: {condition['here']}"
    return premises
