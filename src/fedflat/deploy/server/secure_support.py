"""Which experiments can be summed securely: those that need only one weighted sum of everything that clients send.

Two sums of the same updates with different weights would reveal more than their mean; of two clients, everything.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fedflat.algorithms.algorithm import Algorithm, flat_fields, flat_state, nested_state
from fedflat.algorithms.slot import CohortMeans
from fedflat.deploy.settings import Deployment
from fedflat.engines.round.contract import Training
from fedflat.errors import UserError

OTHERS = "such as fedavg, fedsam or, with federation.weighting=uniform, scaffold or fedmoswa"


def require_support(training: Training, algorithm: str, deployment: Deployment) -> None:
    """Raise ``UserError`` if the deployment has secure aggregation, but the experiment cannot have it.

    ``algorithm`` is the text that names the algorithm.
    """
    if not deployment.secure_aggregation:
        return
    conflict = secure_aggregation_conflict(training)
    if conflict:
        raise UserError(f"deploy.secure_aggregation does not work with {algorithm}: {conflict}")
    if deployment.minimum < 2:
        raise UserError(
            f"deploy.minimum={deployment.minimum} lets deploy.secure_aggregation reveal the update of a single site; "
            "set deploy.minimum to at least 2"
        )


def secure_aggregation_conflict(training: Training) -> str:
    """Say why the server must see single updates or several sums, and what to do; empty if one sum is enough."""
    algorithm, aggregation = training.algorithm, training.aggregation
    weighting = aggregation.weighting
    if aggregation.needs_rows:
        return f"federation.aggregation={aggregation.centre} compares single updates; use mean"
    if algorithm.weights.are_chosen:
        return f"the server chooses the weights of clients from single messages; use another algorithm, {OTHERS}"
    weightings = {name: field.weighting for name, field in flat_fields(algorithm.message_fields()).items()}
    if algorithm.drift.full_gradient == "common":
        weightings["the common gradient"] = "samples"
    for name, other in weightings.items():
        if other not in ("aggregation", weighting):
            return (
                f"updates are weighted by {weighting}, but {name} by {other}, and sums with different weights would "
                f"reveal more than one; set federation.weighting={other}"
            )
    equal_steps = training.plan.steps is not None and not training.plan.partial
    needed = [name for name in unavailable_means(training, equal_steps) if _depends_on(algorithm, name)]
    if not needed:
        return ""
    if weighting == "samples" and needed != ["displacement"]:
        return "the server also needs the mean of the updates with equal weights; set federation.weighting=uniform"
    if needed == ["direction"]:
        return (
            "the server divides updates by the clients' sums of learning rates, which must be equal; "
            "set training.local_steps, and remove federation.partial"
        )
    return f"the server needs the mean of the updates and of their quotients; use another algorithm, {OTHERS}"


def unavailable_means(training: Training, equal_steps: bool) -> list[str]:
    """Return the fields of ``CohortMeans`` that do not follow from one sum; do all clients take equally many steps?"""
    if training.algorithm.drift.displacement_divisor is not None:
        return ["displacement", "uniform", "direction"]
    if training.aggregation.weighting == "samples":
        return ["uniform", "direction"]
    return [] if equal_steps else ["direction"]


def _depends_on(algorithm: Algorithm, name: str) -> bool:
    """Whether the server's step uses a field of ``CohortMeans``: a NaN in the field then reaches its result."""
    x = torch.ones(4)
    fields = flat_fields(algorithm.message_fields())
    sent = nested_state({field: torch.ones_like(x if spec.vector else x[0]) for field, spec in fields.items()})
    means = CohortMeans(
        x=x,
        z=x,
        displacement=x,
        uniform=x,
        direction=-x,
        mean={},
        share=0.5,
        cohort_size=2,
        round=1,
        normalised=x,
        common_gradient=x,
    )
    server = algorithm.new_server(x)

    def undefined(means: CohortMeans) -> int:
        """Count the numbers of the result that are not finite."""
        model, state = algorithm.aggregate(means, sent, server)
        return sum(int((~torch.isfinite(value)).sum()) for value in (model, *flat_state(state).values()))

    unknown: Any = {name: x * math.nan}
    return undefined(means._replace(**unknown)) > undefined(means)
