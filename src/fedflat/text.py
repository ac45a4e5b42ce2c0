"""The notation for algorithms, partitions, models and augmentations: ``name(parameter=value)+part(parameter=value)``.

Every named component is a frozen dataclass, its *spec*; the dataclass fields are the parameters. ``parse`` splits a
text into calls, ``make`` builds and validates the spec of a call, and ``show`` writes a spec's non-default values.
A value in quotes may contain commas and brackets: ``arrays(path="a (1)/d.npz")``.

>>> parse("fedavg+wima(window=50)+ema")
(Call(name='fedavg', values={}), Call(name='wima', values={'window': 50}), Call(name='ema', values={}))
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedflat.errors import UserError
from fedflat.setting_names import SHORT_NAMES, unknown_parameter

Value = bool | int | float | str | None
Spec = TypeVar("Spec")

POSITIONAL = ""
"""Key of a value given without a name, as in ``dirichlet(0.1)``; it sets the component's positional parameter."""
_PIECE = re.compile(r"""\s*(?:[A-Za-z_]\w*\s*=\s*)?(?:"[^"]*"|'[^']*'|[^(),"'][^(),]*)?\s*""")
"""An argument: a value, perhaps in quotes and perhaps after ``parameter=``; it may be empty."""
_CALL = re.compile(rf"\s*([A-Za-z][\w-]*)\s*(?:\(({_PIECE.pattern}(?:,{_PIECE.pattern})*)\))?\s*")
_PAIR = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(.+?)\s*$", re.DOTALL)
_BARE_NUMBER = re.compile(r"[=:]?\s*([-+]?[\d.][\d.eE+-]*)\s*")
MAX_INTEGER = 2**63 - 1
"""Largest integer that arrays can hold."""
QUOTES = "\"'"
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Call:
    """One ``name(parameter=value, ...)``."""

    name: str
    values: dict[str, Value]


def parse(text: str) -> tuple[Call, ...]:
    """Split a text into its calls, which are joined by ``+``.

    >>> parse("dirichlet(0.1)")[0].values[POSITIONAL]
    0.1
    """
    calls, position = [], 0
    while True:
        match = _CALL.match(text, position)
        if not match:
            raise UserError(f"cannot read '{text}' at '{text[position:]}'; expected name(parameter=value), joined by +")
        name, inside = match.groups(default="")
        calls.append(Call(name, _arguments(inside, text)))
        position = match.end()
        if position == len(text):
            return tuple(calls)
        if text[position] != "+":
            if text[position] == "(" and text.count("(") > text.count(")"):
                raise UserError(f"cannot read '{text}': missing )")
            problem = f"cannot read '{text}' at '{text[position:]}'; expected + and another part, or the end"
            raise UserError(problem + _suggest_correction(text, match))
        position += 1


def _suggest_correction(text: str, match: re.Match[str]) -> str:
    """Return the correct form of a list, a value with parentheses or a number (``dirichlet 0.1``); else nothing."""
    name, inside = match.groups()
    if text[match.end()] == ",":
        return (
            "; names cannot be joined by commas: pass several algorithms as separate arguments (in Python, as a list)"
        )
    if inside is None and text[match.end()] == "(" and text.count("(") == text.count(")"):
        return '; quote a value that contains parentheses: name(parameter="a (b)")'
    number = _BARE_NUMBER.fullmatch(text, match.end())
    if number is None or inside is not None:
        return ""
    if name in SHORT_NAMES:
        return f"; to change a setting, use --set {name}={number[1]} (Python: {name}={number[1]})"
    return f"; did you mean '{text[: match.start()]}{name}({number[1]})'?"


def parse_one(text: str) -> Call:
    """Parse a text that must be a single call."""
    calls = parse(text)
    if len(calls) > 1:
        raise UserError(f"'{text}' has {len(calls)} parts; expected a single name(parameter=value)")
    return calls[0]


def _arguments(inside: str, text: str) -> dict[str, Value]:
    """The values between the parentheses of a call, by parameter; a single value may have no name.

    Args:
        inside: what is between the parentheses.
        text: the complete text, which is quoted in error messages.
    """
    pieces = _split(inside)
    if len(pieces) == 1 and _is_positional(pieces[0]):
        return {POSITIONAL: read_value(pieces[0])}
    values: dict[str, Value] = {}
    for piece in pieces:
        match = _PAIR.match(piece)
        if not match:
            raise UserError(f"cannot read '{piece}' in '{text}'; expected parameter=value")
        name, value = match.groups()
        if name in values:
            raise UserError(f"'{text}' sets the parameter '{name}' twice")
        values[name] = read_value(value)
    return values


def _split(inside: str) -> list[str]:
    """Split the text between parentheses at commas outside quotes; empty pieces are dropped.

    >>> _split('path="a, b", 3,')
    ['path="a, b"', '3']
    """
    pieces, position = [], 0
    while position <= len(inside):
        match = _PIECE.match(inside, position)
        assert match is not None  # the pattern also matches nothing
        pieces.append(match.group().strip())
        position = match.end() + 1  # after the comma
    return [piece for piece in pieces if piece]


