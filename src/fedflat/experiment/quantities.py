"""In-run measurements by name, and the short text that selects them."""

from __future__ import annotations

import re
from typing import Any

from fedflat.errors import UserError, one_of

MEASUREMENTS = {
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
DEFAULT_MEASUREMENTS = "lambda_max,drift,gap"


def parse_measurements(text: str) -> list[str]:
    """The measurements named in a text, joined by ``,`` or ``+``; ``all`` selects every one.

    >>> parse_measurements("drift+gap")
    ['drift', 'gap']
    """
    names = [name for name in re.split(r"[,+\s]+", text) if name]
    if not names:
        raise UserError(f"flatness.what is empty; expected some of {', '.join(MEASUREMENTS)}, or all")
    if set(names) == {"all"}:
        return list(MEASUREMENTS)
    for name in names:
        if name not in MEASUREMENTS:
            raise one_of("measurement", name, [*MEASUREMENTS, "all"])
    return list(dict.fromkeys(names))


def parse_flatness(text: str) -> dict[str, Any]:
    """Parse ``every=50,what=drift+gap`` into settings; ``50`` alone means ``every=50``.

    >>> parse_flatness("every=50,what=lambda_max+drift")
    {'every': 50, 'what': 'lambda_max,drift'}
    """
    values: dict[str, Any] = {}
    for assignment in text.split(","):
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if name.isdigit() and not equals and not values:
            name, value = "every", name
        elif not value:
            raise UserError(
                f"cannot read '{assignment.strip()}' in --flatness '{text}'; "
                "expected every=50 or every=50,what=lambda_max+drift"
            )
        if value.isdigit():
            values[name] = int(value)
        elif name == "what":
            values[name] = value.replace("+", ",")
        else:
            values[name] = value
    return values
