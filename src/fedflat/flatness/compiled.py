"""Hessian-vector products compiled whole: less than half the time on a GPU, for some seconds to two minutes at the start."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedflat.errors import one_of

if TYPE_CHECKING:
    from fedflat.flatness.objective import Objective

COMPILE = ("auto", "on", "off")
BACKEND = "inductor"
WORTH = 120.0
"""Seconds of products from which compiling them pays."""

Product = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], Sequence[Tensor]]
"""The Hessian on one batch times a vector: (weights, vector, inputs, targets) to the product, each tensor by tensor."""


class CompiledProduct:
    """A product on batches of one size, compiled at its first call; other batches are for the product as it is.

    The function is run once and written down operation by operation, both derivatives with it, and that is what is compiled: what only the
    gradient would need, such as its own filters' part, is then never computed.
    """

    def __init__(self, product: Product, examples: int) -> None:
        self._product, self._examples = product, examples
        self._fast: Any = None
        self._usable = True

    def __call__(self, weights: Sequence[Tensor], vector: Sequence[Tensor], inputs: Any, targets: Any) -> Sequence[Tensor] | None:
        """The product; None where this batch is not compiled, or cannot be."""
        if not self._usable or not isinstance(inputs, Tensor) or not isinstance(targets, Tensor) or len(targets) != self._examples:
            return None
        try:
            if self._fast is None:
                written = make_fx(self._product)(weights, vector, inputs, targets)
                written.graph.eliminate_dead_code()
                written.recompile()
                self._fast = torch.compile(written, dynamic=False, fullgraph=True, backend=BACKEND)
            with torch.no_grad():
                found: Sequence[Tensor] = self._fast(weights, vector, inputs, targets)
        except Exception as error:  # compilers fail in many ways; a mistake of the user's own comes back from the product as it is
            self._usable = False
            warnings.warn(f"the Hessian product could not be compiled and runs as it is ({type(error).__name__})", stacklevel=2)
            return None
        return found


def compile_where_it_pays(objective: Objective, compile: str, products: int) -> None:
    """Compile an objective's products where that is asked for; with ``auto``, on a GPU on which so many would take minutes.

    On a CPU, where numbers are the same to the last digit from run to run, nothing may hang on how fast it is at the moment.
    """
    if compile not in COMPILE:
        raise one_of("value of compile", compile, COMPILE)
    if compile == "on" or (compile == "auto" and objective.device.type == "cuda" and products * _seconds(objective) > WORTH):
        objective.compile()


def _seconds(objective: Objective) -> float:
    """About how long a product takes, from one on the first batch."""
    first = objective.on(objective.batches[:1])
    for _ in range(2):  # the first chooses its kernels
        torch.cuda.synchronize(objective.device)
        begun = time.perf_counter()
        first.hessian_product(None, objective.weights)
        torch.cuda.synchronize(objective.device)
    return (time.perf_counter() - begun) * len(objective.batches)
