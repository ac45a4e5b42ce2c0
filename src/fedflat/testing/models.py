"""What a model must keep to be trained on every engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedflat.errors import UserError
from fedflat.models.layout import Layout
from fedflat.testing.broken import Broken

FAILURES = (RuntimeError, ValueError, IndexError)
"""What torch raises where a model cannot take its inputs."""


def check_model(model: nn.Module, input_shape: tuple[int, ...], classes: int, *, batch: int = 4) -> list[str]:
    """Check a model of your own on images or vectors of a shape, and return the names of what it keeps.

    It is checked in float32, in which runs train a model of any precision.

    >>> check_model(nn.Linear(6, 3), (6,), 3)[0]
    'one row of logits per example'
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{model!r} is no model; expected a torch.nn.Module, such as fedflat.models.build('cnn', (3, 32, 32), 10) makes"
        )
    if batch < 2:
        raise UserError(f"a batch of {batch} shows too little; expected at least 2")
    name, kept = type(model).__name__, []
    try:
        with torch.random.fork_rng(devices=[]):  # the checks seed it, and it is the caller's
            for identity, how in _checks(copy.deepcopy(model).float(), input_shape, classes, batch):
                if how:
                    raise Broken(name, identity, how)
                kept.append(identity)
    except FAILURES as error:
        raise UserError(
            f"{name} cannot be used on inputs of shape {tuple(input_shape)}: {str(error).splitlines()[0]}"
        ) from error
    return kept


def _checks(model: nn.Module, input_shape: tuple[int, ...], classes: int, batch: int) -> Iterator[tuple[str, str]]:
    torch.default_generator.manual_seed(0)
    inputs, targets = torch.randn(batch, *input_shape), torch.arange(batch) % classes
    model.eval()
    with torch.no_grad():
        output, again = model(inputs), model(inputs)
    shape = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
    yield (
        "one row of logits per example",
        "" if shape == (batch, classes) else f"the output is {shape}, expected {(batch, classes)}",
    )
    yield (
        "evaluation is the same every time",
        "" if torch.equal(output, again) else "two passes differ; is something random in evaluation?",
    )
    yield "examples are scored one by one", _changed_alone(model, inputs, output)

    layout = Layout.of_parameters(model)
    yield "something is trained", "" if layout.size else "no parameter has requires_grad"
    weights = layout.flatten({key: p.detach() for key, p in model.named_parameters()})
    frozen = {key: b.clone() for key, b in model.named_buffers()}
    same = functional_call(model, {**layout.views(weights), **frozen}, (inputs,)).detach()
    apart = float((same - output).abs().max())
    yield (
        "weights are all in its parameters",
        "" if apart < 1e-4 else f"from a flat vector its output differs by {apart:.3g}",
    )
    other = functional_call(model, {**layout.views(torch.zeros_like(weights)), **frozen}, (inputs,))
    moved = not torch.equal(other, output)
    yield (
        "its output follows the weights it is given",
        "" if moved else "with zeros it is the same: does it keep weights elsewhere?",
    )

    model.train()
    gradient = _gradient(model, layout, weights, frozen, inputs, targets)
    yield "gradients are finite", "" if bool(gradient.isfinite().all()) else "some are not at fresh weights"
    idle = [key for key, piece in layout.views(gradient).items() if not bool(piece.any())]
    yield (
        "every tensor takes part",
        "" if not idle else f"{', '.join(idle[:4])} {'has' if len(idle) == 1 else 'have'} no gradient at all",
    )


def _changed_alone(model: nn.Module, inputs: Tensor, output: Tensor) -> str:
    """How the logits of the first example differ where it is the only one; empty where they do not."""
    try:
        alone = model(inputs[:1]).detach()
    except FAILURES as error:
        return f"a batch of one is not taken: {str(error).splitlines()[0]}; does it normalise by the batch, without running statistics?"
    apart = float((output[:1] - alone).abs().max())
    return "" if apart < 1e-4 else f"alone, the first example's logits differ by {apart:.3g}"


def _gradient(
    model: nn.Module, layout: Layout, weights: Tensor, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    def loss(point: Tensor) -> Tensor:
        own = {key: value.clone() for key, value in buffers.items()}
        return nn.functional.cross_entropy(functional_call(model, {**layout.views(point), **own}, (inputs,)), targets)

    found: Tensor = torch.func.grad(loss)(weights)
    return found
