"""fedflat models: list and describe models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import print_json, screen, shown_count, table
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
"""Input shapes and classes for parameter counts; text is 80 characters of an alphabet of 90."""


def models(
    name: str | None = typer.Argument(
        None, metavar="NAME", help="model to describe, e.g. resnet18(norm=batch)", show_default=False
    ),
    as_json: bool = JSON,
) -> None:
    """List models, or describe one: its options and number of parameters.

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
            "text": show(name, defaults(spec)),
            "numbers_cifar10": count_for(name, "cifar10"),
            "summary": summary(spec),
        }
        for name, spec in MODELS.items()
    ]
    if as_json:
        print_json(found)
        return
    columns = ("model", "parameters for\n3x32x32, 10 classes", "description")
    rows = ((f["text"], shown_count(f["numbers_cifar10"]), f["summary"]) for f in found)
    screen().print(table(columns, rows, numbers=columns[1:2]))
    screen().print("\nDetails: fedflat models NAME", style="dim")


def _describe(text: str, as_json: bool) -> None:
    from fedflat.cli.lookup.algorithm_card import parameter_rows
    from fedflat.models import canonical_model, model_spec

    spec = model_spec(text)
    rows, counts = parameter_rows(spec, type(spec)()), {data: count_for(text, data) for data in SHAPES}
    if as_json:
        print_json(
            {"name": canonical_model(text), "summary": summary(type(spec)), "parameters": rows, "numbers": counts}
        )
        return
    console = screen()
    console.print(f"\n{canonical_model(text)}", style="bold")
    console.print(f"{summary(type(spec))}\n")
    if rows:
        console.print(table(rows[0], (row.values() for row in rows), numbers=("value", "default")))
        console.print()
    shapes = {name: f"{'x'.join(map(str, shape))}, {classes} classes" for name, (shape, classes) in SHAPES.items()}
    trained = ((data, shapes[data], shown_count(count)) for data, count in counts.items() if count is not None)
    console.print(table(("for", "samples", "numbers trained"), trained, numbers=("numbers trained",)))


def count_for(text: str, data: str) -> int | None:
    """Number of trainable parameters; None if the input shape is unsupported."""
    from fedflat.models import model_spec, parameter_count

    model_spec(text)
    try:
        return parameter_count(text, *SHAPES[data])
    except UserError:
        return None


def summary(spec: type[ModelSpec]) -> str:
    """The first paragraph of a model's docstring."""
    from fedflat.cli.lookup.algorithm_card import equations

    return " ".join(equations(spec).split("\n\n")[0].split())


def defaults(spec: type[Any]) -> dict[str, Any]:
    """Parameters of a spec with their defaults."""
    from fedflat.text import parameters

    return {field.name: field.default for field in parameters(spec)}
