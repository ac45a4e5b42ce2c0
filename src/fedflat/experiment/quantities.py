"""In-run measurements by name, and the short text that selects them."""

from __future__ import annotations

import re
from typing import Any

from fedflat.errors import UserError, one_of

WHAT = {
    "lambda_max": "largest Hessian eigenvalue of the training loss, per model (about 20 Hessian-vector products each)",
    "sharpness": "increase of the training loss after an ascent step of length 0.05, per model (one gradient each)",
    "gap": "test minus training loss, per model; the participation gap if some clients never train (forward passes)",
    "drift": "alignment of client updates with the cohort and the momentum, norms of control variates (free)",
    "clients": "lambda_max of each client's model on its own data (about 20 Hessian-vector products per client)",
    "classes": "accuracy per class, and on the data of each sampled client (forward passes)",
    "features": "norm of the output features on the data of each sampled client (forward passes)",
    "noise": "L, beta, sigma, sigma_g and gradient disagreement (gradients per client and per example, lambda_max)",
}
"""The available measurements, with their cost."""

DEFAULT = "lambda_max,drift,gap"


def wanted_names(text: str) -> list[str]:
    """The measurements named in a text, joined by ``,`` or ``+``; ``all`` selects every one.

    >>> wanted_names("drift+gap")
    ['drift', 'gap']
    """
    names = list(dict.fromkeys(name for name in re.split(r"[,+\s]+", text) if name))
    if names == ["all"]:
        return list(WHAT)
    for name in names:
        if name not in WHAT:
            raise one_of("measurement", name, [*WHAT, "all"])
    if not names:
        raise UserError(f"flatness.what is empty; expected some of {', '.join(WHAT)}, or all")
    return names


def flatness_values(text: str) -> dict[str, Any]:
    """Parse ``every=50,what=drift+gap`` into settings; ``50`` alone means ``every=50``.

    >>> flatness_values("every=50,what=lambda_max+drift")
    {'every': 50, 'what': 'lambda_max,drift'}
    """
    values: dict[str, Any] = {}
    for piece in (piece.strip() for piece in text.split(",")):
        name, equals, value = (part.strip() for part in piece.partition("="))
        if not equals and name.isdigit() and not values:
            name, value = "every", name
        elif not equals or not value:
            raise UserError(
                f"cannot read '{piece}' in --flatness '{text}'; expected every=50 or every=50,what=lambda_max+drift"
            )
        values[name] = int(value) if value.isdigit() else ",".join(value.split("+")) if name == "what" else value
    return values
