"""A page for each family of models: what it is, its parameters, and its layers for the samples of docs/models.md."""

from __future__ import annotations

import inspect

import torch

from fedflat.cli.lookup.algorithm_card import parameter_rows
from fedflat.cli.lookup.models import SHAPES, count_for
from fedflat.models import MODELS, ImageModelSpec, ModelSpec, build, model_spec
from making.markdown import block, code, joined, rows_of, table

PAGE = "models.md"
DATA = {
    "mlp": "digits",
    "lenet5": "mnist",
    "femnist-cnn": "femnist",
    "char-lstm": "shakespeare",
    "mobilenetv2": "landmarks",
    "bisenetv2": "camvid",
}
NATURAL = ("femnist-cnn", "char-lstm", "mobilenetv2")
MOST_LAYERS = 24


def pages() -> dict[str, str]:
    """A page for each family."""
    rows = rows_of(PAGE, "## Available models")
    return {
        f"models/{name}.md": one(name, spec, {text: cells for text, cells in rows.items() if text.partition("(")[0] == name})
        for name, spec in MODELS.items()
    }


def one(name: str, spec: type[ModelSpec], rows: dict[str, list[str]]) -> str:
    """The page of a family."""
    made = model_spec(name)
    about = (inspect.getdoc(spec) or "").replace("``", "`")
    lines = [f"# {name}", "", about, ""]
    lines += table(("model", "what it is", "input", "classes", "parameters", "source"), rows.values())
    if isinstance(made, ImageModelSpec):
        lines += [f"It takes images of at least {made.smallest_side()}x{made.smallest_side()} pixels.", ""]
    options = [(code(row["parameter"]), code(row["default"]), row["range"], row["meaning"]) for row in parameter_rows(made, spec())]
    lines += ["## Parameters", "", *(table(("parameter", "default", "range", "meaning"), options) or ["None.", ""])]
    counts = [
        (f"{data}: {'x'.join(map(str, shape))}, {classes} classes", f"{count:,}")
        for data, (shape, classes) in SHAPES.items()
        if (count := count_for(name, data))
    ]
    lines += ["## How many numbers it trains", "", *table(("for", "numbers"), counts)]
    _, _, shape, classes, *_ = rows[name]
    lines += _layers(name, tuple(map(int, shape.split("x"))), int(classes.replace(",", "")))
    data = DATA.get(name, "cifar10")
    partition = "--partition natural --set data.clients=null " if name in NATURAL else ""
    lines += [
        "## Use it",
        "",
        *block([f"fedflat models {name}", f"fedflat run fedavg --dataset {data} --model {name} {partition}--rounds 50"], "bash"),
    ]
    return joined(lines, [f"Choices of init, normalisation and stem, and weights of others: [models](../{PAGE}).", ""])


def _layers(name: str, shape: tuple[int, ...], classes: int) -> list[str]:
    """The tensors by name, where they are few, else how many numbers each child of the network has."""
    with torch.device("meta"):
        network = build(name, shape, classes)
    tensors = [(code(full), "x".join(map(str, p.shape)), f"{p.numel():,}") for full, p in network.named_parameters()]
    head = ["## Layers", "", f"For samples of {'x'.join(map(str, shape))} and {classes:,} classes:", ""]
    if len(tensors) <= MOST_LAYERS:
        return [*head, *table(("tensor", "shape", "numbers"), tensors)]
    children = [
        (code(part), sum(1 for _ in child.parameters()), sum(p.numel() for p in child.parameters()))
        for part, child in network.named_children()
    ]
    children = [(part, count, f"{numbers:,}") for part, count, numbers in children if numbers]
    return [*head, *table(("part", "tensors", "numbers"), children)]
