"""fedflat models: list and describe models."""

from __future__ import annotations

from typing import Any

import typer

from fedflat.cli.shared.completion import complete_model
from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import print_json, screen, shown_count, table
from fedflat.errors import UserError

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "text": ((80,), 90),
}
"""Input shapes and numbers of classes for parameter counts; texts have 80 characters of an alphabet of 90."""


def models(
    name: str | None = typer.Argument(
        None,
        metavar="NAME",
        help="model to describe, e.g. resnet18(norm=batch)",
        show_default=False,
        autocompletion=complete_model,
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
    """Print all models with their options, and their numbers of parameters for CIFAR-10."""
    from fedflat.models import MODELS
    from fedflat.text import show

    documents: list[dict[str, Any]] = [
        {
            "name": name,
            "text": show(name, defaults(spec)),
            "numbers_cifar10": count_for(name, "cifar10"),
            "summary": summary(spec),
        }
        for name, spec in MODELS.items()
    ]
    if as_json:
        print_json(documents)
        return
    columns = ("model", "parameters for\n3x32x32, 10 classes", "description")
    rows = ((model["text"], shown_count(model["numbers_cifar10"]), model["summary"]) for model in documents)
    screen().print(table(columns, rows, numeric=columns[1:2]))
    screen().print("\nDetails: fedflat models NAME", style="dim")


def _describe(text: str, as_json: bool) -> None:
    """Print a model's options, and its numbers of parameters for the shapes of several datasets."""
    from fedflat.cli.lookup.algorithm_card import parameter_rows
    from fedflat.models import canonical_model, model_spec

    spec, name = model_spec(text), canonical_model(text)
    description, options = summary(type(spec)), parameter_rows(spec, type(spec)())
    counts = {dataset: count_for(text, dataset) for dataset in SHAPES}
    if as_json:
        print_json({"name": name, "summary": description, "parameters": options, "numbers": counts})
        return
    console = screen()
    console.print(f"\n{name}", style="bold")
    console.print(f"{description}\n")
    if options:
        console.print(table(options[0], (option.values() for option in options), numeric=("value", "default")))
        console.print()
    rows = []
    for dataset, (shape, classes) in SHAPES.items():
        if counts[dataset] is not None:
            samples = f"{'x'.join(map(str, shape))}, {classes} classes"
            rows.append((dataset, samples, shown_count(counts[dataset])))
    console.print(table(("for", "samples", "trained parameters"), rows, numeric=("trained parameters",)))


def count_for(text: str, dataset: str) -> int | None:
    """Return the number of trainable parameters of a model for a dataset; None if it does not fit the input shape."""
    from fedflat.models import model_spec, parameter_count

    model_spec(text)  # raises for an unknown model
    try:
        return parameter_count(text, *SHAPES[dataset])
    except UserError:
        return None


def summary(spec: type[Any]) -> str:
    """Return the first paragraph of the docstring of a component, such as a model, on one line."""
    from fedflat.cli.lookup.algorithm_card import equations

    return " ".join(equations(spec).split("\n\n")[0].split())


def defaults(spec: type[Any]) -> dict[str, Any]:
    """Return the parameters of a component, such as a model, with their default values."""
    from fedflat.text import parameters

    return {field.name: field.default for field in parameters(spec)}
