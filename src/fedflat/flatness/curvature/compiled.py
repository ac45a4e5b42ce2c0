"""Hessian-vector products compiled whole: less than half the time on a GPU, for some seconds to two minutes at the start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BACKEND = "inductor"
Product = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], Sequence[Tensor]]
"""The Hessian on one batch times a vector: (weights, vector, inputs, targets) to the product, each tensor by tensor."""


class CompiledProduct:
    """A product on batches of one size and shape, compiled at its first call; other batches are for the product as it is.

    The function is run once and written down operation by operation, both derivatives with it, and that is what is compiled: what only the
    gradient would need, such as its own filters' part, is then never computed.
    """

    def __init__(self, product: Product, examples: int) -> None:
        self._product, self._examples = product, examples
        self._shape: torch.Size | None = None
        self._fast: Any = None
        self._usable = True

    def __call__(
        self, weights: Sequence[Tensor], vector: Sequence[Tensor], inputs: Any, targets: Any
    ) -> Sequence[Tensor] | None:
        """The product; None where this batch is not compiled, or cannot be."""
        if (
            not self._usable
            or not isinstance(inputs, Tensor)
            or not isinstance(targets, Tensor)
            or len(targets) != self._examples
        ):
            return None
        self._shape = self._shape or inputs.shape
        if inputs.shape != self._shape:
            return None
        try:
            if self._fast is None:
                from torch.fx.experimental.proxy_tensor import make_fx

                written = make_fx(self._product)(weights, vector, inputs, targets)
                written.graph.eliminate_dead_code()
                written.recompile()
                self._fast = torch.compile(written, dynamic=False, fullgraph=True, backend=BACKEND)
            with torch.no_grad():
                found: Sequence[Tensor] = self._fast(weights, vector, inputs, targets)
        except torch.OutOfMemoryError:
            raise
        except (
            Exception
        ) as error:  # compilers fail in many ways; a mistake of the user's own comes back from the product as it is
            self._usable = False
            warnings.warn(
                f"the Hessian product could not be compiled and runs as it is ({type(error).__name__})", stacklevel=2
            )
            return None
        return found
