"""What can be looked at while a run trains, by name, and how a short text asks for it."""

from __future__ import annotations

import re
from typing import Any

from fedflat.errors import UserError, one_of

WHAT = {
    "lambda_max": "largest eigenvalue of the Hessian of the training loss, of every model (some 20 Hessian products each)",
    "sharpness": "how far the training loss rises by an ascent of 0.05 along the gradient, of every model (a gradient each)",
    "gap": "test less training loss, of every model; the participation gap where clients never train (10,000 forward passes)",
    "drift": "each client's update beside the cohort's, agreement with the momentum, norms of control variates (nothing is trained or run)",
    "clients": "lambda_max of each client's model on its own data (some 20 Hessian products per client of the cohort)",
    "classes": "accuracy on each class, and on the data of each client that is looked at (forward passes)",
    "features": "norm of the output features on the data of each client that is looked at (forward passes)",
    "noise": "L, beta, sigma, sigma_g and the disagreement of gradients (a gradient per client and ten of single examples, lambda_max)",
}
"""Everything that can be looked at, with what it costs."""

DEFAULT = "lambda_max,drift,gap"


def wanted_names(text: str) -> list[str]:
    """The names in a text, joined by commas or +; all of them for ``all``.

    >>> wanted_names("drift+gap")
    ['drift', 'gap']
    """
    names = list(dict.fromkeys(name for name in re.split(r"[,+\s]+", text) if name))
    if names == ["all"]:
        return list(WHAT)
    for name in names:
        if name not in WHAT:
            raise one_of("thing to look at", name, [*WHAT, "all"])
    if not names:
        raise UserError(f"flatness.what is empty; expected some of {', '.join(WHAT)}, or all")
    return names


def flatness_values(text: str) -> dict[str, Any]:
    """The settings of a text such as ``every=50,what=drift+gap``; ``50`` alone is ``every=50``.

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
