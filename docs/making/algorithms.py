"""Pages on algorithms: the index, the parts, one page each, and where published code differs."""

from __future__ import annotations

from typing import Any

from fedflat.algorithms import Algorithm
from fedflat.algorithms.cards import CARDS, DIFFERENCES
from fedflat.algorithms.composition import PARTS, SLOTS, part_name
from fedflat.algorithms.table import NAMED, RELEASED
from fedflat.cli.lookup.algorithm_card import cost_of, parameter_rows, slot_texts, specs_of
from fedflat.text import show
from making.curve import curve, measured
from making.equations import SYMBOLS, said_of
from making.markdown import block, code, joined, table
from making.papers_cited import in_full

WORDS = {
    "drift": "Drift correction",
    "perturbation": "Perturbation",
    "lr_schedule": "Learning-rate schedule",
    "server": "Server",
    "averages": "Average",
}
WHOLE = {
    "own": ", and one over all of the client's data in every round",
    "common": ", and one over all of the client's data before every round",
}


def pages() -> dict[str, str]:
    """Every page on algorithms, by its path, and their curves."""
    found = {"algorithms.md": index(), "algorithms/parts.md": parts(), "differences.md": differences()}
    for name in CARDS:
        found[f"algorithms/{name}.md"] = one(name)
        if (drawn := curve(name)) is not None:
            found[f"images/curves/{name}.svg"] = drawn
    return found


def index() -> str:
    """All of them at a glance."""
    rows = []
    for name, card in CARDS.items():
        cost, slots = cost_of(NAMED[name]), " + ".join(map(code, slot_texts(NAMED[name]).values()))
        rows.append(
            [f"[{name}](algorithms/{name}.md)", card.title, slots, cost["down"], cost["up"], cost["passes"], card.paper]
        )
    return joined(
        [
            "# Algorithms",
            "",
            "Every algorithm is a point in a space of slots; [any part](algorithms/parts.md) can be added to any algorithm with `+` where that has a meaning, so that",
            "`fedmoswa+asam(rho=0.3)+wima(window=50)` is one too. `fedflat algorithms NAME` shows one of them, or any composition, in full.",
            "These pages are made from the code.",
            "",
            "Numbers down and up are per client and round, for a model of P numbers; passes are backward passes per local step.",
            "",
        ],
        table(("name", "what it is", "parts", "down", "up", "passes", "from"), rows),
        [
            "## What the letters mean",
            "",
            "The equations on these pages are those of the code's docstrings, with the same letters throughout:",
            "",
        ],
        table(("letter", "meaning"), [(code(letter), meaning) for letter, meaning in SYMBOLS.items()]),
        ["A round, whatever the algorithm:", ""],
        block(
            [
                "server   broadcasts z to the cohort S, and the vectors that the slots send",
                "client   y_0 = z;  for k = 0 .. K-1:",
                "           e         from the perturbation",
                "           g         the batch's gradient at y_k + e",
                "           d_k       from the drift correction, then clipping and weight decay",
                "           y_(k+1) = y_k - eta_k d_k",
                "         sends D_i = y_K - z, and what the slots add; keeps its state",
                "server   target    from the drift correction, out of z + mean D_i",
                "         x        ← from the server optimiser, with q = target - x",
                "averages look at x, are evaluated beside it, and are never fed back",
            ]
        ),
    )


def parts() -> str:
    """What algorithms are made of."""
    lines = [
        "# Parts",
        "",
        "What algorithms are made of, and what can be added to one with `+`. The letters are explained [here](../algorithms.md#what-the-letters-mean).",
        "",
    ]
    for slot, word in WORDS.items():
        lines += [f"## {word}", ""]
        for name, (where, spec) in PARTS.items():
            if where == slot:
                lines += [f"### {name}", "", *_equations(spec), *_parameters([(slot, spec())])]
                used = [other for other in CARDS if slot != "averages" and type(getattr(NAMED[other], slot)) is spec]
                lines += [f"In {', '.join(f'[{other}]({other}.md)' for other in used)}.", ""] if used else []
    return joined(lines)


def one(name: str) -> str:
    """An algorithm's own page."""
    card, made = CARDS[name], NAMED[name]
    lines = [f"# {name}", "", f"**{card.title}.** " + "; ".join(in_full(card.paper)) + ".", ""]
    texts = slot_texts(made)
    lines += [f"As slots: {_composed(texts)}.", ""]
    lines += block([f"fedflat run {name} --rounds 50", f"fedflat compare fedavg {name} --rounds 50"], "bash")
    lines += _curve(name)
    lines += ["## Equations", "", "The letters are explained [here](../algorithms.md#what-the-letters-mean).", ""]
    lines += ["### Local step", ""]
    for slot in ("perturbation", "drift", "lr_schedule"):
        lines += _slot(made, slot)
    lines += ["### Server step", "", *_slot(made, "server")]
    filled = _parameters(specs_of(made))
    lines += ["## Parameters", "", *(filled or ["None.", ""])]
    if card.values:
        lines += [f"The papers' values: {card.values}.", ""]
    lines += [
        "## Cost",
        "",
        "For a model of P numbers, per client:",
        "",
        *_cost(made),
        *_state(made),
        *_differences(name),
        *_code(made),
    ]
    return joined(lines)


