"""The text in which algorithms, partitions, models and augmentations are named: ``name(parameter=value)+part(parameter=value)``.

Whatever has a name is a frozen dataclass, a *spec*; its fields are the parameters of the text. ``parse`` reads a text into calls,
``make`` turns a call into a spec with every parameter checked, ``show`` writes a spec back with only what differs from its defaults.

>>> parse("fedavg+wima(window=50)+ema")
(Call(name='fedavg', values={}), Call(name='wima', values={'window': 50}), Call(name='ema', values={}))
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from fedflat.errors import UserError, one_of

Value = bool | int | float | str | None
Spec = TypeVar("Spec")

_CALL = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\(([^()]*)\))?\s*")
_PAIR = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(.+?)\s*$", re.DOTALL)
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Call:
    """One ``name(parameter=value, ...)`` of a text."""

    name: str
    values: dict[str, Value]


def parse(text: str) -> tuple[Call, ...]:
    """The calls of a text, joined by ``+``."""
    calls, position = [], 0
    while True:
        found = _CALL.match(text, position)
        if not found:
            raise UserError(f"cannot read '{text}' at '{text[position:]}'; expected name(parameter=value), joined by +")
        calls.append(Call(found[1], dict(_pairs(found[2] or "", text))))
        position = found.end()
        if position == len(text):
            return tuple(calls)
        if text[position] != "+":
            raise UserError(f"cannot read '{text}' at '{text[position:]}'; expected + and another part, or the end")
        position += 1


def parse_one(text: str) -> Call:
    """The single call of a text that allows no parts."""
    calls = parse(text)
    if len(calls) > 1:
        raise UserError(f"'{text}' has {len(calls)} parts, but one name(parameter=value) was expected here")
    return calls[0]


def _pairs(inside: str, text: str) -> Iterator[tuple[str, Value]]:
    seen = set()
    for piece in filter(None, (p.strip() for p in inside.split(","))):
        found = _PAIR.match(piece)
        if not found:
            raise UserError(f"cannot read '{piece}' in '{text}'; expected parameter=value")
        if found[1] in seen:
            raise UserError(f"parameter '{found[1]}' stands twice in '{text}'")
        seen.add(found[1])
        yield found[1], read_value(found[2])


def read_value(word: str) -> Value:
    """A value as written: a number, true, false, none, or else a word."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word.strip("\"'")


def write_value(value: object) -> str:
    """A value as the grammar reads it back."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def param(
    default: Any, help: str = "", *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A parameter of a spec: its default, one line of help, and the closed (or, with ``above``, open) range it must lie in."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "above": above})


def make(spec: type[Spec], call: Call, what: str) -> Spec:
    """The spec of a call, with names, types and ranges checked."""
    return revise(spec(), call.values, f"{what} {call.name}")


def revise(spec: Spec, values: Mapping[str, Value], what: str) -> Spec:
    """A copy of a spec with some parameters changed, each checked."""
    fields = {f.name: f for f in parameters(spec)}
    for name in values:
        if name not in fields:
            if not fields:
                raise UserError(f"{what} has no parameters, so '{name}' cannot be set")
            raise one_of(f"parameter of {what}", name, fields)
    checked = {name: _checked(spec, fields[name], value, what) for name, value in values.items()}
    return dataclasses.replace(spec, **checked)  # type: ignore[type-var]


def parameters(spec: object) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a spec, in order."""
    return dataclasses.fields(spec)  # type: ignore[arg-type]


def changed(spec: object, base: object | None = None) -> dict[str, Value]:
    """The parameters of a spec that differ from those of ``base``, by default the spec's own defaults."""
    base = type(spec)() if base is None else base
    return {f.name: getattr(spec, f.name) for f in parameters(spec) if getattr(spec, f.name) != getattr(base, f.name)}


def show(name: str, values: Mapping[str, Value]) -> str:
    """``name(parameter=value,...)``, without parentheses where there is nothing to say."""
    inside = ",".join(f"{key}={write_value(value)}" for key, value in values.items())
    return f"{name}({inside})" if inside else name


def underscored(text: str) -> str:
    """A text whose name is written with underscores, where it was written with hyphens.

    >>> underscored("fashion-mnist"), underscored("images(path=my-folder)")
    ('fashion_mnist', 'images(path=my-folder)')
    """
    name, bracket, rest = text.partition("(")
    return name.replace("-", "_") + bracket + rest


def choices(spec: object, name: str) -> tuple[Value, ...]:
    """The words a parameter admits, when its type is a Literal."""
    kind = _kinds(spec if isinstance(spec, type) else type(spec))[name]
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


@cache
def _kinds(spec: type) -> dict[str, Any]:
    """The types of a spec's parameters; kept, since Python evaluates annotations anew whenever they are asked for."""
    return typing.get_type_hints(spec)


def _checked(spec: object, field: dataclasses.Field[Any], value: Value, what: str) -> Value:
    kind = _kinds(type(spec))[field.name]  # type: ignore[arg-type]
    where = f"{what}: {field.name}={write_value(value)}"
    allowed = choices(spec, field.name)
    if allowed:
        if not any(value == one and type(value) is type(one) for one in allowed):  # 1, 1.0 and true are equal to Python
            raise UserError(f"{where} is not possible; expected one of {', '.join(write_value(a) for a in allowed)}")
        return value
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in kinds:
        return None
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if int in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) not in kinds:
        names = {float: "a number", int: "a whole number", bool: "true or false", str: "a word", type(None): "none"}
        raise UserError(f"{where} is not possible; expected {' or '.join(names[k] for k in kinds)}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _in_range(value, field, where)
    return value


def _in_range(value: float, field: dataclasses.Field[Any], where: str) -> None:
    low, high, above = (field.metadata.get(key) for key in ("low", "high", "above"))
    low_ok = (low is None or value >= low) and (above is None or value > above)
    if math.isfinite(value) and low_ok and (high is None or value <= high):
        return
    named = {"at least": low, "above": above, "at most": high}
    bounds = " and ".join(f"{words} {bound}" for words, bound in named.items() if bound is not None)
    raise UserError(f"{where} is out of range; expected a number {bounds or 'that is finite'}")
