"""Gradients in any of torch's grad modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedflat.errors import UserError


@contextmanager
def gradients_enabled() -> Iterator[None]:
    """Let torch record gradients within the context, e.g. inside the caller's ``torch.no_grad()``.

    Raises a ``UserError`` inside ``torch.inference_mode()``, whose tensors have no gradients.

    >>> with torch.no_grad(), gradients_enabled():
    ...     torch.is_grad_enabled()
    True
    """
    if torch.is_inference_mode_enabled():
        raise UserError("torch.inference_mode() disables gradients; call this outside of it or in torch.no_grad()")
    with torch.enable_grad():
        yield