def _composed(texts: dict[str, str]) -> str:
    return (
        ", ".join(
            f"{WORDS[slot].lower()} [`{text}`](parts.md#{text.partition('(')[0]})" for slot, text in texts.items()
        )
        or "none but the defaults"
    )


def _slot(made: Algorithm, slot: str) -> list[str]:
    value = getattr(made, slot)
    name = part_name(value)
    shown = f" `{name}`" if name in PARTS else ""
    head = f"**{WORDS[slot]}**{shown}"
    first, *rest = _equations(value)
    return [f"{head}:", "", first, *rest] if first.startswith("```") else [f"{head}. {first}", *rest]


def _equations(spec: Any) -> list[str]:
    said = said_of(spec)
    head = f"{said.title}{f' ({said.source})' if said.source else ''}".replace("``", "`").strip()
    lines = [f"{head}{'.' if not said.equations else ':'}", ""] if head else []
    if said.equations:
        lines += block(said.equations)
    return lines + ([said.more, ""] if said.more else [])


def _parameters(specs: list[tuple[str, Any]]) -> list[str]:
    rows = [
        (code(row["parameter"]), WORDS.get(slot, slot).lower(), code(row["default"]), row["range"], row["meaning"])
        for slot, spec in specs
        for row in parameter_rows(spec, spec)
    ]
    return table(("parameter", "slot", "default", "range", "meaning"), rows)


def _cost(made: Algorithm) -> list[str]:
    cost = cost_of(made)
    kept = [field for fields in made.client_fields().values() for field in fields]
    vectors, scalars = sum(f.vector for f in kept), sum(not f.vector for f in kept)
    state = (
        " + ".join(
            filter(None, (f"{'' if vectors == 1 else vectors}P" if vectors else "", str(scalars) if scalars else ""))
        )
        or "nothing"
    )
    passes = f"{cost['passes']}{WHOLE.get(made.drift.whole_gradient, '')}"
    return table(
        ("", "numbers"),
        [
            ("received in a round", cost["down"]),
            ("sent in a round", cost["up"]),
            ("kept between rounds", state),
            ("backward passes per local step", passes),
        ],
    )


def _state(made: Algorithm) -> list[str]:
    places = {
        "the server keeps": made.server_fields(),
        "every client keeps": made.client_fields(),
        "a client sends, beside D_i": made.message_fields(),
    }
    rows = []
    for where, by_slot in places.items():
        for slot, fields in by_slot.items():
            for field in fields:
                sent = {"the server keeps": "down" if field.sent else "never", "every client keeps": "never"}.get(
                    where, "up"
                )
                rows.append(
                    (where, code(field.name), WORDS[slot].lower(), "vector" if field.vector else "scalar", sent)
                )
    return table(("", "name", "slot", "kind", "sent"), rows)


def _differences(name: str) -> list[str]:
    found = [DIFFERENCES[number] for number in CARDS[name].differences]
    if not found:
        return ["## Published code", "", "No difference between published code and published formula is known.", ""]
    rows = [(f"[{d.number}](../differences.md#{d.number.lower()})", d.where, d.fault, d.here) for d in found]
    lines = [
        "## Published code",
        "",
        "Where it and the formula disagree, and what is done here:",
        "",
        *table(("", "where", "what differs", "here"), rows),
    ]
    if name in RELEASED:
        lines += [
            f"`{name}(variant=released)` is short for `{show(name, RELEASED[name])}`: as in the published code.",
            "",
        ]
    return lines


def _curve(name: str) -> list[str]:
    found = measured()["curves"]
    if name not in found:
        return []
    rows = [
        (label, *(f"{values[figure][0]:.2f} ± {values[figure][1]:.2f}" for figure in ("mean of all", "last")))
        for label, values in ((code(other), found[other]) for other in dict.fromkeys((name, "fedavg")))
    ]
    return [
        "## On digits",
        "",
        f"![Test accuracy of {name} and of FedAvg over 60 rounds on digits](../images/curves/{name}.svg)",
        "",
        "At the default values on `digits`, Dirichlet 0.1, 50 clients, 10 per round, 60 rounds, 3 seeds; [all of them in one table](../digits.md).",
        "",
        *table(("", "mean of all evaluations", "last"), rows),
    ]


def _code(made: Algorithm) -> list[str]:
    plain = Algorithm()
    own = [getattr(made, slot) for slot in SLOTS if getattr(made, slot) != getattr(plain, slot)]
    files = dict.fromkeys(type(value).__module__.removeprefix("fedflat.").replace(".", "/") + ".py" for value in own)
    return [
        "## In the code",
        "",
        f"One line in `algorithms/table.py`; {', '.join(map(code, files)) or 'every slot has its default'}.",
        "",
    ]


def differences() -> str:
    """Where published code and published formula disagree."""
    return joined(
        [
            "# Where published code and published formula disagree",
            "",
            "fedflat follows the formula unless this page says otherwise; the switches named here give the other form,",
            "and `variant=released` is the short way to say *as in the published code*. This page is made from the code.",
            "",
        ],
        table(
            ("number", "where", "what differs", "here"),
            [
                (f"<span id='{d.number.lower()}'>{d.number}</span>", d.where, d.fault, d.here)
                for d in DIFFERENCES.values()
            ],
        ),
        ["## What `variant=released` sets", ""],
        table(
            ("algorithm", "is short for"),
            [(f"`{name}(variant=released)`", code(show(name, values))) for name, values in RELEASED.items()],
        ),
    )
