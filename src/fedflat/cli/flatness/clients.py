"""fedflat flatness clients: client drift, sharpness of client models, and forgetting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.flags import LISTED, OUT, print_files, print_table, status_line, write_results
from fedflat.cli.shared.flags import JSON, QUIET
from fedflat.cli.shared.screen import print_json, screen, shown_metric, table, with_unit

if TYPE_CHECKING:
    from fedflat.experiment.analysis.post_hoc import PostHoc

RUN = typer.Argument(metavar="RUN", help="the folder of a run")
EXAMPLES = typer.Option(500, "--examples", metavar="N", min=1, help="maximum number of training examples")
CLIENTS = typer.Option(10, "--clients", metavar="N", min=1, help="number of clients to measure, drawn by the seed")
MODEL = typer.Option("server", "--model", metavar="NAME", help="model to measure, e.g. wima")
SEED = typer.Option(0, "--seed", min=0, help="random seed")


def open_run(run: Path, silent: bool, progress: Any, **options: Any) -> PostHoc:
    """Open a run for post-hoc measurements; downloads a missing dataset first."""
    from fedflat.cli.shared.downloads import fetch_if_missing
    from fedflat.experiment.analysis.post_hoc import post_hoc
    from fedflat.experiment.store.run_folder import load_record

    record = load_record(run)
    fetch_if_missing(record.config, silent)
    return post_hoc(record, progress=progress, **options)


def heading_of(opened: PostHoc) -> str:
    """Algorithm, dataset and seed of a run."""
    return f"{opened.config.algorithm}   {opened.config.data.dataset}, seed {opened.config.seed}"


def clients(
    run: Path = RUN,
    client: list[int] = typer.Option(
        [],
        "--client",
        metavar="I",
        help="client number, from 0; repeatable [dim](default: each round's cohort)[/dim]",
        show_default=False,
    ),
    variates: bool = typer.Option(False, "--variates", help="also list the norms of control variates and duals"),
    curvature: bool = typer.Option(
        True, "--curvature/--no-curvature", help="compute lambda_max of each client's model on its own data"
    ),
    model: str = MODEL,
    examples: int = EXAMPLES,
    most: int = CLIENTS,
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

    with status_line(quiet or as_json) as progress:
        opened = open_run(run, quiet or as_json, progress, examples=examples, clients=most, seed=seed)
        opened.require_saved_rounds()
        if variates:
            opened.require_client_vectors()
        retrained, why = opened.clients(client or None, curvature)
        cohorts = sorted([*retrained, *opened.logged()], key=lambda cohort: (cohort["round"], cohort["source"]))
        seen, metric = opened.accuracies(model), opened.problem.task.metric
    heading, lost = heading_of(opened), forgotten(seen)
    document = {"run": str(run), "rounds": cohorts, "models": seen, "forgetting": lost, "not_trained_again": why}
    files = write_results(
        out or run / "flatness" / "clients", "clients", document, clients_picture(cohorts, seen, heading, metric)
    )
    if as_json:
        print_json({"files": files, **document})
        return
    console = screen()
    print_table(heading, COLUMNS, [_row(cohort) for cohort in cohorts], text_columns=2)
    last = next((cohort for cohort in reversed(cohorts) if "cosine" in cohort), None)
    if last is not None and (variates or len(last["clients"]) <= LISTED):
        console.print(f"\nClients of round {last['round']}", style="bold")
        console.print(_each(last))
    if lost:
        console.print(f"\nClasses over {len(seen)} evaluations of {model}, test {with_unit(metric)}", style="bold")
        console.print(_classes(seen, lost, metric))
    if why:
        console.print(f"\n{why[0].upper()}{why[1:]}.", style="dim", markup=False)
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


def _row(cohort: dict[str, Any]) -> tuple[object, ...]:
    curvature = list(cohort.get("local", {}).get("lambda_max", {}).values())
    return (
        cohort["round"],
        cohort["source"],
        len(cohort["clients"]),
        shown(cohort.get("update")),
        shown(mean(cohort.get("distance"))),
        shown(mean(cohort.get("cosine"))),
        shown(lowest(cohort.get("cosine"))),
        shown(cohort.get("disagreement", {}).get("diversity")),
        shown(median(curvature)),
        shown(None if not known(curvature) else max(known(curvature))),
        shown(mean(cohort.get("momentum", {}).get("agreement"))),
    )


def _each(cohort: dict[str, Any]) -> Any:
    """One line per client of a round."""
    columns = {
        "length of update": cohort["length"],
        "distance from mean": cohort["distance"],
        "cosine": cohort["cosine"],
    }
    numbers = [str(client) for client in cohort["clients"]]
    if "momentum" in cohort:
        columns["with momentum"] = cohort["momentum"]["agreement"]
    if "local" in cohort:
        columns |= {name: [cohort["local"][name].get(client) for client in numbers] for name in ("lambda_max", "loss")}
    columns |= {f"norm of {name}": norms for name, norms in cohort.get("client_vectors", {}).items()}
    rows = [(client, *(shown(values[place]) for values in columns.values())) for place, client in enumerate(numbers)]
    return table(("client", *columns), rows, numbers=tuple(columns))


def forgotten(seen: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Forgetting of each class over the evaluated models; empty for fewer than two."""
    from fedflat.flatness.clients.forgetting import forgetting

    if len(seen) < 2:
        return {}
    names = list(seen[-1]["accuracy"]["classes"])
    forgotten = forgetting([[model["accuracy"]["classes"][name] or 0.0 for name in names] for model in seen])
    triples = zip(names, forgotten.lost, forgotten.swing, forgotten.lowest, strict=True)
    return {name: {"lost": lost, "swing": swing, "lowest": low} for name, lost, swing, low in triples}


def _classes(seen: list[dict[str, Any]], lost: dict[str, dict[str, float]], metric: str) -> Any:
    columns = ("class", "last", "best minus last", "mean change", "lowest after learning")
    last = seen[-1]["accuracy"]["classes"]
    worst = sorted(lost, key=lambda name: -lost[name]["lost"])[:LISTED]
    rows = [
        (name, *(shown_metric(value, metric) for value in (last[name], *lost[name].values())))
        for name in lost
        if name in worst
    ]
    return table(columns, rows, numbers=columns[1:])


def known(values: Any) -> list[float]:
    """The values that are not None."""
    return [value for value in values or [] if value is not None]


def mean(values: Any) -> float | None:
    """The mean of the known values."""
    return sum(known(values)) / len(known(values)) if known(values) else None


def lowest(values: Any) -> float | None:
    """The smallest known value."""
    return min(known(values), default=None)


def median(values: Any) -> float | None:
    """The median of the known values."""
    import statistics

    return statistics.median(known(values)) if known(values) else None


def shown(value: float | None) -> str | None:
    """A number with three significant digits."""
    return None if value is None else f"{value:.3g}"