def _is_positional(piece: str) -> bool:
    """Whether an argument is a value without a name."""
    return "=" not in piece or piece[0] in QUOTES


def read_value(word: str) -> Value:
    """Read a number, ``true``, ``false`` or ``none``; anything else, and anything in quotes, is a word."""
    if len(word) > 1 and word[0] in QUOTES and word[-1] == word[0]:
        return word[1:-1]
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word.strip(QUOTES)  # drops a quote without a counterpart


def write_value(value: object) -> str:
    """Write a parameter's value as text, in quotes if necessary, so that ``read_value`` gives the same value."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        is_word = read_value(value) == value == value.strip() != "" and not set(value) & set(",()")
        quote = "" if is_word else "'" if '"' in value else '"'
        return f"{quote}{value}{quote}"
    return repr(value) if isinstance(value, float) else str(value)


def show_value(value: object) -> str:
    """Write a value for readers who know its type: like ``write_value``, but words such as 3 or none need no quotes."""
    is_word = isinstance(value, str) and value == value.strip() and not set(value) & set(",()")
    return str(value) if is_word else write_value(value)


def param(
    default: Any,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    path: bool | Literal["if_exists"] = False,
    positional: bool = False,
) -> Any:
    """Declare a parameter of a spec, as the default of a dataclass field.

    Args:
        default: value when the parameter is not given.
        help: one line for ``--help`` and the documentation.
        low: smallest valid value.
        high: largest valid value.
        above: exclusive lower bound, instead of ``low``.
        path: whether the value is a path, which configs store as an absolute path; ``"if_exists"`` treats it as a
            path only if that file or folder exists.
        positional: whether a value without a name sets this parameter, as in ``dirichlet(0.1)``; only needed for
            components with several parameters.
    """
    metadata = {"help": help, "low": low, "high": high, "above": above, "path": path, "positional": positional}
    return dataclasses.field(default=default, metadata=metadata)


def make(spec: type[Spec], call: Call, what: str) -> Spec:
    """Build the spec of a call; ``what`` is its kind in error messages, e.g. ``"model"``."""
    return revise(spec(), call.values, f"{what} {call.name}")


def revise(spec: Spec, values: Mapping[str, Value], what: str) -> Spec:
    """Copy a spec with some parameters changed, checking names, types and ranges.

    Args:
        spec: the spec to copy.
        values: new values by parameter, or one under the key ``POSITIONAL``.
        what: names the component in error messages, e.g. ``"model cnn"``.
    """
    fields = {field.name: field for field in parameters(spec)}
    values = with_names(values, positional_parameters(spec), what)
    for name in values:
        if name not in fields:
            raise unknown_parameter(name, write_value(values[name]), fields, what)
    checked = {name: _checked(spec, fields[name], value, what) for name, value in values.items()}
    return dataclasses.replace(spec, **checked)  # type: ignore[type-var]


def with_names(values: Mapping[str, Value], names: Sequence[str], what: str) -> dict[str, Value]:
    """Replace the key ``POSITIONAL`` of a value without a name by the name of the parameter that it sets.

    Args:
        values: values by parameter, or one under the key ``POSITIONAL``.
        names: parameters that the value without a name may mean; more or fewer than one is an error.
        what: kind and name of the component, or only its name, for error messages.
    """
    if POSITIONAL not in values:
        return dict(values)
    value = write_value(values[POSITIONAL])
    if not names:
        raise UserError(f"{what} has no parameters, so it cannot take '{value}'")
    if len(names) > 1:
        raise UserError(
            f"{what} has several parameters, so '{value}' needs a name, as in {what.split()[-1]}({names[0]}={value}); "
            f"its parameters are {', '.join(names)}"
        )
    return {names[0]: values[POSITIONAL]}


def positional_parameters(spec: object) -> list[str]:
    """The parameters that a value without a name may mean: those declared as positional, otherwise all."""
    fields = parameters(spec)
    return [field.name for field in fields if field.metadata.get("positional")] or [field.name for field in fields]


def parameters(spec: object) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a spec, in order."""
    return dataclasses.fields(spec)  # type: ignore[arg-type]


def changed(spec: object, base: object | None = None) -> dict[str, Value]:
    """The parameters in which a spec differs from ``base`` (default: the spec's own defaults)."""
    base = type(spec)() if base is None else base
    names = [field.name for field in parameters(spec)]
    return {name: getattr(spec, name) for name in names if getattr(spec, name) != getattr(base, name)}


def show(name: str, values: Mapping[str, Value]) -> str:
    """Write a call as text: ``name(parameter=value,...)``, or just ``name`` if there are no values.

    >>> show("dirichlet", {"alpha": 0.1}), show("dirichlet", {POSITIONAL: 0.1})
    ('dirichlet(alpha=0.1)', 'dirichlet(0.1)')
    """
    pieces = [
        write_value(value) if key == POSITIONAL else f"{key}={write_value(value)}" for key, value in values.items()
    ]
    return f"{name}({','.join(pieces)})" if pieces else name


