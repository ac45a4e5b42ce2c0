"""The segmentation task: hard-pixel mining and mIoU, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedflat.data import IGNORED
from fedflat.engines.problem.segmentation import Segmentation
from fedflat.engines.problem.task import Classification, PooledTask, Task, Totals


def logits_for(losses: list[list[float]]) -> torch.Tensor:
    """Two-class logits [n, 2, 1, pixels] with given cross-entropies of class 0: log(1 + e^z) = loss."""
    z = torch.tensor(losses, dtype=torch.float64).expm1().log()
    return torch.stack([torch.zeros_like(z), z], 1)[:, :, None]


def test_the_mean_over_the_hardest_quarter_by_hand() -> None:
    logits = logits_for([[1.0, 5.0, 2.0, 3.0, 0.5, 4.0, 0.2, 0.1], [9.0, 0.3, 0.4, 8.0, 7.0, 0.1, 0.2, 0.6]])
    target = torch.zeros(2, 1, 8, dtype=torch.uint8)
    assert Segmentation().loss(logits, target).item() == pytest.approx((5 + 4 + 9 + 8) / 4), (
        "two of eight in each image"
    )
    assert Segmentation(hard=1.0).loss(logits, target).item() == pytest.approx((15.8 + 25.6) / 16)
    assert Segmentation(hard=0.01).loss(logits, target).item() == pytest.approx((5 + 9) / 2), "at least one"


def test_ignored_pixels_are_neither_mined_nor_counted() -> None:
    logits = logits_for([[1.0, 50.0, 2.0, 3.0, 50.0, 4.0, 50.0, 50.0], [9.0, 0.3, 0.4, 8.0, 7.0, 0.1, 0.2, 0.6]])
    target = torch.zeros(2, 1, 8, dtype=torch.uint8)
    target[0, 0, [1, 4, 6, 7]] = IGNORED
    assert Segmentation().loss(logits, target).item() == pytest.approx((4 + 9 + 8) / 3), "one of four, two of eight"
    target[0] = IGNORED
    assert Segmentation().loss(logits, target).item() == pytest.approx((9 + 8) / 2)
    assert int(Segmentation().weight(target)) == 2, "the weight of this batch in a mean over batches"
    target[1] = IGNORED
    assert int(Segmentation().weight(target)) == 0
    nothing = logits.clone().requires_grad_()
    loss = Segmentation().loss(nothing, target)
    (gradient,) = torch.autograd.grad(loss, nothing)
    assert loss.item() == 0 and torch.equal(gradient, torch.zeros_like(gradient)), (
        "where nothing counts, nothing is learnt"
    )


def test_a_teacher_is_compared_on_valid_pixels_of_the_main_head() -> None:
    logits, teacher = torch.randn(2, 2, 3, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(2, 1, 8, dtype=torch.uint8)
    target[0, 0, 3:] = IGNORED
    own, theirs = ((each / 2).softmax(1) for each in (logits, teacher))
    divergences = (theirs * (theirs / own).log()).sum(1)
    expected = (divergences[0, 0, :3].sum() + divergences[1].sum()) / 11
    for output, teacher_output in ((logits, teacher), ((logits, teacher), (teacher, logits))):
        found = Segmentation().distillation(output, teacher_output, target, 2.0)
        assert found.item() == pytest.approx(expected.item())


def test_only_the_hardest_pixels_have_a_gradient() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(3, 4, 6, 6, dtype=torch.float64, requires_grad=True), torch.randint(4, (3, 6, 6))
    (gradient,) = torch.autograd.grad(Segmentation().loss(logits, target), logits)
    assert (gradient.abs().sum(1) > 0).flatten(1).sum(1).tolist() == [9, 9, 9]
    plain = nn.functional.cross_entropy(logits, target)
    assert Segmentation(hard=1.0).loss(logits, target).item() == pytest.approx(plain.item())


def test_auxiliary_heads_add_their_own_mined_losses() -> None:
    torch.manual_seed(0)
    heads, target = tuple(torch.randn(2, 3, 4, 4) for _ in range(5)), torch.randint(3, (2, 4, 4))
    alone = [Segmentation().loss(head, target).item() for head in heads]
    assert Segmentation().loss(heads, target).item() == pytest.approx(sum(alone))
    assert Segmentation(auxiliary=0.4).loss(heads, target).item() == pytest.approx(alone[0] + 0.4 * sum(alone[1:]))
    assert Segmentation().sums(heads, target)["confusion"].equal(Segmentation().sums(heads[0], target)["confusion"])


def certain(guess: torch.Tensor, classes: int = 4) -> torch.Tensor:
    return 100 * nn.functional.one_hot(guess, classes).movedim(-1, 1).double()


TRUTH = torch.tensor([[[0, 0, 0, 1], [1, 1, 255, 255]], [[0, 2, 2, 2], [2, 0, 0, 0]]])
GUESS = torch.tensor([[[0, 0, 1, 1], [1, 0, 0, 3]], [[0, 2, 2, 0], [2, 0, 0, 3]]])


def test_intersection_over_union_by_hand() -> None:
    totals = Totals(Segmentation())
    totals.add(Segmentation().sums(certain(GUESS), TRUTH.to(torch.uint8)), 2)
    assert totals.sums["confusion"].tolist() == [[5, 1, 0, 1], [1, 2, 0, 0], [1, 0, 3, 0], [0, 0, 0, 0]]
    figures = totals.metrics()
    # Class 3 is predicted but never true: class 0 loses a pixel, and class 3 has no score.
    assert figures["miou"] == pytest.approx((5 / 9 + 2 / 4 + 3 / 4) / 3) and figures["pixel_accuracy"] == pytest.approx(
        10 / 14
    )
    each = Segmentation().by_class(totals.sums)
    assert {label: one["miou"] for label, one in each.items()} == pytest.approx({0: 5 / 9, 1: 0.5, 2: 0.75})
    assert {label: one["examples"] for label, one in each.items()} == {0: 2, 1: 1, 2: 1}
    assert figures["loss"] == pytest.approx(4 * 100 / 14) and each[0]["loss"] == pytest.approx(2 * 100 / 7)


def test_metrics_do_not_depend_on_the_batch_size() -> None:
    task, whole, parts = Segmentation(), Totals(Segmentation()), Totals(Segmentation())
    torch.manual_seed(1)
    logits, target = torch.randn(5, 4, 6, 7, dtype=torch.float64), torch.randint(0, 4, (5, 6, 7))
    target[0, :2] = IGNORED
    whole.add(task.sums(logits, target), 5)
    for rows in ([0], [1, 2, 3], [4]):
        parts.add(task.sums(logits[rows], target[rows]), len(rows))
    assert whole.metrics() == pytest.approx(parts.metrics()) and parts.count == 5
    assert whole.metrics()["miou"] == pytest.approx(
        np.mean([one["miou"] for one in task.by_class(whole.sums).values()])
    ), "the mean over classes"


def test_other_tasks_are_means_over_examples() -> None:
    assert isinstance(Segmentation(), PooledTask) and isinstance(Segmentation(), Task)
    assert not isinstance(Classification(), PooledTask)
    totals = Totals(Classification())
    totals.add({"loss": torch.tensor(3.0), "accuracy": torch.tensor(1)}, 2)
    totals.add({"loss": torch.tensor(1.0), "accuracy": torch.tensor(1)}, 2)
    assert totals.metrics() == {"loss": 1.0, "accuracy": 0.5}
