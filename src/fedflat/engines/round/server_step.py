"""The server's step at the end of a round."""

from __future__ import annotations

from fedflat.algorithms.algorithm import Algorithm, States
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.residuals import add_products
from fedflat.engines.round.contract import ModelState, Outcome


def server_step(algorithm: Algorithm, problem: Problem, outcome: Outcome, states: States) -> tuple[ModelState, States]:
    """Aggregate what a cohort returned.

    Args:
        algorithm: its slots update the weights.
        problem: the model, whose adapters may have residuals.
        outcome: means over the cohort.
        states: the server's state by slot.

    Returns:
        The server's new model, and its new state by slot.
    """
    weights, states = algorithm.aggregate(outcome.cohort_means, outcome.message_means, states)
    buffers = outcome.buffers.clone()
    add_products(problem, buffers, weights, -1.0)
    return ModelState(weights, buffers, outcome.integer_buffers), states
