"""fedflat flatness gap, bounds: what a run's models lose on new data, and what theorems say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedflat.cli.flatness.clients import CLIENTS, EXAMPLES, MODEL, RUN, SEED, heading_of, looked_at, shown, write
from fedflat.cli.flatness.flags import OUT, told
from fedflat.cli.shared.flags import JSON, QUIET
from fedflat.cli.shared.screen import facts, print_json, screen, table


def gap(
    run: Path = RUN,
    examples: int = typer.Option(
        10_000, "--examples", metavar="N", min=1, help="training loss on so many of the clients' examples at most"
    ),
    seed: int = SEED,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """The generalisation gap of every model that a run kept: test less training loss, and unseen less training clients where there are any.

    Example: fedflat flatness gap runs/fedmoswa-digits-seed0
    """
    from fedflat.reporting.figures.clients import gap_picture

    with told(quiet or as_json) as progress:
        look = looked_at(run, quiet or as_json, progress, seed=seed)
        look.look.gap_examples = examples
        found, metric = look.gaps(), look.problem.task.metric
    heading, document = heading_of(look), {"run": str(run), "models": found}
    files = write(out or run / "flatness" / "gap", "gap", document, gap_picture(found, heading))
    if as_json:
        print_json({"files": files, **document})
        return
    unseen = any("participation_gap" in one for looks in found.values() for one in looks)
    columns = ["model", "round", "training loss", "test loss", "gap", f"{metric} gap"] + [
        "unseen loss",
        "participation gap",
    ] * unseen
    keys = ["train_loss", "test_loss", "gap", f"{metric}_gap"] + ["unseen_loss", "participation_gap"] * unseen
    rows = [
        (name, one["round"], *(shown(one.get(key)) for key in keys)) for name, looks in found.items() for one in looks
    ]
    console = screen()
    console.print(f"\n{heading}\n", style="bold", markup=False)
    console.print(table(columns, rows, numbers=columns[1:]))
    console.print()
    console.print(facts(files))


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
    """The constants of the FedSWA theorems along a run, and the bounds of Theorem 5.1 with them, for FedSAM, FedSWA and FedMoSWA.

    Example: fedflat flatness bounds runs/fedswa-digits-seed0
    """
    from fedflat.reporting.figures.clients import constants_picture

    with told(quiet or as_json) as progress:
        look = looked_at(run, quiet or as_json, progress, examples=examples, clients=clients, seed=seed)
        looks = [*look.constants(model), *(look.logged_constants() if model == "server" else [])]
        looks.sort(key=lambda one: one["round"])
        found = look.theory(looks)
    heading, document = heading_of(look), {"run": str(run), "rounds": looks, **found.document()}
    files = write(out or run / "flatness" / "bounds", "bounds", document, constants_picture(looks, heading))
    if as_json:
        print_json({"files": files, **document})
        return
    console = screen()
    console.print(f"\n{heading}\n", style="bold", markup=False)
    columns = ("after round", "L", "beta", "sigma", "sigma_g", "diversity of gradients")
    keys = ("lipschitz", "smoothness", "noise", "heterogeneity")
    rows = [
        (one["round"], *(shown(one["constants"][key]) for key in keys), shown(one["gradients"]["diversity"]))
        for one in looks
    ]
    console.print(table(columns, rows, numbers=columns))
    console.print(
        "\nBounds on the generalisation error, Theorem 5.1 (FedSAM: Theorem I.3), with the largest of each",
        style="bold",
    )
    _print_bounds(document)
    console.print()
    console.print(facts({**_premises(document), **files}))


def _print_bounds(document: dict[str, Any]) -> None:
    from fedflat.experiment.analysis.theory import TITLES

    columns = ("algorithm", "as printed", "tightened", "at the run's own rates")
    kinds = ("as_printed", "tightened", "at_own_rates")
    rows = [(title, *(_bound(document[kind][name]) for kind in kinds)) for name, title in TITLES.items()]
    screen().print(table(columns, rows, numbers=columns[1:]))


def _bound(one: dict[str, Any]) -> str:
    value = f"{one['value']:.3g}" if one["value"] is not None and one["value"] < 1e6 else f"10^{one['log10']:.1f}"
    return f"{value} (vacuous)" if one["vacuous"] else value


def _premises(document: dict[str, Any]) -> dict[str, object]:
    setting = document["setting"]
    found: dict[str, object] = {
        "federation": f"m={setting['clients']} clients, n={setting['examples']:.4g} examples, "
        f"K={setting['steps']:.4g} steps (means over clients), T={setting['rounds']} rounds",
        "vacuous": f"at or above {document['trivial']:.3g}, the loss of guessing",
    }
    for one in document["conditions"]:
        found[one["condition"]] = f"{'met' if one['met'] else 'not met'}: {one['here']}"
    return found
