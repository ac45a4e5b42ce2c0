"""Inspection of what clients send, before it reaches the model: a broken or implausible update is refused.

The checks need no trust in the client. Names, shapes and types must match the algorithm; all numbers must be finite;
the number of examples must be what the client joined with; steps and the sum of learning rates must match the plan;
norms must be plausible within the cohort, and numbers that choose weights within their range. An attack within these
bounds goes unnoticed; robust aggregation (``federation.aggregation=median``) limits its effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from fedflat.experiment.stopping import MAX_LOSS

LR_SUM = "lr_sum"
"""Name of the sum of the learning rates over a client's local steps."""
NUMBERS = (LR_SUM, "loss", "steps", "backward_passes", "samples", "examples")
"""Scalars that a client reports in addition to its arrays."""
ROUNDING = 1e-3
"""Relative difference by which a number computed at a site may deviate from the server's own."""
ENOUGH_TO_COMPARE = 3
"""Minimum number of updates for a meaningful median norm."""
LARGEST_COST = 1e15
"""Most backward passes, and most examples in them, that a client may report for a round."""


class Update(NamedTuple):
    """What one client sent."""

    client: int
    arrays: Mapping[str, np.ndarray]
    numbers: Mapping[str, float]


class ArraySpec(NamedTuple):
    """Required shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


@dataclass(frozen=True)
class ExpectedUpdates:
    """What honest updates look like.

    Attributes:
        arrays: the arrays that every client sends, by name.
        examples: examples of each client when it joined.
        steps: local steps of each client.
        lr_sums: sum of each client's learning rates over its steps.
        bound: largest norm, as a multiple of the cohort's median norm.
        ranges: smallest and largest value of some scalars among the arrays, by name.
    """

    arrays: Mapping[str, ArraySpec]
    examples: Mapping[int, int]
    steps: Mapping[int, int]
    lr_sums: Mapping[int, float]
    bound: float = 30.0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def inspect_updates(updates: Sequence[Update], expected: ExpectedUpdates) -> tuple[list[Update], dict[int, str]]:
    """Inspect the updates of a cohort.

    Returns:
        The accepted updates in the same order, and for every other client why its update is refused.
    """
    reasons = {update.client: find_flaw(update, expected) for update in updates}
    refused = {client: reason for client, reason in reasons.items() if reason}
    flawless = [update for update in updates if update.client not in refused]
    refused |= find_outliers(flawless, expected.bound)
    return [update for update in updates if update.client not in refused], refused


def find_flaw(update: Update, expected: ExpectedUpdates) -> str:
    """Say what is wrong with an update, without comparing it with others; empty if nothing is."""
    flaw = find_wrong_array(update.arrays, expected.arrays)
    if flaw:
        return flaw
    for name, array in update.arrays.items():
        if not np.isfinite(array).all():
            return f"{name} contains {'NaN' if np.isnan(array).any() else 'infinite numbers'}"
    square = update.arrays.get("server.square")  # FedExP computes its learning rate from it
    if square is not None and not math.isclose(square, _norm(update.arrays["displacement"]) ** 2, rel_tol=ROUNDING):
        return f"server.square is {float(square):.3g}, which is not the squared norm of displacement"
    for name, (low, high) in expected.ranges.items():
        value = float(update.arrays[name])
        if not low - ROUNDING <= value <= high + ROUNDING:
            return f"{name} is {value:.3g}, which is not between {low:.3g} and {high:.3g}"
    return find_wrong_number(update, expected)


def find_wrong_array(arrays: Mapping[str, np.ndarray], specs: Mapping[str, ArraySpec]) -> str:
    """Say which array is missing, unknown, or has another shape or dtype than its spec; empty if none."""
    differing = {"lacks": specs.keys() - arrays.keys(), "has unknown": arrays.keys() - specs.keys()}
    if any(differing.values()):
        return "it " + " and ".join(f"{verb} {', '.join(sorted(names))}" for verb, names in differing.items() if names)
    for name, spec in specs.items():
        array = arrays[name]
        if array.shape != spec.shape:
            return f"{name} has shape {array.shape}, not {spec.shape}"
        if array.dtype != spec.dtype:
            return f"{name} is {array.dtype}, not {spec.dtype}"
    return ""


def find_wrong_number(update: Update, expected: ExpectedUpdates) -> str:
    """Say which reported number is missing or implausible; empty if none is."""
    numbers, client = update.numbers, update.client
    missing = [name for name in NUMBERS if name not in numbers]
    if missing:
        return f"it does not report {', '.join(missing)}"
    for name in NUMBERS:
        if not math.isfinite(numbers[name]):
            return f"its {name} is {numbers[name]}"
    examples, steps, lr_sum = expected.examples[client], expected.steps[client], expected.lr_sums[client]
    if numbers["examples"] != examples:
        return f"it claims {numbers['examples']:g} examples, but joined with {examples}"
    if numbers["steps"] != steps:
        return f"it claims {numbers['steps']:g} steps, but {examples} examples make {steps}"
    if not math.isclose(numbers[LR_SUM], lr_sum, rel_tol=ROUNDING):
        return f"its learning rates sum to {numbers[LR_SUM]:g}, not {lr_sum:g}"
    for name in ("backward_passes", "samples"):
        if not 0 <= numbers[name] <= LARGEST_COST:
            return f"it claims {numbers[name]:g} {name.replace('_', ' ')}"
    return ""


def find_outliers(updates: Sequence[Update], bound: float) -> dict[int, str]:
    """Find updates whose loss is that of a diverged run, or with a norm over ``bound`` times the cohort's median norm.

    Scalars are compared only if they belong to the drift correction. The others have no common scale, e.g. cosines.

    Returns:
        For each client with such an update, what is implausible about it.
    """
    if len(updates) < ENOUGH_TO_COMPARE:
        return {}
    refused: dict[int, str] = {}
    losses = {update.client: update.numbers["loss"] / max(update.numbers["steps"], 1) for update in updates}
    typical = median(losses.values())
    for client, loss in losses.items():
        if abs(loss) >= MAX_LOSS > abs(typical):  # it would end the run as diverged
            refused[client] = f"its mean loss is {loss:.3g}, but the cohort's median is {typical:.3g}"
    for name, array in updates[0].arrays.items():
        if not array.shape and not name.startswith("drift."):
            continue
        norms = {update.client: _norm(update.arrays[name]) for update in updates}
        typical = median(norms.values())
        for client, norm in norms.items():
            # A median of zero gives no scale, e.g. for arrays that are zero in the first round.
            if typical > 0 and norm > bound * typical:
                reason = (
                    f"the norm of {name} is {norm:.3g}, more than {bound:g} times the cohort's median {typical:.3g}"
                )
                refused.setdefault(client, reason)
    return refused


def _norm(array: np.ndarray) -> float:
    """Return the norm in float64, because the square of a huge float32 overflows."""
    return float(np.linalg.norm(array.astype(np.float64).ravel()))
