"""The precision of a problem's matrix products, in place while its model computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from fedflat.flatness.precision import tf32_allowed

P = ParamSpec("P")
T = TypeVar("T")


class HasTf32(Protocol):
    """An object, such as a problem, that says whether a GPU may round its float32 matrix products to TF32."""

    tf32: bool


Owner = TypeVar("Owner", bound=HasTf32)


def at_own_precision(function: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Decorate a function or method so that a GPU uses TF32 in it exactly if its first argument, a problem, allows it.

    Torch's own setting, which is global, is restored afterwards: another run in the same process may differ.
    """

    @functools.wraps(function)
    def scoped(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the decorated function with the problem's precision."""
        with tf32_allowed(owner.tf32):
            return function(owner, *args, **kwargs)

    return scoped
