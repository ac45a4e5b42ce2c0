"""fedflat models: the networks, by name."""

from __future__ import annotations

from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flags import JSON
from fedflat.cli.screen import print_json, screen, shown_count, table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.models import ModelSpec

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "text": ((80,), 90),
}
"""Samples and classes for which parameters are counted; text is 80 characters of an alphabet of 90."""


def models(
    name: str | None = typer.Argument(None, help="a model, for example resnet18(norm=batch)", show_default=False),
    as_json: bool = JSON,
) -> None:
    """List the models, or describe one: its parameters, and how many numbers it trains.

    Example: fedflat models 'resnet18(norm=batch)'
    """
    if name is None:
        _list(as_json)
    else:
        _describe(name, as_json)


def _list(as_json: bool) -> None:
    from fedflat.models import MODELS
    from fedflat.text import show

    found: list[dict[str, Any]] = [
        {
            "name": name,
            "text": show(name, {p["parameter"]: p["default"] for p in _parameters(spec)}),
            "numbers_cifar10": count_for(name, "cifar10"),
            "summary": summary(spec),
        }
        for name, spec in MODELS.items()
    ]
    if as_json:
        print_json(found)
        return
    rows = ((f["text"], shown_count(f["numbers_cifar10"]), f["summary"]) for f in found)
    screen().print(table(("model", "numbers (3x32x32, 10 classes)", "what it is"), rows, numbers=("numbers (3x32x32, 10 classes)",)))
    screen().print("More of one: fedflat models NAME", style="dim")


def _describe(text: str, as_json: bool) -> None:
    from fedflat.models import canonical_model, model_spec

    spec = model_spec(text)
    counts = {data: count for data in SHAPES if (count := count_for(text, data)) is not None}
    values = [{**p, "value": p["default"] if p["parameter"] not in vars(spec) else _written(getattr(spec, p["parameter"]))} for p in _parameters(type(spec))]
    if as_json:
        print_json({"name": canonical_model(text), "summary": summary(type(spec)), "parameters": values, "numbers": counts})
        return
    console = screen()
    console.print()
    console.print(canonical_model(text), style="bold")
    console.print(summary(type(spec)))
    if values:
        columns = ("parameter", "value", "default", "range", "meaning")
        console.print(table(columns, ([p[c] for c in columns] for p in values), numbers=("value", "default")))
    shapes = {name: f"{'x'.join(map(str, shape))}, {classes} classes" for name, (shape, classes) in SHAPES.items()}
    console.print(table(("for", "samples", "numbers trained"), ((d, shapes[d], shown_count(n)) for d, n in counts.items()), numbers=("numbers trained",)))


def count_for(text: str, data: str) -> int | None:
    """How many numbers a model trains on such data; None where it cannot take them."""
    from fedflat.models import model_spec, parameter_count

    model_spec(text)
    try:
        return parameter_count(text, *SHAPES[data])
    except UserError:
        return None


def summary(spec: type[ModelSpec]) -> str:
    """The first paragraph about a model."""
    import inspect

    return " ".join((inspect.getdoc(spec) or "").split("\n\n")[0].split())


def _parameters(spec: type[ModelSpec]) -> list[dict[str, str]]:
    from fedflat.cli.algorithm_card import range_of
    from fedflat.text import parameters

    return [
        {
            "parameter": field.name,
            "default": "" if field.default is MISSING else _written(field.default),
            "range": range_of(spec, field),
            "meaning": field.metadata.get("help", ""),
        }
        for field in parameters(spec)
    ]


def _written(value: object) -> str:
    from fedflat.text import write_value

    return write_value(value)
