"""Looking at what clients send before it touches the model: an update that is broken, or obviously a lie, is refused with the reason.

What is checked needs no trust in the client: names, shapes and types against the algorithm; numbers that must be finite; the number of
examples against what the client said when it joined; its steps and the sum of its rates against the plan; norms against the cohort.
A lie that stays within all of these is not seen: a robust centre (``federation.aggregation=median``) bounds what it can do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

NUMBERS = ("rates", "loss", "steps", "backward_passes", "samples", "examples")
"""What a client reports beside its arrays."""
ROUNDING = 1e-3
"""By which a number that was computed elsewhere may differ, as a share of it."""
ENOUGH_TO_COMPARE = 3
"""Updates from which on a median says what is usual."""


class Update(NamedTuple):
    """What one client sent."""

    client: int
    arrays: Mapping[str, np.ndarray]
    numbers: Mapping[str, float]


class Form(NamedTuple):
    """What an array must be."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


@dataclass(frozen=True)
class Expected:
    """What an honest update looks like."""

    forms: Mapping[str, Form]
    examples: Mapping[int, int]
    """How many examples each client said it has when it joined."""
    steps: Mapping[int, int]
    """How many steps its plan is, by client."""
    rates: Mapping[int, float]
    """The sum of its learning rates over those steps, by client."""
    bound: float = 30.0
    """How many times the cohort's median a norm may be."""
    longest: float | None = None
    """The norm to which sites were asked to clip their displacement."""


def inspect_updates(updates: Sequence[Update], expected: Expected) -> tuple[list[Update], dict[int, str]]:
    """The updates that are taken, in the same order, and why each other one is not."""
    refused = {update.client: why for update in updates if (why := alone(update, expected))}
    sound = [update for update in updates if update.client not in refused]
    refused |= beside_others(sound, expected.bound)
    return [update for update in updates if update.client not in refused], refused


def alone(update: Update, expected: Expected) -> str:
    """What is wrong with an update in itself; empty where nothing is."""
    missing, extra = expected.forms.keys() - update.arrays.keys(), update.arrays.keys() - expected.forms.keys()
    if missing or extra:
        said = [
            f"{word} {', '.join(sorted(names))}"
            for word, names in (("misses", missing), ("brings unknown", extra))
            if names
        ]
        return f"it {' and '.join(said)}"
    for name, form in expected.forms.items():
        array = update.arrays[name]
        if array.shape != form.shape:
            return f"{name} has shape {array.shape}, not {form.shape}"
        if array.dtype != form.dtype:
            return f"{name} is {array.dtype}, not {form.dtype}"
        if not np.isfinite(array).all():
            return f"{name} holds NaN" if np.isnan(array).any() else f"{name} holds infinite numbers"
    if expected.longest is not None and (norm := _norm(update.arrays["displacement"])) > expected.longest * (
        1 + ROUNDING
    ):
        return f"the norm of displacement is {norm:.3g}, though it was to be clipped to {expected.longest:g}"
    return _wrong_number(update, expected)


def _wrong_number(update: Update, expected: Expected) -> str:
    numbers, client = update.numbers, update.client
    missing = [name for name in NUMBERS if name not in numbers]
    if missing:
        return f"it does not say its {', '.join(missing)}"
    bad = [name for name in NUMBERS if not math.isfinite(numbers[name])]
    if bad:
        return f"its {bad[0]} is {numbers[bad[0]]}"
    if numbers["examples"] != expected.examples[client]:
        return f"it claims {numbers['examples']:g} examples, but joined with {expected.examples[client]}"
    if numbers["steps"] != expected.steps[client]:
        return f"it claims {numbers['steps']:g} steps, but {expected.examples[client]} examples make {expected.steps[client]}"
    if not math.isclose(numbers["rates"], expected.rates[client], rel_tol=ROUNDING):
        return f"its learning rates add up to {numbers['rates']:g}, not to {expected.rates[client]:g}"
    if numbers["backward_passes"] < 0 or numbers["samples"] < 0:
        return "it claims to have computed less than nothing"
    return ""


def beside_others(updates: Sequence[Update], bound: float) -> dict[int, str]:
    """Updates with a vector so long that it drowns all others."""
    if len(updates) < ENOUGH_TO_COMPARE:
        return {}
    refused: dict[int, str] = {}
    for name in updates[0].arrays:
        norms = {update.client: _norm(update.arrays[name]) for update in updates}
        usual = median(norms.values())
        for client, norm in norms.items():
            if usual > 0 and norm > bound * usual:
                refused.setdefault(
                    client,
                    f"the norm of {name} is {norm:.3g}, more than {bound:g} times the cohort's median {usual:.3g}",
                )
    return refused


def _norm(array: np.ndarray) -> float:
    """In double precision, since the square of an absurd number may overflow."""
    return float(np.linalg.norm(array.astype(np.float64).ravel()))
