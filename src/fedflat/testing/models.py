"""Properties that a model needs in order to be trained by every engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedflat.engines.problem.multilabel import MultiLabel
from fedflat.engines.problem.regression import Huber, Regression
from fedflat.engines.problem.task import TASK_TARGETS, Classification, Task
from fedflat.errors import UserError, first_line, one_of
from fedflat.models.layout import Layout
from fedflat.testing.broken import verify

FAILURES = (RuntimeError, ValueError, IndexError, TypeError)
"""What torch raises for inputs that a model cannot process."""
TOLERANCE = 1e-4
"""Largest allowed difference between outputs that should be equal."""
TASKS: dict[str, Task] = {
    "classification": Classification(),
    "mse": Regression(),
    "huber": Huber(),
    "bce": MultiLabel(),
}
"""Tasks by the names that ``check_model`` accepts."""


def check_model(
    model: nn.Module, input_shape: tuple[int, ...], classes: int, *, task: str = "classification", batch_size: int = 4
) -> list[str]:
    """Check a user-defined model in float32, the precision of training.

    Args:
        model: the model; it is copied, not changed.
        input_shape: shape of one example, without the batch dimension.
        classes: number of classes; for regression the number of target columns, for multi-label models of labels.
        task: ``classification``, ``mse`` or ``huber`` (regression), or ``bce`` (multi-label).
        batch_size: batch size of the check, at least 2.

    Returns:
        The names of the verified properties.

    Raises:
        Broken: a property does not hold.
        UserError: the model does not accept the inputs.

    >>> check_model(nn.Linear(6, 3), (6,), 3)[0]
    'one row of outputs per example'
    >>> len(check_model(nn.Linear(6, 1), (6,), 1, task="mse"))
    8
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"{model!r} is not a model; expected a torch.nn.Module, e.g. fedflat.models.build('cnn', ...)")
    if batch_size < 2:
        raise UserError(f"batch_size={batch_size} is too small for the check; expected at least 2")
    if task not in TASKS:
        raise one_of("task", task, TASKS)
    name = type(model).__name__
    try:
        with torch.random.fork_rng(devices=[]):  # the check seeds torch's generator, which belongs to the caller
            return verify(name, _checks(copy.deepcopy(model).float(), input_shape, classes, task, batch_size))
    except FAILURES as error:
        raise UserError(f"{name} does not accept inputs of shape {tuple(input_shape)}: {first_line(error)}") from error


def _checks(
    model: nn.Module, input_shape: tuple[int, ...], classes: int, task: str, batch_size: int
) -> Iterator[tuple[str, str]]:
    """Yield every property with the reason why the model violates it; the reason is empty if the property holds.

    Engines train a flat vector of all weights, so some properties are checked with weights that were flattened and
    restored.

    Args:
        model: the model, which may be changed.
        input_shape: shape of one example, without the batch dimension.
        classes: number of classes, target columns or labels.
        task: name of the task, a key of ``TASKS``.
        batch_size: batch size.
    """
    torch.default_generator.manual_seed(0)
    inputs = torch.randn(batch_size, *input_shape, dtype=torch.float32)
    targets = _targets(TASK_TARGETS[task], batch_size, classes)
    model.eval()
    with torch.no_grad():
        output, again = model(inputs), model(inputs)
    shape = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
    is_column = shape == (batch_size,) and classes == 1 and TASK_TARGETS[task] == "numbers"
    has_right_shape = shape == (batch_size, classes) or is_column
    reason = "" if has_right_shape else f"the output is {shape}, expected {(batch_size, classes)}"
    yield "one row of outputs per example", reason
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
    gradient = _gradient(model, TASKS[task], layout, weights, buffers, inputs, targets)
    yield "gradients are finite", "" if bool(gradient.isfinite().all()) else "some are not at the initial weights"
    unused = [key for key, piece in layout.views(gradient).items() if not bool(piece.any())]
    yield "every parameter has a gradient", f"{', '.join(unused[:4])} always has a zero gradient" if unused else ""


def _targets(target_type: str, batch_size: int, columns: int) -> Tensor:
    """Return targets of the type ``classes``, ``numbers`` or ``labels``.

    Classes are integers of shape (batch_size,), numbers are floats of shape (batch_size, columns), and labels are
    booleans of shape (batch_size, columns).
    """
    if target_type == "classes":
        return torch.arange(batch_size) % columns
    numbers = torch.randn(batch_size, columns, dtype=torch.float32)
    return numbers if target_type == "numbers" else numbers > 0


def _batch_dependence(model: nn.Module, inputs: Tensor, output: Tensor) -> str:
    """Return how the first example's outputs depend on the rest of the batch; empty if they do not."""
    try:
        alone = model(inputs[:1]).detach()
    except FAILURES as error:
        return (
            f"a batch of one fails: {first_line(error)}; "
            "does the model normalise over the batch without running statistics?"
        )
    difference = float((output[:1] - alone).abs().max())
    return "" if difference < TOLERANCE else f"alone, the first example's outputs differ by {difference:.3g}"


def _gradient(
    model: nn.Module,
    task: Task,
    layout: Layout,
    weights: Tensor,
    buffers: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return the gradient of the task's loss on a batch at the flat vector ``weights`` of P parameters, shape (P,)."""

    def loss(point: Tensor) -> Tensor:
        """The loss with the parameters in the flat vector ``point``."""
        copies = {key: value.clone() for key, value in buffers.items()}  # training mode changes BatchNorm's buffers
        return task.loss(functional_call(model, {**layout.views(point), **copies}, (inputs,)), targets)

    gradient: Tensor = torch.func.grad(loss)(weights)
    return gradient
