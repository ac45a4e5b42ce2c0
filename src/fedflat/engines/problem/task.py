"""What a model is trained for: its loss and its metrics. Users may bring their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.errors import UserError


@runtime_checkable
class Task(Protocol):
    """A loss to train on, and metrics that add up over batches."""

    @property
    def metric(self) -> str:
        """The name of the metric by which models are compared; higher is better."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch."""
        ...

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Every metric, and ``loss``, summed over the examples of a batch; divided by the number of examples in the end."""
        ...


@runtime_checkable
class Pooling(Task, Protocol):
    """A task whose metrics are no means over examples: its sums, which may be tensors of any shape, become figures in the end."""

    def finish(self, totals: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """Every metric, and ``loss``, from what was summed over so many examples."""
        ...

    def by_class(self, totals: Mapping[str, Tensor]) -> dict[int, dict[str, float]]:
        """The metrics of each class that occurs, and under ``examples`` how many have it."""
        ...


@dataclass(frozen=True)
class Classification:
    """Cross-entropy, and the share of examples classified right."""

    metric: str = "accuracy"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(output, target)

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Summed cross-entropy and the number of right answers."""
        right = (output.argmax(1) == target).sum()
        return {"loss": F.cross_entropy(output, target, reduction="sum"), "accuracy": right}


@dataclass(frozen=True)
class OwnLoss(Classification):
    """Classification trained on a loss of your own: a function of outputs and targets that gives the mean over a batch."""

    function: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The function's value; one that nothing can be learned from is refused."""
        if torch.compiler.is_compiling():
            return self.function(output, target)
        try:
            loss = self.function(output, target)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            shapes = f"{tuple(output.shape)} and {tuple(target.shape)}"
            raise UserError(
                f"the loss fails on outputs and targets of shapes {shapes}: {str(error).splitlines()[0]}"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(
                f"the loss of a batch is {found}; expected a tensor with one number, the mean over its examples"
            )
        if output.requires_grad and not loss.requires_grad:
            raise UserError("the loss has no gradient; leave out detach(), item() and torch.no_grad() on the way to it")
        return loss

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The function's value times the examples, and the number of right answers."""
        return {**super().sums(output, target), "loss": self.loss(output, target) * len(target)}


@dataclass(frozen=True)
class NextCharacter:
    """Cross-entropy per character, and the share of characters predicted right; the positions of an example count as one.

    Logits are [batch, length, characters] and targets [batch, length]. Where targets are [batch], one per text, the logits at the last
    position are meant, or the model gives one row of logits per text anyway.
    """

    metric: str = "accuracy"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy over the characters of a batch."""
        return F.cross_entropy(*_per_character(output, target))

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Cross-entropy and right answers, each the mean over an example's characters, summed over examples."""
        logits, characters = _per_character(output, target)
        length = characters.numel() // len(target)
        right = (logits.argmax(1) == characters).sum()
        return {"loss": F.cross_entropy(logits, characters, reduction="sum") / length, "accuracy": right / length}


def _per_character(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, characters] and targets [n], one row for each character that is to be predicted."""
    if output.ndim == 3 and target.ndim == 1:
        output = output[:, -1]
    return output.reshape(-1, output.shape[-1]), target.reshape(-1)


def check_metric(task: Task) -> None:
    """Refuse the loss as the metric: best models, targets and patience all take the higher figure for the better one."""
    if task.metric == "loss":
        raise UserError(
            "the task's metric is 'loss', but models are compared by a metric of which more is better; "
            "name another of its sums, for example one that is minus the loss"
        )


def task_for(kind: str) -> Task:
    """The task of a kind of dataset: text is predicted character by character, masks pixel by pixel, everything else is classified."""
    if kind == "segmentation":
        from fedflat.engines.problem.segmentation import Segmentation

        return Segmentation()
    return NextCharacter() if kind == "text" else Classification()
