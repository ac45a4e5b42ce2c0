"""fedflat algorithms: list and describe algorithms."""

from __future__ import annotations

from typing import Any

import typer

from fedflat.cli.shared.completion import complete_algorithm
from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import key_values, print_json, print_section, screen, table


def algorithms(
    name: str | None = typer.Argument(
        None,
        metavar="NAME",
        help="algorithm to describe, e.g. fedmoswa+asam(rho=0.3)",
        show_default=False,
        autocompletion=complete_algorithm,
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
    """Print all named algorithms with their parts and cost, and all parts."""
    from fedflat.algorithms.algorithm import SLOTS
    from fedflat.algorithms.composition import load_installed
    from fedflat.algorithms.named import NAMED

    load_installed()
    summaries, parts = [_summarise(name) for name in NAMED], _parts()
    if as_json:
        print_json({"algorithms": summaries, "parts": parts})
        return
    columns = ("name", "parts", "down", "up", "passes", "paper")
    rows = []
    for summary in summaries:
        parts_of_algorithm = " + ".join(summary[slot] for slot in SLOTS if summary[slot]) or None
        passes = f"{summary['passes']}{'*' if summary['full_gradient'] else ' '}"
        cells = summary | {"parts": parts_of_algorithm, "passes": passes}
        rows.append([cells[column] for column in columns])
    console = screen()
    console.print(table(columns, rows, numeric=("down", "up", "passes")))
    console.print(
        "\ndown, up: values sent per client and round for P parameters; passes: backward passes per local step;\n"
        "* plus one pass over the client's data per round.",
        style="dim",
    )
    print_section(
        "Parts, to be added with +", table(("part", "slot", "what it does"), (part.values() for part in parts))
    )
    console.print("\nDetails: fedflat algorithms NAME", style="dim")


def _summarise(name: str) -> dict[str, Any]:
    """Return the slots, cost and paper of a named algorithm; slots that do not differ from plain FedAvg are None."""
    from fedflat.algorithms.algorithm import SLOTS
    from fedflat.algorithms.cards import CARDS
    from fedflat.algorithms.named import NAMED
    from fedflat.cli.lookup.algorithm_card import cost_of, slot_texts

    texts = slot_texts(NAMED[name])
    slots = {slot: texts.get(slot) for slot in SLOTS}
    paper = CARDS[name].paper if name in CARDS else None
    return {"name": name, **slots, **cost_of(NAMED[name]), "paper": paper}


def _parts() -> list[dict[str, Any]]:
    """Return the parts that can be added to an algorithm: name, slot and first line of the description of each."""
    from fedflat.algorithms.composition import parts
    from fedflat.cli.lookup.algorithm_card import equations

    return [
        {"part": name, "slot": "average" if slot == "averages" else slot, "summary": equations(spec).split("\n")[0]}
        for name, (slot, spec) in parts().items()
    ]


def _describe(text: str, as_json: bool) -> None:
    """Print the description of an algorithm, section by section; ``text`` is, for example, ``fedavg+sam(rho=0.1)``."""
    from fedflat.algorithms import algorithm, canonical
    from fedflat.cli.lookup.algorithm_card import SECTIONS, named_base

    described = algorithm(text)
    name, base = canonical(described), named_base(described)
    contents = {section.key: section.content(described) for section in SECTIONS}
    if as_json:
        print_json({"name": name, "algorithm": base, **contents})
        return
    screen().print()
    screen().print(name, style="bold")
    for section in SECTIONS:
        content = contents[section.key]
        if not content:
            continue
        if isinstance(content, list):
            rows = (row.values() for row in content)
            print_section(section.title, table(content[0], rows, numeric=("value", "default")))
        else:
            print_section(section.title, key_values(content))
