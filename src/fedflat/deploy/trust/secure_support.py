"""Which experiments can be summed securely: those that need only one weighted sum of everything that clients send.

Two sums of the same updates with different weights would reveal more than their mean; of two clients, everything.
"""

from __future__ import annotations

from typing import Any

import torch

from fedflat.algorithms.algorithm import Algorithm, flat_fields, nested_state
from fedflat.algorithms.slot import CohortMeans
from fedflat.deploy.settings import Deployment
from fedflat.deploy.trust.secure_sum import require_public_integers
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Training
from fedflat.errors import UserError

OTHERS = "such as fedavg, fedsam or, with federation.weighting=uniform, scaffold or fedmoswa"


def require_support(training: Training, problem: Problem, algorithm: str, deployment: Deployment) -> None:
    """Raise ``UserError`` if the deployment has secure aggregation, but the experiment cannot have it.

    ``algorithm`` is the text that names the algorithm.
    """
    if not deployment.secure_aggregation:
        return
    equal_steps = training.plan.steps is not None and not training.plan.partial
    conflict = secure_aggregation_conflict(training.algorithm, training.aggregation, equal_steps)
    if conflict:
        raise UserError(f"deploy.secure_aggregation does not work with {algorithm}: {conflict}")
    if not training.own_statistics:
        _, _, integer_buffers = problem.initial_state()
        require_public_integers(integer_buffers)
    if deployment.minimum < 2:
        raise UserError(
            f"deploy.minimum={deployment.minimum} lets deploy.secure_aggregation reveal the update of a single site; "
            "set deploy.minimum to at least 2"
        )


def secure_aggregation_conflict(algorithm: Algorithm, aggregation: Aggregation, equal_steps: bool) -> str:
    """Say why the server must see single updates or several sums, and what to do; empty if one sum is enough.

    ``equal_steps`` says whether all clients take equally many local steps.
    """
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
                f"updates have the weights {weighting}, but {name} has {other}, and sums with different weights "
                f"reveal more than one sum; set federation.weighting={other}"
            )
    vectors = [name for name, field in flat_fields(algorithm.message_fields()).items() if field.vector]
    if vectors and not equal_steps:
        # E.g. SCAFFOLD's control variate is the displacement divided by the number of steps, which the server knows.
        return (
            f"sites with different numbers of steps give {vectors[0]} another weight than updates; "
            "set training.local_steps, and do not set federation.partial"
        )
    needed = _used_means(algorithm).intersection(unavailable_means(algorithm, weighting, equal_steps))
    if not needed:
        return ""
    if "displacement" in needed:
        return f"the server needs the mean of the updates and of their quotients; use another algorithm, {OTHERS}"
    if weighting == "samples":
        return "the server also needs the mean of the updates with equal weights; set federation.weighting=uniform"
    return (
        "the server divides updates by the clients' sums of learning rates, which must be equal; "
        "set training.local_steps, and do not set federation.partial"
    )


def secure_weighting(algorithm: Algorithm, clients: int) -> str:
    """Return the weights of clients with which an algorithm can be summed securely; raises ``UserError`` if it cannot.

    ``clients`` is the number of sites.
    """
    if clients < 2:
        raise UserError("--secure-aggregation hides the update of a site in a sum; expected --clients of at least 2")
    if not secure_aggregation_conflict(algorithm, Aggregation("samples"), equal_steps=True):
        return "samples"
    conflict = secure_aggregation_conflict(algorithm, Aggregation("uniform"), equal_steps=True)
    if conflict:
        raise UserError(f"--secure-aggregation does not work with this algorithm: {conflict}")
    return "uniform"


def unavailable_means(algorithm: Algorithm, weighting: str, equal_steps: bool) -> list[str]:
    """Return the fields of ``CohortMeans`` that do not follow from one sum, given whether clients take equal steps."""
    if algorithm.drift.displacement_divisor is not None:
        return ["displacement", "uniform", "direction"]
    if weighting == "samples":
        return ["uniform", "direction"]
    return [] if equal_steps else ["direction"]


def _used_means(algorithm: Algorithm) -> set[str]:
    """Return the fields of ``CohortMeans`` that the server's step reads."""
    used: set[str] = set()

    class Recorded(CohortMeans):
        """Means that note which of their fields are read."""

        def __getattribute__(self, name: str) -> Any:
            used.add(name)
            return super().__getattribute__(name)

    x = torch.ones(4)
    fields = flat_fields(algorithm.message_fields())
    sent = nested_state({name: torch.ones_like(x if field.vector else x[0]) for name, field in fields.items()})
    means = Recorded(
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
    algorithm.aggregate(means, sent, algorithm.new_server(x))
    return used
