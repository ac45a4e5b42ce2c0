"""Write the pages of the documentation that are made from the code: all algorithms, and where published code differs.

python docs/generate.py          write them
python docs/generate.py --check  fail if they are not up to date
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from fedflat.algorithms.cards import CARDS, DIFFERENCES
from fedflat.algorithms.composition import PARTS, SLOTS
from fedflat.algorithms.table import NAMED, RELEASED
from fedflat.text import parameters, show, write_value

HERE = Path(__file__).parent
MODEL = 10**6
"""A model large enough that scalars vanish beside vectors."""


def algorithms_page() -> str:
    lines = [
        "# Algorithms",
        "",
        "Every algorithm is a point in a space of slots; any part can be added to any algorithm with `+` where that has a meaning.",
        "`fedflat algorithms NAME` shows one of them, or any composition, in full. This page is made from the code.",
        "",
        "Bytes are in multiples of the model, per client and round; passes are backward passes per local step.",
        "",
        "| name | what it is | drift | perturbation | rate | server | down | up | passes | from |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, algorithm in NAMED.items():
        slots = [_part(getattr(algorithm, slot), slot) for slot in SLOTS]
        down, up = (round(floats / MODEL) for floats in (algorithm.floats_down(MODEL), algorithm.floats_up(MODEL)))
        card = CARDS[name]
        cells = [f"`{name}`", card.title, *slots, str(down), str(up), str(algorithm.backward_passes), card.paper]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## What the papers used", "", "| name | values | differences |", "|---|---|---|"]
    for name, card in CARDS.items():
        links = ", ".join(f"[{number}](differences.md#{number.lower()})" for number in card.differences)
        lines.append(f"| `{name}` | {card.values} | {links} |")
    lines += ["", "## Parts", ""]
    for name, (slot, spec) in PARTS.items():
        lines += [f"### `{name}` ({slot})", "", inspect.cleandoc(spec.__doc__ or ""), ""]
        if parameters(spec):
            lines += ["| parameter | default | meaning |", "|---|---|---|"]
            lines += [f"| `{f.name}` | {write_value(f.default)} | {f.metadata['help']} |" for f in parameters(spec)]
            lines.append("")
    return "\n".join(lines)


def differences_page() -> str:
    lines = [
        "# Where published code and published formula disagree",
        "",
        "fedflat follows the formula unless this page says otherwise; the switches named here give the other form,",
        "and `variant=released` is the short way to say *as in the published code*. This page is made from the code.",
        "",
        "| number | where | what differs | here |",
        "|---|---|---|---|",
    ]
    for d in DIFFERENCES.values():
        lines.append(f"| <span id='{d.number.lower()}'>{d.number}</span> | {d.where} | {d.fault} | {d.here} |")
    lines += ["", "## What `variant=released` sets", "", "| algorithm | is short for |", "|---|---|"]
    lines += [f"| `{name}(variant=released)` | `{show(name, values)}` |" for name, values in RELEASED.items()]
    return "\n".join([*lines, ""])


def _part(value: object, slot: str) -> str:
    name = next((name for name, (where, spec) in PARTS.items() if where == slot and spec is type(value)), "")
    return "" if not name or (slot == "server" and value == type(value)() and name == "sgd") else name


PAGES = {"algorithms.md": algorithms_page, "differences.md": differences_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        path = HERE / name
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != page():
                sys.exit(f"docs/{name} is not what the code says; run: python docs/generate.py")
        else:
            path.write_text(page())
