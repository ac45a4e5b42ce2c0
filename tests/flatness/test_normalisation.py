"""Our GroupNorm and LayerNorm have the same values, first and second derivatives as torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.flatness.curvature.second_order import TwiceDifferentiable

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
KINDS: dict[str, tuple[Norm, tuple[int, ...], tuple[int, ...]]] = {
    "groups of an image": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 6, 4, 5), (6,)),
    "groups, channels last": (
        lambda x, w, b: F.group_norm(x.to(memory_format=torch.channels_last), 3, w, b, eps=1e-2),
        (3, 6, 4, 5),
        (6,),
    ),
    "one group of a line": (lambda x, w, b: F.group_norm(x, 1, w, b), (2, 4, 7), (4,)),
    "groups of vectors": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 8), (8,)),
    "groups without scales": (lambda x, w, b: F.group_norm(x, 2) * w.sum() * b.sum(), (3, 6, 4, 5), (6,)),
    "layers": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (3, 5, 6), (6,)),
    "layers over two axes": (lambda x, w, b: F.layer_norm(x, (5, 6), w, b, 1e-3), (3, 5, 6), (5, 6)),
    "layers without shifts": (lambda x, w, b: F.layer_norm(x, (6,), w) * b.sum(), (3, 5, 6), (6,)),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", KINDS)
def test_values_and_both_derivatives_are_those_of_torch(name: str) -> None:
    function, shape, scales = KINDS[name]
    x, w, b = drawn(*shape), drawn(*scales, seed=1), drawn(*scales, seed=2)

    def derivatives() -> list[Tensor]:
        y = function(x, w, b)
        first = torch.autograd.grad((y**3).sum(), [x, w, b], create_graph=True)
        second = torch.autograd.grad([piece.sin().sum() for piece in first], [x, w, b])
        return [y, *first, *second]

    theirs = derivatives()
    with TwiceDifferentiable():
        ours = derivatives()
    assert type(ours[0].grad_fn) is not type(theirs[0].grad_fn) or "Norm" not in type(theirs[0].grad_fn).__name__
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_second_derivatives_are_those_of_finite_differences() -> None:
    def norms(x: Tensor, w: Tensor) -> Tensor:
        with TwiceDifferentiable():
            return F.layer_norm(F.group_norm(x, 2, w), (3, 2))

    inputs = drawn(2, 4, 3, 2), drawn(4, seed=1)
    assert torch.autograd.gradcheck(norms, inputs) and torch.autograd.gradgradcheck(norms, inputs)


def test_modules_use_them_in_either_memory_format_without_a_copy() -> None:
    network = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU()).double()
    x = drawn(2, 4, 3, 3).detach().to(memory_format=torch.channels_last)
    with TwiceDifferentiable():
        found = network(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, network(x))