def folded(name: str) -> str:
    """Return a name as lookups compare it: in lower case, without hyphens and underscores."""
    return name.lower().replace("-", "").replace("_", "")


def respell(text: str, specs: Mapping[str, Any]) -> str:
    """Spell names as registered, name positional values and make paths absolute; other values stay as written.

    Unknown names, ambiguous values and malformed texts stay unchanged; they are reported where the component is made.

    Args:
        text: the text of a dataset, partition, model or augmentation.
        specs: specs by registered name; parameters that they declare with ``path=True`` are paths.
    """
    by_name = {folded(name): (name, spec) for name, spec in specs.items()}

    def convert(call: re.Match[str]) -> str:
        """Rewrite one ``name(arguments)`` of the text: registered spelling, values named, absolute paths."""
        name, inside = call.groups(default="")
        registered_name, spec = by_name.get(folded(name), (name, None))
        fields = () if spec is None else parameters(spec)
        pieces = _split(inside)
        positional = [] if spec is None else positional_parameters(spec)
        if len(pieces) == 1 and _is_positional(pieces[0]) and len(positional) == 1:
            pieces = [f"{positional[0]}={pieces[0]}"]
        path_parameters = {field.name: field.metadata.get("path") for field in fields}
        arguments = ",".join(_normalised(piece, path_parameters) for piece in pieces)
        return f"{registered_name}({arguments})" if arguments else registered_name

    try:
        parse(text)
    except UserError:
        return text
    return _CALL.sub(convert, text)


def _normalised(piece: str, path_parameters: Mapping[str, Any]) -> str:
    """Write ``parameter=value`` without spaces around ``=``, and with an absolute path if the value is a path."""
    name, equals, value = (part.strip() for part in piece.partition("="))
    if path_parameters.get(name):
        path = absolute_path(str(read_value(value)))
        if path_parameters[name] is True or path.exists():
            value = write_value(str(path))
    return f"{name}{equals}{value}"


def absolute_path(path: str | Path) -> Path:
    """Make a path absolute, with the home directory for ``~``."""
    return expand_home(path).absolute()


def expand_home(path: str | Path) -> Path:
    """Replace ``~`` by the home directory; an unknown one, as in ``~nobody``, stays as written."""
    path = Path(path)
    with suppress(RuntimeError):
        path = path.expanduser()
    return path


def choices(spec: object, name: str) -> tuple[Value, ...]:
    """The values that a ``Literal`` parameter accepts; empty for other types."""
    annotation = _type_hints(spec if isinstance(spec, type) else type(spec))[name]
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


@cache  # evaluating annotations is slow
def _type_hints(spec: type) -> dict[str, Any]:
    return typing.get_type_hints(spec)


def _checked(spec: object, field: dataclasses.Field[Any], value: Value, what: str) -> Value:
    """Check a value against the type and range of a parameter, and return it as that type.

    An integer such as 1 is accepted for a float parameter, and a whole float such as 1.0 for an integer parameter.

    Args:
        spec: the spec that has the parameter.
        field: the parameter.
        value: the value to check.
        what: names the component in error messages.
    """
    setting = f"{what}: {field.name}={write_value(value)}"
    allowed = choices(spec, field.name)  # of a Literal parameter
    if allowed:
        # Types are compared as well, because 1 == 1.0 == True in Python.
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise UserError(f"{setting} is invalid; expected one of {', '.join(map(write_value, allowed))}")
        return value
    annotation = _type_hints(type(spec))[field.name]  # type: ignore[arg-type]
    accepted = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if value is None and type(None) in accepted:
        return None
    if float in accepted and type(value) is int:  # not a bool, which is a subclass of int
        value = float(value)
    if int in accepted and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) not in accepted:
        names = {float: "a number", int: "an integer", bool: "true or false", str: "a word", type(None): "none"}
        raise UserError(f"{setting} is invalid; expected {' or '.join(names[kind] for kind in accepted)}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_range(value, field, setting)
    return value


def _check_range(value: float, field: dataclasses.Field[Any], setting: str) -> None:
    """Raise a ``UserError`` unless a number is finite and within the bounds that ``param`` declared.

    ``setting`` is the beginning of the message: component, parameter and value.
    """
    low, high, above = (field.metadata.get(key) for key in ("low", "high", "above"))
    violated = [
        not math.isfinite(value) or (isinstance(value, int) and abs(value) > MAX_INTEGER),
        low is not None and value < low,
        above is not None and value <= above,
        high is not None and value > high,
    ]
    if not any(violated):
        return
    named = {"at least": low, "above": above, "at most": high}
    bounds = " and ".join(f"{words} {bound}" for words, bound in named.items() if bound is not None)
    raise UserError(f"{setting} is out of range; expected a {'number ' + bounds if bounds else 'finite number'}")
