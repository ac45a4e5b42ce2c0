"""fedflat flatness clients: where the clients of a run go, how sharp their models are, what the server's model forgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.flags import OUT, told
from fedflat.cli.shared.flags import JSON, QUIET
from fedflat.cli.shared.screen import facts, print_json, screen, shown_metric, table, with_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedflat.experiment.analysis.post_hoc import Afterwards

RUN = typer.Argument(metavar="RUN", help="the folder of a run")
EXAMPLES = typer.Option(500, "--examples", metavar="N", min=1, help="look at so many training examples at most")
CLIENTS = typer.Option(
    10, "--clients", metavar="N", min=1, help="look at the data of so many clients, drawn by the seed"
)
MODEL = typer.Option(
    "server", "--model", metavar="NAME", help="whose accuracies, features or constants, for example wima"
)
SEED = typer.Option(0, "--seed", min=0, help="seed of what is drawn at random")
LISTED = 20
"""Clients and classes are listed one by one where there are no more of them than this."""


def looked_at(run: Path, silent: bool, progress: Any, **wanted: Any) -> Afterwards:
    """A run to be looked at, its data fetched beforehand where they are not here."""
    from fedflat.cli.shared.downloads import fetch_if_missing
    from fedflat.experiment.analysis.post_hoc import afterwards
    from fedflat.experiment.store.record import load_record

    record = load_record(run)
    fetch_if_missing(record.config, silent)
    return afterwards(record, progress=progress, **wanted)


def heading_of(look: Afterwards) -> str:
    """A run in a few words."""
    return f"{look.config.algorithm}   {look.config.data.dataset}, seed {look.config.seed}"


def write(folder: Path, name: str, document: dict[str, Any], picture: Figure) -> dict[str, Path]:
    """Put numbers and a picture into a folder; says where they are."""
    from fedflat.cli.shared.one_run import write_figure
    from fedflat.experiment.store.atomic_files import create_folder, write_whole

    files = {"numbers": folder / f"{name}.json", "picture": folder / f"{name}.png"}
    create_folder(folder)
    write_whole(files["numbers"], json.dumps(document, indent=2, default=str) + "\n")
    write_figure(picture, files["picture"])
    return files


def clients(
    run: Path = RUN,
    client: list[int] = typer.Option(
        [],
        "--client",
        metavar="I",
        help="these clients, counted from 0 [dim](default: each round's cohort)[/dim]",
        show_default=False,
    ),
    variates: bool = typer.Option(
        False, "--variates", help="also list the control variates and duals that clients keep"
    ),
    curvature: bool = typer.Option(
        True, "--curvature/--no-curvature", help="lambda_max of each client's model on its own data"
    ),
    model: str = MODEL,
    examples: int = EXAMPLES,
    most: int = CLIENTS,
    seed: int = SEED,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Where clients go and how sharp their models are, by training kept rounds again; accuracies and features of the server's model.

    A round can be trained again from the start, from the last checkpoint, and from models kept on the way (run --save-every N) where an
    algorithm keeps no vectors. What a run logged itself (run --flatness every=N) is shown beside it.

    Example: fedflat flatness clients runs/fedavg-digits-seed0
    """
    from fedflat.reporting.figures.clients import clients_picture

    with told(quiet or as_json) as progress:
        look = looked_at(run, quiet or as_json, progress, examples=examples, clients=most, seed=seed)
        look.require_something()
        if variates:
            look.require_vectors()
        again, why = look.clients(client or None, curvature)
        cohorts = sorted([*again, *look.logged()], key=lambda one: (one["round"], one["source"]))
        seen, metric = look.seen(model), look.problem.task.metric
    heading, lost = heading_of(look), forgotten(seen)
    document = {"run": str(run), "rounds": cohorts, "models": seen, "forgetting": lost, "not_trained_again": why}
    files = write(
        out or run / "flatness" / "clients", "clients", document, clients_picture(cohorts, seen, heading, metric)
    )
    if as_json:
        print_json({"files": files, **document})
        return
    console = screen()
    console.print(f"\n{heading}\n", style="bold", markup=False)
    console.print(table(COLUMNS, [_row(one) for one in cohorts], numbers=COLUMNS[2:]))
    last = next((one for one in reversed(cohorts) if "cosine" in one), None)
    if last is not None and (variates or len(last["clients"]) <= LISTED):
        console.print(f"\nClients of round {last['round']}", style="bold")
        console.print(_each(last))
    if lost:
        name = "server's model" if model == "server" else f"model {model}"
        console.print(f"\nClasses over {len(seen)} looks at the {name}, test {with_unit(metric)}", style="bold")
        console.print(_classes(seen, lost, metric))
    console.print()
    if why:
        console.print(f"{why[0].upper()}{why[1:]}.", style="dim", markup=False)
    console.print(facts(files))


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


