"""A page for each model, generated from the registry."""

from __future__ import annotations

import torch

from fedflat.cli.lookup.models import SHAPES, count_for
from fedflat.models import MODELS, ImageModelSpec, ModelSpec, build, parameter_count
from fedflat.models.registry import shape_text
from making.markdown import about, block, code, joined, table
from making.specs import parameter_table

PAGE = "models.md"
MAX_LAYERS = 24
"""A network with more parameter tensors is listed by its child modules instead of its tensors."""


def pages() -> dict[str, str]:
    """The page of every registered model, by path."""
    return {f"models/{name}.md": page(name, spec) for name, spec in MODELS.items()}


def page(name: str, spec: type[ModelSpec]) -> str:
    """The page of a model."""
    lines = [f"# {name}", "", about(spec), ""]
    variants = [
        (
            code(example.text),
            shape_text(example.input_shape),
            f"{example.classes:,}",
            f"{parameter_count(example.text, example.input_shape, example.classes):,}",
            example.source,
        )
        for example in spec.examples
    ]
    lines += table(("model", "input", "classes", "parameters", "source"), variants) if variants else []
    model = spec()
    if isinstance(model, ImageModelSpec):
        lines += [f"Smallest image: {model.smallest_side()}x{model.smallest_side()} pixels.", ""]
    lines += parameter_table(model) or ["## Parameters", "", "None.", ""]
    counts = [
        (f"{data}: {shape_text(shape)}, {classes} classes", f"{count:,}")
        for data, (shape, classes) in SHAPES.items()
        if (count := count_for(name, data))
    ]
    if counts:
        lines += ["## Number of trainable parameters", "", *table(("input", "parameters"), counts)]
    if spec.examples:
        shape, classes = spec.examples[0].input_shape, spec.examples[0].classes
        lines += _layers(name, shape, classes)
        lines += [f'The exact modules: `print(fedflat.models.build("{name}", {shape}, {classes}))`.', ""]
    partition = "--partition natural " if spec.partition == "natural" else ""
    text = f"'{spec.example}'" if spec.example else name
    command = f"fedflat run fedavg --dataset {spec.dataset} --model {text} {partition}--rounds 50"
    lines += ["## Usage", "", *block([f"fedflat models {name}", command], "bash")]
    return joined(lines, [f"See also: [models](../{PAGE}): initialisation, normalisation, pretrained weights.", ""])


def _layers(name: str, shape: tuple[int, ...], classes: int) -> list[str]:
    """A table of the parameter tensors or, if there are more than ``MAX_LAYERS``, of the network's child modules."""
    with torch.device("meta"):
        network = build(name, shape, classes)
    head = ["## Layers", "", f"For inputs of shape {shape_text(shape)} and {classes:,} classes:", ""]
    tensors = [(code(full), shape_text(tuple(p.shape)), f"{p.numel():,}") for full, p in network.named_parameters()]
    if len(tensors) <= MAX_LAYERS:
        return [*head, *table(("tensor", "shape", "parameters"), tensors)]
    children = [
        (code(child_name), sum(1 for _ in child.parameters()), f"{sum(p.numel() for p in child.parameters()):,}")
        for child_name, child in network.named_children()
        if any(True for _ in child.parameters())
    ]
    return [*head, *table(("part", "tensors", "parameters"), children)]
