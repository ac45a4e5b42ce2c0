"""The description of an algorithm, section by section.

A section maps an algorithm and its base name to plain values: a list of rows becomes a table, a mapping becomes
pairs, and both appear in the JSON output. Empty sections are omitted. To add one, extend ``SECTIONS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field as Parameter
from typing import Any, NamedTuple

from fedflat.algorithms import Algorithm, canonical
from fedflat.algorithms.algorithm import SLOTS
from fedflat.algorithms.composition import part_name
from fedflat.algorithms.description import describe
from fedflat.algorithms.differences import DIFFERENCES
from fedflat.algorithms.named import CARDS, NAMED, RELEASED
from fedflat.text import changed, choices, parameters, parse, show, write_value

Facts = list[dict[str, Any]] | dict[str, Any]


class CardSection(NamedTuple):
    """One section of a description."""

    key: str
    title: str
    facts: Callable[[Algorithm, str], Facts]


def named_base(made: Algorithm) -> str:
    """The named algorithm at the start of the canonical text."""
    return parse(canonical(made))[0].name


def specs_of(made: Algorithm) -> list[tuple[str, Any]]:
    """The non-default slots, averages last."""
    filled = [(slot, getattr(made, slot)) for slot in SLOTS]
    return [*filled, *(("average", average) for average in made.averages)]


def slot_texts(made: Algorithm) -> dict[str, str]:
    """The text of every filled slot."""
    return {
        slot: show(part_name(spec) or type(spec).__name__, changed(spec))
        for slot, spec in specs_of(made)
        if spec != getattr(Algorithm(), slot, None)
    }


def equations(spec: object) -> str:
    """Description and equations of a part."""
    return str(describe(spec)).replace("`", "")


def cost_of(made: Algorithm) -> dict[str, Any]:
    """Values sent, in units of P, and backward passes."""
    return {
        "down": in_units_of_p(made.floats_down),
        "up": in_units_of_p(made.floats_up),
        "passes": made.backward_passes,
        "full_gradient": made.drift.full_gradient != "none",
    }


def in_units_of_p(count: Callable[[int], int]) -> str:
    """A count a P + b as text.

    >>> in_units_of_p(lambda p: 2 * p + 1)
    '2P + 1'
    """
    rest = count(0)
    times = count(1) - rest
    return f"{'' if times == 1 else times}P" + (f" + {rest}" if rest else "")


def _slots(made: Algorithm, base: str) -> Facts:
    texts = {**dict.fromkeys(SLOTS), **slot_texts(made)}
    rows = [{"slot": slot, "part": texts[slot], "equations": equations(getattr(made, slot))} for slot in SLOTS]
    return rows + [
        {"slot": "average", "part": show(part_name(a) or type(a).__name__, changed(a)), "equations": equations(a)}
        for a in made.averages
    ]


def _parameters(made: Algorithm, base: str) -> Facts:
    rows = []
    for slot, spec in specs_of(made):
        usual = getattr(NAMED[base], slot, None)
        rows += [
            row | {"slot": slot} for row in parameter_rows(spec, usual if type(usual) is type(spec) else type(spec)())
        ]
    return rows


def parameter_rows(spec: object, usual: object) -> list[dict[str, Any]]:
    """Every parameter of a spec: value, default, valid range and meaning."""
    return [
        {
            "parameter": field.name,
            "value": write_value(getattr(spec, field.name)),
            "default": write_value(getattr(usual, field.name)),
            "range": range_of(spec, field),
            "meaning": field.metadata.get("help", ""),
        }
        for field in parameters(spec)
    ]


def range_of(spec: object, field: Parameter[Any]) -> str:
    """The valid values of a parameter."""
    words = choices(spec, field.name)
    if words:
        return " or ".join(map(write_value, words))
    low, high, above = (field.metadata.get(key) for key in ("low", "high", "above"))
    if low is not None and high is not None:
        return f"{low} to {high}"
    bounds = {"at least": low, "above": above, "at most": high}
    return " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)


def _state(made: Algorithm, base: str) -> Facts:
    places = {"server": made.server_fields(), "every client": made.client_fields(), "message": made.message_fields()}
    return [
        {
            "where": where,
            "name": field.name,
            "slot": slot,
            "kind": "vector" if field.vector else "scalar",
            "sent": {"server": "down" if field.sent else "never", "every client": "never"}.get(where, "up"),
        }
        for where, by_slot in places.items()
        for slot, fields in by_slot.items()
        for field in fields
    ]


def _cost(made: Algorithm, base: str) -> Facts:
    cost = cost_of(made)
    whole = {
        "none": "none",
        "own": "one pass over the client's data at z, stored by the client",
        "common": "one pass over the client's data at z, before training",
    }
    return {
        "values down per client and round": cost["down"],
        "values up per client and round": cost["up"],
        "backward passes per local step": cost["passes"],
        "full-batch gradient per round": whole[made.drift.full_gradient],
    }


def _released(made: Algorithm, base: str) -> Facts:
    paper = {field.name: getattr(spec, field.name) for _, spec in specs_of(NAMED[base]) for field in parameters(spec)}
    changes = RELEASED.get(base, {})
    return [
        {"parameter": name, "paper": write_value(paper[name]), "released": write_value(value)}
        for name, value in changes.items()
    ]


def _origin(made: Algorithm, base: str) -> Facts:
    card = CARDS.get(base)
    return (
        {}
        if card is None
        else {"named algorithm": f"{base}: {card.title}", "paper": card.paper, "papers' values": card.values}
    )


def _differences(made: Algorithm, base: str) -> Facts:
    found = [DIFFERENCES[number] for number in (CARDS[base].differences if base in CARDS else ())]
    return [{"number": d.number, "where": d.where, "what differs": d.fault, "here": d.here} for d in found]


SECTIONS: tuple[CardSection, ...] = (
    CardSection("origin", "Origin", _origin),
    CardSection("slots", "Slots and equations", _slots),
    CardSection("parameters", "Parameters", _parameters),
    CardSection("state", "State", _state),
    CardSection("cost", "Cost, for a model of P parameters", _cost),
    CardSection(
        "released", "Effect of variant=released (the published code where it differs from the paper)", _released
    ),
    CardSection("differences", "Differences between published code and published formula", _differences),
)