def _row(one: dict[str, Any]) -> tuple[object, ...]:
    curvature = list(one.get("local", {}).get("lambda_max", {}).values())
    return (
        one["round"],
        one["source"],
        len(one["clients"]),
        shown(one.get("update")),
        shown(mean(one.get("distance"))),
        shown(mean(one.get("cosine"))),
        shown(lowest(one.get("cosine"))),
        shown(one.get("disagreement", {}).get("diversity")),
        shown(median(curvature)),
        shown(None if not known(curvature) else max(known(curvature))),
        shown(mean(one.get("momentum", {}).get("agreement"))),
    )


def _each(one: dict[str, Any]) -> Any:
    """A line for each client of a round."""
    columns = {"length of update": one["length"], "distance from mean": one["distance"], "cosine": one["cosine"]}
    numbers = [str(client) for client in one["clients"]]
    if "momentum" in one:
        columns["with momentum"] = one["momentum"]["agreement"]
    if "local" in one:
        columns |= {name: [one["local"][name].get(client) for client in numbers] for name in ("lambda_max", "loss")}
    columns |= {f"norm of {name}": norms for name, norms in one.get("client_vectors", {}).items()}
    rows = [(client, *(shown(values[place]) for values in columns.values())) for place, client in enumerate(numbers)]
    return table(("client", *columns), rows, numbers=tuple(columns))


def forgotten(seen: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What the server's model lost of each class, from look to look; nothing for fewer than two looks."""
    from fedflat.flatness.clients.forgetting import forgetting

    if len(seen) < 2:
        return {}
    names = list(seen[-1]["accuracy"]["classes"])
    found = forgetting([[one["accuracy"]["classes"][name] or 0.0 for name in names] for one in seen])
    triples = zip(names, found.lost, found.swing, found.lowest, strict=True)
    return {name: {"lost": lost, "swing": swing, "lowest": low} for name, lost, swing, low in triples}


def _classes(seen: list[dict[str, Any]], lost: dict[str, dict[str, float]], metric: str) -> Any:
    columns = ("class", "last", "best before, less last", "mean swing", "lowest once known")
    last = seen[-1]["accuracy"]["classes"]
    worst = sorted(lost, key=lambda name: -lost[name]["lost"])[:LISTED]
    rows = [
        (name, *(shown_metric(value, metric) for value in (last[name], *lost[name].values())))
        for name in lost
        if name in worst
    ]
    return table(columns, rows, numbers=columns[1:])


# --- numbers ---------------------------------------------------------------------------------------------------------------------


def known(values: Any) -> list[float]:
    """The values that are there."""
    return [value for value in values or [] if value is not None]


def mean(values: Any) -> float | None:
    """The mean of the values that are there."""
    return sum(known(values)) / len(known(values)) if known(values) else None


def lowest(values: Any) -> float | None:
    """The lowest of the values that are there."""
    return min(known(values), default=None)


def median(values: Any) -> float | None:
    """The median of the values that are there."""
    import statistics

    return statistics.median(known(values)) if known(values) else None


def shown(value: float | None) -> str | None:
    """A number to three digits."""
    return None if value is None else f"{value:.3g}"
