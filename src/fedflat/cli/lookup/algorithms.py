"""fedflat algorithms: list and describe algorithms."""

from __future__ import annotations

from typing import Any

import typer

from fedflat.cli.shared.flags import JSON, algorithm_names
from fedflat.cli.shared.screen import facts, print_json, screen, table


def algorithms(
    name: str | None = typer.Argument(
        None,
        metavar="NAME",
        help="algorithm to describe, e.g. fedmoswa+asam(rho=0.3)",
        show_default=False,
        autocompletion=algorithm_names,
    ),
    as_json: bool = JSON,
) -> None:
    """List algorithms and parts, or describe one: equations, parameters, state and cost.

    Example: fedflat algorithms 'fedmoswa+asam(rho=0.3)'
    """
    if name is None:
        _list(as_json)
    else:
        _describe(name, as_json)


def _list(as_json: bool) -> None:
    from fedflat.algorithms.algorithm import SLOTS
    from fedflat.algorithms.composition import load_installed
    from fedflat.algorithms.named import NAMED

    load_installed()
    lines, parts = [_line(name) for name in NAMED], _parts()
    if as_json:
        print_json({"algorithms": lines, "parts": parts})
        return
    columns = ("name", *SLOTS, "down", "up", "passes", "paper")
    rows = [{**line, "passes": f"{line['passes']}{'*' if line['full_gradient'] else ' '}"} for line in lines]
    console = screen()
    console.print(table(columns, ([row[name] for name in columns] for row in rows), numbers=("down", "up", "passes")))
    console.print()
    console.print(
        "down, up: values sent per client and round for P parameters; passes: backward passes per local step;",
        style="dim",
    )
    console.print("* plus one pass over the client's data per round.", style="dim")
    console.print()
    console.print("Parts, to be added with +", style="bold")
    console.print(table(("part", "slot", "what it does"), (part.values() for part in parts)))
    console.print()
    console.print("Details: fedflat algorithms NAME", style="dim")


def _line(name: str) -> dict[str, Any]:
    from fedflat.algorithms.algorithm import SLOTS
    from fedflat.algorithms.named import CARDS, NAMED
    from fedflat.cli.lookup.algorithm_card import cost_of, slot_texts

    slots, paper = slot_texts(NAMED[name]), CARDS[name].paper if name in CARDS else None
    return {"name": name, **{slot: slots.get(slot) for slot in SLOTS}, **cost_of(NAMED[name]), "paper": paper}


def _parts() -> list[dict[str, Any]]:
    from fedflat.algorithms.composition import parts
    from fedflat.cli.lookup.algorithm_card import equations

    slots = {"averages": "average"}
    return [
        {"part": name, "slot": slots.get(slot, slot), "summary": equations(spec).split("\n")[0]}
        for name, (slot, spec) in parts().items()
    ]


def _describe(text: str, as_json: bool) -> None:
    from fedflat.algorithms import algorithm, canonical
    from fedflat.cli.lookup.algorithm_card import SECTIONS, named_base

    made = algorithm(text)
    base = named_base(made)
    found = {section.key: section.facts(made, base) for section in SECTIONS}
    if as_json:
        print_json({"name": canonical(made), "algorithm": base, **found})
        return
    console = screen()
    console.print()
    console.print(canonical(made), style="bold")
    for section in SECTIONS:
        content = found[section.key]
        if not content:
            continue
        console.print()
        console.print(section.title, style="bold")
        if isinstance(content, list):
            console.print(table(content[0], (line.values() for line in content), numbers=("value", "default")))
        else:
            console.print(facts(content))
