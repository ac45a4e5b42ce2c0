"""Properties that a model needs in order to be trained by every engine."""

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
"""What torch raises for inputs that a model cannot process."""
TOLERANCE = 1e-4
"""Largest allowed difference between logits that should be equal."""


def check_model(model: nn.Module, input_shape: tuple[int, ...], classes: int, *, batch: int = 4) -> list[str]:
    """Check a user-defined classifier in float32, the precision of training.

    Args:
        model: the model; it is copied, not changed.
        input_shape: shape of one example, without the batch dimension.
        classes: number of classes.
        batch: batch size of the check, at least 2.

    Returns:
        The names of the verified properties.

    Raises:
        Broken: a property does not hold.
        UserError: the model does not accept the inputs.

    >>> check_model(nn.Linear(6, 3), (6,), 3)[0]
    'one row of logits per example'
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"{model!r} is not a model; expected a torch.nn.Module, e.g. fedflat.models.build('cnn', ...)")
    if batch < 2:
        raise UserError(f"batch={batch} is too small for the check; expected at least 2")
    name, verified = type(model).__name__, []
    try:
        with torch.random.fork_rng(devices=[]):  # the check seeds torch's generator, which belongs to the caller
            for property_name, reason in _checks(copy.deepcopy(model).float(), input_shape, classes, batch):
                if reason:
                    raise Broken(name, property_name, reason)
                verified.append(property_name)
    except FAILURES as error:
        raise UserError(
            f"{name} does not accept inputs of shape {tuple(input_shape)}: {str(error).splitlines()[0]}"
        ) from error
    return verified


def _checks(model: nn.Module, input_shape: tuple[int, ...], classes: int, batch: int) -> Iterator[tuple[str, str]]:
    """Yield every property with the reason why the model violates it, which is empty if the property holds.

    Arguments as in ``check_model``. Engines train a flat vector of all weights. Some properties are therefore checked
    with weights that were flattened and restored.
    """
    torch.default_generator.manual_seed(0)
    inputs, targets = torch.randn(batch, *input_shape), torch.arange(batch) % classes
    model.eval()
    with torch.no_grad():
        output, again = model(inputs), model(inputs)
    shape = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
    has_right_shape = shape == (batch, classes)
    reason = "" if has_right_shape else f"the output is {shape}, expected {(batch, classes)}"
    yield "one row of logits per example", reason
    is_same = torch.equal(output, again)
    yield "evaluation is deterministic", "" if is_same else "two passes differ; is something random in evaluation mode?"
    yield "examples are scored independently", _batch_dependence(model, inputs, output)

    layout = Layout.of_parameters(model)
    yield "some parameters are trainable", "" if layout.size else "no parameter has requires_grad"
    weights = layout.flatten({key: parameter.detach() for key, parameter in model.named_parameters()})
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    restored = functional_call(model, {**layout.views(weights), **buffers}, (inputs,)).detach()
    error = float((restored - output).abs().max())
    reason = "" if error < TOLERANCE else f"from a flat vector the output differs by {error:.3g}"
    yield "all weights are parameters", reason
    zeroed = functional_call(model, {**layout.views(torch.zeros_like(weights)), **buffers}, (inputs,))
    reason = "with zero parameters it is the same; does the model keep weights elsewhere?"
    yield "the output depends on the parameters", reason if torch.equal(zeroed, output) else ""

    model.train()
    gradient = _gradient(model, layout, weights, buffers, inputs, targets)
    yield "gradients are finite", "" if bool(gradient.isfinite().all()) else "some are not at the initial weights"
    unused = [key for key, piece in layout.views(gradient).items() if not bool(piece.any())]
    yield "every parameter has a gradient", f"{', '.join(unused[:4])} always has a zero gradient" if unused else ""


def _batch_dependence(model: nn.Module, inputs: Tensor, output: Tensor) -> str:
    """How the first example's logits depend on the rest of the batch; empty if they do not."""
    try:
        alone = model(inputs[:1]).detach()
    except FAILURES as error:
        return (
            f"a batch of one fails: {str(error).splitlines()[0]}; "
            "does the model normalise over the batch without running statistics?"
        )
    difference = float((output[:1] - alone).abs().max())
    return "" if difference < TOLERANCE else f"alone, the first example's logits differ by {difference:.3g}"


def _gradient(
    model: nn.Module, layout: Layout, weights: Tensor, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    """The gradient of the cross-entropy at the flat vector ``weights`` of P parameters, shape (P,)."""

    def loss(point: Tensor) -> Tensor:
        """The cross-entropy with the parameters in the flat vector ``point``."""
        copies = {key: value.clone() for key, value in buffers.items()}  # training mode changes BatchNorm's buffers
        logits = functional_call(model, {**layout.views(point), **copies}, (inputs,))
        return nn.functional.cross_entropy(logits, targets)

    gradient: Tensor = torch.func.grad(loss)(weights)
    return gradient
