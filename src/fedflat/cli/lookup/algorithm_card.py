"""The description of an algorithm, section by section.

A section maps an algorithm to plain values. On the screen, a list of rows becomes a table, and a mapping becomes lines
of name and value; empty sections are omitted. In the JSON output, the values are unchanged. To add a section, extend
``SECTIONS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field as Parameter
from typing import Any, NamedTuple

from fedflat.algorithms import Algorithm, canonical
from fedflat.algorithms.algorithm import SLOTS
from fedflat.algorithms.cards import CARDS
from fedflat.algorithms.composition import part_text
from fedflat.algorithms.description import DIFFERENCES, describe
from fedflat.algorithms.named import NAMED
from fedflat.text import choices, parameters, parse, show_value

Content = list[dict[str, Any]] | dict[str, Any]


class CardSection(NamedTuple):
    """One section of a description."""

    key: str
    """Key in the JSON output."""
    title: str
    content: Callable[[Algorithm], Content]


def named_base(algorithm: Algorithm) -> str:
    """Return the named algorithm at the start of the canonical text, such as fedmoswa in fedmoswa+wima."""
    return parse(canonical(algorithm))[0].name


def specs_of(algorithm: Algorithm) -> list[tuple[str, Any]]:
    """Return pairs of a slot and the part of the algorithm that fills it; averages come last, each as ``average``."""
    slots = [(slot, getattr(algorithm, slot)) for slot in SLOTS]
    return [*slots, *(("average", average) for average in algorithm.averages)]


def slot_texts(algorithm: Algorithm) -> dict[str, str]:
    """Return, for every slot that differs from plain FedAvg, the text of its part, such as ``sam(rho=0.1)``."""
    plain = Algorithm()
    return {slot: part_text(spec) for slot, spec in specs_of(algorithm) if spec != getattr(plain, slot, None)}


def equations(spec: object) -> str:
    """Return the description and equations of a part as plain text."""
    return str(describe(spec)).replace("`", "")


def cost_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return the cost per client: values sent per round for P parameters, and backward passes per local step.

    ``full_gradient`` is whether a client also computes a gradient on all its data once per round.
    """
    return {
        "down": in_units_of_p(algorithm.floats_down),
        "up": in_units_of_p(algorithm.floats_up),
        "passes": algorithm.backward_passes,
        "full_gradient": algorithm.drift.full_gradient != "none",
    }


def in_units_of_p(count: Callable[[int], int]) -> str:
    """Return a linear function of the number of parameters P as text.

    >>> in_units_of_p(lambda p: 2 * p + 1)
    '2P + 1'
    """
    constant = count(0)
    factor = count(1) - constant
    text = "P" if factor == 1 else f"{factor}P"
    return f"{text} + {constant}" if constant else text


def _slots(algorithm: Algorithm) -> Content:
    """Return one row per slot (a replaceable step of an algorithm): the part that fills it, and its equations.

    The part is None where the algorithm does the same as plain FedAvg.
    """
    part_of_slot = slot_texts(algorithm)
    rows = []
    for slot, spec in specs_of(algorithm):
        # Unlike other slots, averages can have several parts, so each is taken from its own specification.
        part = part_text(spec) if slot == "average" else part_of_slot.get(slot)
        rows.append({"slot": slot, "part": part, "equations": equations(spec)})
    return rows


def _parameters(algorithm: Algorithm) -> Content:
    """Return one row per parameter of every part.

    Defaults are those of the named algorithm if it has the same part in that slot, otherwise those of the part itself.
    """
    named = NAMED[named_base(algorithm)]
    rows = []
    for slot, spec in specs_of(algorithm):
        named_spec = getattr(named, slot, None)
        default_spec = named_spec if type(named_spec) is type(spec) else type(spec)()
        rows += [row | {"slot": slot} for row in parameter_rows(spec, default_spec)]
    return rows


def parameter_rows(spec: object, default_spec: object) -> list[dict[str, Any]]:
    """Return one row per parameter of a part: its value, default, valid range and meaning.

    Args:
        spec: the part, e.g. ``SAM(rho=0.1)``.
        default_spec: a part of the same type whose parameters have their default values.
    """
    return [
        {
            "parameter": field.name,
            "value": show_value(getattr(spec, field.name)),
            "default": show_value(getattr(default_spec, field.name)),
            "range": range_of(spec, field),
            "meaning": field.metadata.get("help", ""),
        }
        for field in parameters(spec)
    ]


def range_of(spec: object, field: Parameter[Any]) -> str:
    """Return the valid values of a parameter as text, e.g. ``grad or update`` or ``0 to 1``; empty if all are."""
    valid_values = choices(spec, field.name)
    if valid_values:
        return " or ".join(map(show_value, valid_values))
    low, high, above = (field.metadata.get(key) for key in ("low", "high", "above"))
    if low is not None and high is not None:
        return f"{low} to {high}"
    bounds = {"at least": low, "above": above, "at most": high}
    return " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)


def _state(algorithm: Algorithm) -> Content:
    """Return one row per vector or scalar that the server or every client holds, or that a client's message contains.

    ``sent`` is ``down`` for server state that is sent to clients, and ``up`` for the contents of a message.
    """
    holders = {
        "server": algorithm.server_fields(),
        "every client": algorithm.client_fields(),
        "message": algorithm.message_fields(),
    }
    rows = []
    for holder, fields_by_slot in holders.items():
        for slot, fields in fields_by_slot.items():
            for field in fields:
                sent = "never"
                if holder == "message":
                    sent = "up"
                elif holder == "server" and field.sent:
                    sent = "down"
                kind = "vector" if field.vector else "scalar"
                rows.append({"where": holder, "name": field.name, "slot": slot, "kind": kind, "sent": sent})
    return rows


FULL_GRADIENT = {
    "none": "none",
    "own": "one pass over the client's data at z, stored by the client",
    "common": "one pass over the client's data at z, before training",
}
"""Text for each value of a drift's ``full_gradient``; z is the model that clients receive."""


def _cost(algorithm: Algorithm) -> Content:
    """Return communication and computation per client, by label."""
    cost = cost_of(algorithm)
    return {
        "values down per client and round": cost["down"],
        "values up per client and round": cost["up"],
        "backward passes per local step": cost["passes"],
        "full-batch gradient per round": FULL_GRADIENT[algorithm.drift.full_gradient],
    }


def _released(algorithm: Algorithm) -> Content:
    """Return one row per parameter, or per part, in which the published code differs from the paper."""
    base = named_base(algorithm)
    released = CARDS[base].released if base in CARDS else {}
    if isinstance(released, Algorithm):
        paper, code = slot_texts(NAMED[base]), slot_texts(released)
        return [{"parameter": slot, "paper": paper.get(slot, ""), "released": code.get(slot, "")} for slot in code]
    paper_values = {}
    for _, spec in specs_of(NAMED[base]):
        for field in parameters(spec):
            paper_values[field.name] = getattr(spec, field.name)
    return [
        {"parameter": name, "paper": show_value(paper_values[name]), "released": show_value(value)}
        for name, value in released.items()
    ]


def _origin(algorithm: Algorithm) -> Content:
    """Return title, paper and published parameter values of a named algorithm; empty for a user-defined one."""
    base = named_base(algorithm)
    if base not in CARDS:
        return {}
    card = CARDS[base]
    return {"named algorithm": f"{base}: {card.title}", "paper": card.paper, "values in papers": card.values}


def _differences(algorithm: Algorithm) -> Content:
    """Return one row per known difference between the published code and the published formula."""
    base = named_base(algorithm)
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
