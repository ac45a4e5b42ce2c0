"""fedflat flatness clients: client drift, sharpness of client models, and forgetting."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.flags import OUT
from fedflat.cli.flatness.opening import heading_of, open_run
from fedflat.cli.flatness.output import (
    MAX_LISTED,
    known,
    mean,
    print_files,
    print_table,
    status_line,
    three_digits,
    write_results,
)
from fedflat.cli.shared.flags import JSON, MODEL, QUIET, RUN, SEED, no_default
from fedflat.cli.shared.screen import print_json, print_section, screen, shown_metric, table, with_unit

if TYPE_CHECKING:
    from fedflat.cli.shared.screen_table import ScreenTable

EXAMPLES = typer.Option(500, "--examples", metavar="N", min=1, help="maximum number of training examples")
CLIENTS = typer.Option(10, "--clients", metavar="N", min=1, help="number of clients to measure, drawn by the seed")


def clients(
    run: Path = RUN,
    client: list[int] = no_default(
        "--client", "client number, from 0; repeatable [dim](default: each round's cohort)[/dim]", [], metavar="I"
    ),
    variates: bool = typer.Option(False, "--variates", help="also list the norms of control variates and duals"),
    curvature: bool = typer.Option(
        True, "--curvature/--no-curvature", help="compute lambda_max of each client's model on its own data"
    ),
    model: str = MODEL,
    examples: int = EXAMPLES,
    sampled_clients: int = CLIENTS,
    seed: int = SEED,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Measure client drift and the sharpness of client models by retraining single rounds.

    A round can be retrained from the initial model, from the last checkpoint and, for algorithms without client state,
    from saved models (run --save-every N). Values logged during training (run --flatness every=N) are included.

    Example: fedflat flatness clients runs/fedavg-digits-seed0
    """
    from fedflat.reporting.figures.clients import clients_picture

    silent = quiet or as_json
    with status_line(silent) as progress:
        opened = open_run(run, silent, progress, examples=examples, clients=sampled_clients, seed=seed)
        opened.require_saved_rounds()
        if variates:
            opened.require_client_vectors()
        retrained, not_retrained = opened.clients(client or None, curvature)
        cohorts = sorted([*retrained, *opened.logged()], key=lambda cohort: (cohort["round"], cohort["source"]))
        evaluations, metric = opened.accuracies(model), opened.problem.task.metric
    heading, losses = heading_of(opened), class_forgetting(evaluations)
    document = {
        "run": str(run),
        "rounds": cohorts,
        "models": evaluations,
        "forgetting": losses,
        "not_trained_again": not_retrained,
    }
    picture = clients_picture(cohorts, evaluations, heading, metric)
    files = write_results(out or run / "flatness" / "clients", "clients", document, picture)
    if as_json:
        print_json({"files": files, **document})
        return
    print_table(heading, COLUMNS, [_cohort_row(cohort) for cohort in cohorts], text_columns=2)
    detailed = [cohort for cohort in cohorts if "cosine" in cohort]
    if detailed and (variates or len(detailed[-1]["clients"]) <= MAX_LISTED):
        print_section(f"Clients of round {detailed[-1]['round']}", _client_table(detailed[-1]))
    if losses:
        title = f"Classes over {len(evaluations)} evaluations of {model}, test {with_unit(metric)}"
        print_section(title, _class_table(evaluations[-1]["accuracy"]["classes"], losses, metric))
    if not_retrained:
        screen().print(f"\n{not_retrained[0].upper()}{not_retrained[1:]}.", style="dim", markup=False)
    print_files(files)


COLUMNS = (
    "round",
    "source",
    "clients",
    "mean update",
    "distance from it",
    "cosine",
    "lowest",
    "diversity",
    "lambda_max",
    "highest",
    "momentum",
)


def _cohort_row(cohort: dict[str, Any]) -> tuple[object, ...]:
    """Return the table row of a round: means over its clients, the lowest cosine and the highest curvature."""
    cosines = known(cohort.get("cosine"))
    curvatures = known(cohort.get("local", {}).get("lambda_max", {}).values())
    numbers = (
        cohort.get("update"),
        mean(cohort.get("distance")),
        mean(cosines),
        min(cosines, default=None),
        cohort.get("disagreement", {}).get("diversity"),
        median(curvatures) if curvatures else None,
        max(curvatures, default=None),
        mean(cohort.get("momentum", {}).get("agreement")),
    )
    return (cohort["round"], cohort["source"], len(cohort["clients"]), *map(three_digits, numbers))


def _client_table(cohort: dict[str, Any]) -> ScreenTable:
    """Return a table with one row per client of a round."""
    clients = [str(client) for client in cohort["clients"]]
    columns = {
        "length of update": cohort["length"],
        "distance from mean": cohort["distance"],
        "cosine": cohort["cosine"],
    }
    if "momentum" in cohort:
        columns["with momentum"] = cohort["momentum"]["agreement"]
    for name in ("lambda_max", "loss") if "local" in cohort else ():
        columns[name] = [cohort["local"][name].get(client) for client in clients]
    for name, norms in cohort.get("client_vectors", {}).items():
        columns[f"norm of {name}"] = norms
    rows = zip(clients, *(map(three_digits, values) for values in columns.values()), strict=True)
    return table(("client", *columns), rows, numeric=columns)


def class_forgetting(evaluations: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the forgetting of each class over the evaluations of a model; empty without two evaluations or classes.

    Returns:
        By class: ``lost`` (best minus last accuracy), ``swing`` (mean change) and ``lowest`` (after learning it).
    """
    from fedflat.flatness.clients.forgetting import forgetting

    if len(evaluations) < 2 or not evaluations[-1]["accuracy"]["classes"]:
        return {}
    names = list(evaluations[-1]["accuracy"]["classes"])
    accuracies = []
    for evaluation in evaluations:
        classes = evaluation["accuracy"]["classes"]
        accuracies.append([classes[name] or 0.0 for name in names])
    result = forgetting(accuracies)
    by_class = zip(names, result.lost, result.swing, result.lowest, strict=True)
    return {name: {"lost": lost, "swing": swing, "lowest": lowest} for name, lost, swing, lowest in by_class}


def _class_table(last: dict[str, float], losses: dict[str, dict[str, float]], metric: str) -> ScreenTable:
    """Return the last accuracy and the forgetting of the classes that were forgotten most, in class order."""
    columns = ("class", "last", "best minus last", "mean change", "lowest after learning")
    most_forgotten = sorted(losses, key=lambda name: -losses[name]["lost"])[:MAX_LISTED]
    rows = []
    for name, forgetting in losses.items():
        if name in most_forgotten:
            rows.append((name, *(shown_metric(value, metric) for value in (last[name], *forgetting.values()))))
    return table(columns, rows, numeric=columns[1:])
