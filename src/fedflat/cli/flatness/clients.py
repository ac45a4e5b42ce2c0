"""fedflat flatness clients: client drift, sharpness of client models, and forgetting."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.common import (
    MAX_LISTED,
    OutputFlags,
    heading_of,
    known,
    mean,
    open_run,
    print_table,
    three_digits,
)
from fedflat.cli.shared.flags import AVERAGE, RUN, SEED, no_default, with_flag_groups
from fedflat.cli.shared.screen import print_section, screen, shown_metric, status_line, table, with_unit

if TYPE_CHECKING:
    from fedflat.cli.shared.screen_table import ScreenTable

EXAMPLES = typer.Option(500, "--examples", metavar="N", min=1, help="maximum number of training examples")
CLIENTS = typer.Option(10, "--clients", metavar="N", min=1, help="number of clients to measure, drawn by the seed")


@with_flag_groups
def clients(
    run: Path = RUN,
    client: list[int] = no_default(
        "--client",
        "client numbers, from 0; comma-separated or repeated [dim](default: each round's cohort)[/dim]",
        [],
        metavar="I,...",
    ),
    variates: bool = typer.Option(False, "--variates", help="also list the norms of control variates and duals"),
    curvature: bool = typer.Option(
        True, "--curvature/--no-curvature", help="compute lambda_max of each client's model on its own data"
    ),
    average: str = AVERAGE,
    examples: int = EXAMPLES,
    sampled_clients: int = CLIENTS,
    seed: int = SEED,
    *,
    output: OutputFlags,
) -> None:
    """Measure client drift and the sharpness of client models by retraining single rounds.

    A round can be retrained from the initial model, from the last checkpoint and, for algorithms without client state,
    from saved models (run --save-every N). Values logged during training (run --flatness every=N) are included.

    Example: fedflat flatness clients runs/fedavg-digits-seed0
    """
    from fedflat.reporting.figures.clients import clients_picture

    with status_line(output.silent) as progress:
        opened = open_run(run, output.silent, progress, examples=examples, clients=sampled_clients, seed=seed)
        opened.require_saved_rounds()
        if variates:
            opened.require_client_vectors()
        retrained, why_not_all = opened.clients(client or None, curvature)  # None: the cohort of each round
        cohorts = sorted([*retrained, *opened.logged()], key=lambda cohort: (cohort["round"], cohort["source"]))
        evaluations, metric = opened.accuracies(average), opened.problem.task.metric
    heading, forgetting = heading_of(opened), class_forgetting(evaluations)
    document = {
        "run": str(run),
        "rounds": cohorts,
        "models": evaluations,
        "forgetting": forgetting,
        "not_trained_again": why_not_all,
    }
    title = f"{heading}; heat maps: {average} model"
    picture = clients_picture(cohorts, evaluations, title, metric, opened.config.algorithm)

    def show() -> None:
        print_table(heading, COLUMNS, [_cohort_row(cohort) for cohort in cohorts], text_columns=2)
        with_drift = [cohort for cohort in cohorts if "cosine" in cohort]
        if with_drift and (variates or len(with_drift[-1]["clients"]) <= MAX_LISTED):
            print_section(f"Clients of round {with_drift[-1]['round']}", _client_table(with_drift[-1]))
        if forgetting:
            title = f"Classes over {len(evaluations)} evaluations of {average}, test {with_unit(metric)}"
            last_accuracies = evaluations[-1]["accuracy"]["classes"]
            print_section(title, _class_table(last_accuracies, forgetting, metric))
        if why_not_all:
            screen().print(f"\n{why_not_all[0].upper()}{why_not_all[1:]}.", style="dim")

    output.publish(run / "flatness" / "clients", document, show, picture)


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
"""Columns of the table of rounds; "lowest" and "highest" are extremes over clients of the column before."""


def _cohort_row(cohort: dict[str, Any]) -> tuple[object, ...]:
    """Return the row ``COLUMNS`` of a round: drift and curvature of its clients, with means and extreme values.

    Values that were not measured are None, which the table shows as a dash.
    """
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
    """Return a table with one row per client of a round: its update, its agreement with others, its local model."""
    clients = [str(client) for client in cohort["clients"]]
    columns = {
        "norm of update": cohort["length"],
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
    """Measure how much a model forgets each class between its evaluations over the rounds of a run.

    Returns:
        By class: ``lost`` (best earlier minus last accuracy), ``swing`` (mean absolute change between evaluations) and
        ``lowest`` (lowest accuracy after it first reached half of its best). Empty if the task has no classes or
        there are fewer than two evaluations.
    """
    from fedflat.flatness.clients import forgetting

    if len(evaluations) < 2 or not evaluations[-1]["accuracy"]["classes"]:
        return {}
    names = list(evaluations[-1]["accuracy"]["classes"])
    accuracies = []
    for evaluation in evaluations:
        classes = evaluation["accuracy"]["classes"]
        accuracies.append([classes[name] or 0.0 for name in names])  # None: the metric was not finite
    result = forgetting(accuracies)
    by_class = zip(names, result.lost, result.swing, result.lowest, strict=True)
    return {name: {"lost": lost, "swing": swing, "lowest": lowest} for name, lost, swing, lowest in by_class}


def _class_table(
    last_accuracies: dict[str, float], forgetting: dict[str, dict[str, float]], metric: str
) -> ScreenTable:
    """Return a table of the classes that were forgotten most, in class order.

    Args:
        last_accuracies: accuracy in the last evaluation, by class.
        forgetting: measures of each class, from ``class_forgetting``.
        metric: name of the metric, which determines the format.
    """
    columns = ("class", "last", "best earlier minus last", "mean change", "lowest after learning")
    most_forgotten = sorted(forgetting, key=lambda name: -forgetting[name]["lost"])[:MAX_LISTED]
    rows = []
    for name, measures in forgetting.items():
        if name in most_forgotten:
            values = (last_accuracies[name], measures["lost"], measures["swing"], measures["lowest"])
            rows.append((name, *(shown_metric(value, metric) for value in values)))
    return table(columns, rows, numeric=columns[1:])
