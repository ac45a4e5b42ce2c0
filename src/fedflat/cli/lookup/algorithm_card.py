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

Content = list[dict[str, Any]] | dict[str, Any]


class CardSection(NamedTuple):
    """One section of a description."""

    key: str
    """Key in the JSON output."""
    title: str
    content: Callable[[Algorithm, str], Content]
    """Function of the algorithm and its base name."""


def named_base(described: Algorithm) -> str:
    """Return the named algorithm at the start of the canonical text, such as fedmoswa in fedmoswa+wima."""
    return parse(canonical(described))[0].name


def specs_of(described: Algorithm) -> list[tuple[str, Any]]:
    """Return every slot with the part that fills it, averages last."""
    slots = [(slot, getattr(described, slot)) for slot in SLOTS]
    return [*slots, *(("average", average) for average in described.averages)]


def spec_text(spec: object) -> str:
    """Return a part as text, with its non-default parameters."""
    return show(part_name(spec) or type(spec).__name__, changed(spec))


def slot_texts(described: Algorithm) -> dict[str, str]:
    """Return the text of every slot that differs from plain FedAvg."""
    plain = Algorithm()
    return {slot: spec_text(spec) for slot, spec in specs_of(described) if spec != getattr(plain, slot, None)}


def equations(spec: object) -> str:
    """Return the description and equations of a part as plain text."""
    return str(describe(spec)).replace("`", "")


def cost_of(described: Algorithm) -> dict[str, Any]:
    """Return the values sent down and up, in units of P, and the backward passes."""
    return {
        "down": in_units_of_p(described.floats_down),
        "up": in_units_of_p(described.floats_up),
        "passes": described.backward_passes,
        "full_gradient": described.drift.full_gradient != "none",
    }


def in_units_of_p(count: Callable[[int], int]) -> str:
    """Return a count that is linear in the number of parameters P, as text.

    >>> in_units_of_p(lambda p: 2 * p + 1)
    '2P + 1'
    """
    constant = count(0)
    factor = count(1) - constant
    text = "P" if factor == 1 else f"{factor}P"
    return f"{text} + {constant}" if constant else text


def _slots(described: Algorithm, base: str) -> Content:
    """Return the slots with their parts and equations; a slot as in plain FedAvg has no part."""
    filled = slot_texts(described)
    return [
        {"slot": slot, "part": spec_text(spec) if slot == "average" else filled.get(slot), "equations": equations(spec)}
        for slot, spec in specs_of(described)
    ]


def _parameters(described: Algorithm, base: str) -> Content:
    """Return the parameters of all parts; the defaults are those of the named algorithm if it has the same part."""
    rows = []
    for slot, spec in specs_of(described):
        usual = getattr(NAMED[base], slot, None)
        reference = usual if type(usual) is type(spec) else type(spec)()
        rows += [row | {"slot": slot} for row in parameter_rows(spec, reference)]
    return rows


def parameter_rows(spec: object, reference: object) -> list[dict[str, Any]]:
    """Return every parameter of a part: value, default (its value in ``reference``), valid range and meaning."""
    return [
        {
            "parameter": field.name,
            "value": write_value(getattr(spec, field.name)),
            "default": write_value(getattr(reference, field.name)),
            "range": range_of(spec, field),
            "meaning": field.metadata.get("help", ""),
        }
        for field in parameters(spec)
    ]


def range_of(spec: object, field: Parameter[Any]) -> str:
    """Return the valid values of a parameter as text."""
    words = choices(spec, field.name)
    if words:
        return " or ".join(map(write_value, words))
    low, high, above = (field.metadata.get(key) for key in ("low", "high", "above"))
    if low is not None and high is not None:
        return f"{low} to {high}"
    bounds = {"at least": low, "above": above, "at most": high}
    return " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)


def _state(described: Algorithm, base: str) -> Content:
    """Return the state that server and clients hold, and what a client's message contains."""
    holders = {
        "server": described.server_fields(),
        "every client": described.client_fields(),
        "message": described.message_fields(),
    }
    rows = []
    for holder, fields_by_slot in holders.items():
        for slot, fields in fields_by_slot.items():
            for field in fields:
                sent = {"server": "down" if field.sent else "never", "every client": "never", "message": "up"}[holder]
                kind = "vector" if field.vector else "scalar"
                rows.append({"where": holder, "name": field.name, "slot": slot, "kind": kind, "sent": sent})
    return rows


FULL_GRADIENT = {
    "none": "none",
    "own": "one pass over the client's data at z, stored by the client",
    "common": "one pass over the client's data at z, before training",
}


def _cost(described: Algorithm, base: str) -> Content:
    """Return communication and computation per client."""
    cost = cost_of(described)
    return {
        "values down per client and round": cost["down"],
        "values up per client and round": cost["up"],
        "backward passes per local step": cost["passes"],
        "full-batch gradient per round": FULL_GRADIENT[described.drift.full_gradient],
    }


def _released(described: Algorithm, base: str) -> Content:
    """Return the parameters whose values in the published code differ from those in the paper."""
    paper = {field.name: getattr(spec, field.name) for _, spec in specs_of(NAMED[base]) for field in parameters(spec)}
    return [
        {"parameter": name, "paper": write_value(paper[name]), "released": write_value(value)}
        for name, value in RELEASED.get(base, {}).items()
    ]


def _origin(described: Algorithm, base: str) -> Content:
    """Return title and paper of the named algorithm; empty for a user-defined one."""
    if base not in CARDS:
        return {}
    card = CARDS[base]
    return {"named algorithm": f"{base}: {card.title}", "paper": card.paper, "papers' values": card.values}


def _differences(described: Algorithm, base: str) -> Content:
    """Return the known differences between the published code and the published formula."""
    if base not in CARDS:
        return []
    differences = [DIFFERENCES[number] for number in CARDS[base].differences]
    return [
        {
            "number": difference.number,
            "where": difference.where,
            "what differs": difference.fault,
            "here": difference.here,
        }
        for difference in differences
    ]


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
