"""Checks of algorithms on quadratic losses with the real engines.

Every algorithm must have the properties in ``ALWAYS``; those in ``CLAIMS`` are checked for algorithms that claim them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm, algorithm, canonical
from fedflat.algorithms.algorithm import SLOTS, flat_state
from fedflat.algorithms.composition import part_name
from fedflat.algorithms.slot import Drift
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.errors import one_of
from fedflat.testing.broken import verify
from fedflat.testing.quadratics import LOCAL_STEPS, Quadratics, Trajectory, run_rounds

EXACT, CLOSE = 1e-12, 1e-9
"""Largest allowed differences between results of the same computation, and between those of equivalent ones."""
SMALL = 0.01
"""Largest relative change of the server model in a round with tiny local steps."""
ASCENT = "perturbations increase the loss"
"""Checked for every perturbation that is computed from a gradient; others may claim it."""
COHORTS = ([0, 2], [1, 3], [0, 1, 3], [2], [0, 1, 2, 3], [1, 2])
"""Participating clients of each round, in cohorts of different sizes."""
EQUAL, UNEQUAL = Quadratics(), Quadratics(examples=(1, 2, 5, 3))
"""Clients with equal and with different numbers of examples and local steps."""
SPREAD_ROUNDS, SPREAD_STEPS, MAX_SPREAD = 5, 10, 1.005
"""Rounds and local steps after which clients' models may be at most this many times as far apart as with FedAvg."""
ROUNDS_TO_APPROACH, ROUNDS_TO_CONVERGE = 15, 100
"""Numbers of rounds in which algorithms approach the optimum of the quadratics, and converge to it."""


@dataclass(frozen=True)
class CheckedAlgorithm:
    """An algorithm, and a run of it that several checks share."""

    algorithm: Algorithm

    @cached_property
    def trajectory(self) -> Trajectory:
        """A run of the algorithm with ``COHORTS`` of equal clients, with the CPU's engine."""
        return run_rounds(self.algorithm, EQUAL, COHORTS)


Check = Callable[[CheckedAlgorithm], str | None]
"""Checks one property; returns how the algorithm violates it, or None if the property holds."""


def check_algorithm(
    what: str | Algorithm,
    *,
    claims: Sequence[str] = (),
    limits: Mapping[str, float] | None = None,
    becomes: str | Algorithm = "fedavg",
) -> list[str]:
    """Check an algorithm on quadratics with the real engines.

    Args:
        what: an algorithm, or its name with parameters, e.g. ``fedprox(mu=0.1)``.
        claims: names of further properties to check, from ``CLAIMS``.
        limits: parameter values at which the algorithm equals ``becomes``, e.g. ``{"rho": 0.0}``.
        becomes: the algorithm that it equals at ``limits``, given like ``what``.

    Returns:
        The names of the verified properties: those that every algorithm must have (``ALWAYS``), the claims, and the
        limits.

    Raises:
        Broken: a property does not hold.
    """
    tested = algorithm(what) if isinstance(what, str) else what
    name = what if isinstance(what, str) else _name(what)
    for claim in claims:
        if claim not in CLAIMS:
            raise one_of("claim", claim, CLAIMS)
    checks = {**ALWAYS, **{claim: CLAIMS[claim] for claim in claims}}
    if tested.perturbation.ascent_passes:
        checks[ASCENT] = _perturbations_ascend
    if limits:
        target = algorithm(becomes) if isinstance(becomes, str) else becomes
        shown = ", ".join(f"{key}={value:g}" for key, value in limits.items())
        at_limit = _with_parameters(tested, limits)
        checks[f"at {shown} it is {canonical(target)}"] = lambda _: _difference(at_limit, target, Quadratics(), COHORTS)
    checked = CheckedAlgorithm(tested)
    return verify(name, ((property_name, check(checked)) for property_name, check in checks.items()))


def _name(tested: Algorithm) -> str:
    """Return a name for messages: the names of all components that differ from those of FedAvg, joined by ``+``."""
    specs = [getattr(tested, slot) for slot in SLOTS]
    defaults = [getattr(Algorithm(), slot) for slot in SLOTS]
    changed = [spec for spec, default in zip(specs, defaults, strict=True) if spec != default]
    return "+".join(part_name(spec) or type(spec).__name__ for spec in changed) or "fedavg"


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference between two vectors."""
    return float((a - b).abs().max())


def _full_participation(quadratics: Quadratics, rounds: int) -> list[list[int]]:
    """Return ``rounds`` cohorts, each of all clients."""
    return [list(range(quadratics.clients))] * rounds


def _difference(a: Algorithm, b: Algorithm, quadratics: Quadratics, cohorts: Sequence[Sequence[int]]) -> str | None:
    """Return how the server models of two algorithms differ after some round, or None if they agree."""
    return _model_difference(run_rounds(a, quadratics, cohorts), run_rounds(b, quadratics, cohorts))


def _model_difference(a: Trajectory, b: Trajectory) -> str | None:
    """Return how the server models of two runs differ after some round, or None if they agree."""
    for round, (x, y) in enumerate(zip(a.x, b.x, strict=True)):
        if _distance(x, y) > CLOSE:
            return f"after round {round} the models differ by {_distance(x, y):.3g}"
    return None


def _passes_are_declared(tested: CheckedAlgorithm) -> str | None:
    """Check that local steps compute as many gradients as the slots declare."""
    drift, perturbation = tested.algorithm.drift, tested.algorithm.perturbation
    declared = tested.algorithm.backward_passes
    before_steps = (drift.full_gradient != "none") + (perturbation.pilot_batches > 0)  # clients have a single batch
    for round, (cohort, outcome) in enumerate(zip(COHORTS, tested.trajectory.outcomes, strict=True)):
        computed = (outcome.cost.backward_passes / len(cohort) - before_steps) / LOCAL_STEPS
        if computed != declared:
            return (
                f"gradients per local step: {computed:.3g} computed in round {round}, {declared} declared "
                f"(ascent_passes={perturbation.ascent_passes}, extra_passes={drift.extra_passes}); let ascent_passes "
                "of the perturbation or extra_passes of the drift return how often it calls gradient"
            )
    return None


def _is_deterministic(tested: CheckedAlgorithm) -> str | None:
    """Check that two runs with the same seed end with the same model."""
    first, second = tested.trajectory.x[-1], run_rounds(tested.algorithm, EQUAL, COHORTS).x[-1]
    if torch.equal(first, second):
        return None
    return f"two runs with the same seed differ by {_distance(first, second):.3g}; does a slot draw random numbers?"


def _stays_finite(tested: CheckedAlgorithm) -> str | None:
    """Check that server models stay finite at a small learning rate."""
    for round, x in enumerate(run_rounds(tested.algorithm, Quadratics(), COHORTS * 5, lr=0.01).x):
        if not bool(x.isfinite().all()):
            return f"the model is not finite after round {round}, at lr=0.01"
    return None


def _engines_agree(tested: CheckedAlgorithm) -> str | None:
    """Check that the CPU's and the GPU's engine compute the same models."""
    return _model_difference(tested.trajectory, run_rounds(tested.algorithm, EQUAL, COHORTS, engine=LaneEngine))


def _order_is_irrelevant(tested: CheckedAlgorithm) -> str | None:
    """Check that reversing every cohort does not change the model."""
    forward = tested.trajectory.x[-1]
    backward = run_rounds(tested.algorithm, EQUAL, [cohort[::-1] for cohort in COHORTS]).x[-1]
    if _distance(forward, backward) <= CLOSE:
        return None
    return f"in reverse order the model differs by {_distance(forward, backward):.3g}"


def _states_are_independent(tested: CheckedAlgorithm) -> str | None:
    """Check that a client's state depends neither on rounds without it nor on the other participants."""
    states = tested.trajectory.states  # states[round][client] is the state before the round
    for round, cohort in enumerate(COHORTS):
        for number, state in states[round].items():
            after = flat_state(states[round + 1][number])
            unchanged = all(torch.equal(value, after[key]) for key, value in flat_state(state).items())
            if number not in cohort and not unchanged:
                return f"the state of client {number} changed in round {round}, in which it did not participate"
    if tested.algorithm.drift.full_gradient == "common":  # the whole cohort computes it, and states may depend on it
        return None
    alone = flat_state(run_rounds(tested.algorithm, Quadratics(), [[0]]).states[1][0])
    together = flat_state(run_rounds(tested.algorithm, Quadratics(), [[0, 1, 2]]).states[1][0])
    for key, value in alone.items():
        if _distance(value, together[key]) > EXACT:
            return f"{key} of client 0 depends on the other participants"
    return None


def _small_steps_move_little(tested: CheckedAlgorithm) -> str | None:
    """Check that tiny local steps hardly change the server model."""
    before, after = run_rounds(tested.algorithm, EQUAL, [[0, 1, 2, 3]], lr=1e-7).x
    if _distance(before, after) < SMALL * float(before.abs().max()):
        return None
    return (
        f"at a learning rate of 1e-7 a round moves the server model by {_distance(before, after):.3g}; "
        "aggregate must return the new model, e.g. means.z + means.displacement"
    )


def _descends(tested: CheckedAlgorithm) -> str | None:
    """Check that the loss of a federation of one client decreases."""
    quadratics = Quadratics(clients=1)
    losses = [quadratics.value(x) for x in run_rounds(tested.algorithm, quadratics, [[0]] * 40, steps=2, lr=0.02).x]
    if losses[-1] < losses[0]:
        return None
    return (
        f"in 40 rounds the loss went from {losses[0]:.4g} to {losses[-1]:.4g}; "
        "check the signs of the direction and of the server step"
    )


def _approaches_optimum(
    tested: CheckedAlgorithm, quadratics: Quadratics = EQUAL, rounds: int = ROUNDS_TO_APPROACH
) -> str | None:
    """Check that the model comes closer to the minimiser of the clients' mean loss."""
    models = run_rounds(tested.algorithm, quadratics, _full_participation(quadratics, rounds), lr=0.1).x
    before = _distance(models[0], quadratics.optimum())
    after = _distance(models[-1], quadratics.optimum())
    if after < before:
        return None
    return (
        f"in {rounds} rounds the distance went from {before:.3g} to {after:.3g}; "
        "check the sign of the correction and of what clients keep or send for it"
    )


def _handles_unequal_clients(tested: CheckedAlgorithm) -> str | None:
    """Check that engines agree and the loss decreases with unequal clients.

    The clients have different numbers of examples, and each takes one local step per example.
    """
    loop = run_rounds(tested.algorithm, UNEQUAL, COHORTS)
    lanes = run_rounds(tested.algorithm, UNEQUAL, COHORTS, engine=LaneEngine)
    reason = _model_difference(loop, lanes) or _approaches_optimum(tested, UNEQUAL, rounds=10)
    if reason is None:
        return None
    counts = ", ".join(map(str, UNEQUAL.examples))
    return f"with clients of {counts} examples, and as many local steps, {reason}"


def _drifts_no_further(tested: CheckedAlgorithm) -> str | None:
    """Check that the drift correction alone does not move clients' models further apart than FedAvg does.

    Most corrections counteract client drift, or add a direction that all clients share.
    """
    ratio = _spread(tested.algorithm.drift) / _spread(Drift())
    if ratio <= MAX_SPREAD:
        return None
    return (
        f"after {SPREAD_ROUNDS} rounds, the models of all clients are {ratio:.3g} times as far apart as with FedAvg; "
        "check the sign of the correction and of what clients keep or send for it"
    )


def _spread(drift: Drift) -> float:
    """Return how far apart the clients' models are in the last round of a run from the joint optimum."""
    quadratics = Quadratics()
    quadratics.start = quadratics.optimum()
    cohorts = _full_participation(quadratics, SPREAD_ROUNDS)
    run = run_rounds(Algorithm(drift), quadratics, cohorts, steps=SPREAD_STEPS, lr=0.2)
    rows, states = run.outcomes[-1].rows, run.states[-2]  # states before the last round
    assert rows is not None  # the CPU's engine has them
    uploads = enumerate(rows.displacements)
    moves = torch.stack([drift.local_displacement(upload, states[client]["drift"]) for client, upload in uploads])
    return float((moves - moves.mean(0)).norm())


def _perturbations_ascend(tested: CheckedAlgorithm) -> str | None:
    """Check that SAM's perturbation of the weights y by e increases the loss; returns the violation, or None.

    The last gradient of a local step is taken at y + e, so that f(y + e) >= f(y) must hold. The second round is
    checked, because some offsets, such as LESAM's, need the first one.
    """
    quadratics = Quadratics(clients=1)
    problem = quadratics.problem()
    points: list[Tensor] = []  # where gradients are computed
    loss_and_gradient = problem.loss_and_gradient

    def record_point(vector: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        points.append(vector.clone())
        return loss_and_gradient(vector, *rest)  # type: ignore[arg-type]

    problem.loss_and_gradient = record_point  # type: ignore[method-assign, assignment]
    quadratics.problem = lambda: problem  # type: ignore[method-assign]
    second = run_rounds(tested.algorithm, quadratics, [[0]] * 2, steps=1).outcomes[1]
    iterate, perturbed = quadratics.value(second.cohort_means.z), quadratics.value(points[-1])
    if perturbed >= iterate:
        return None
    return (
        f"the loss is {perturbed:.4g} at the perturbed point and {iterate:.4g} at the iterate; "
        "check the sign of the offset"
    )


def _equals_fedavg(tested: CheckedAlgorithm) -> str | None:
    """Check that an algorithm equals FedAvg if all clients have the same loss."""
    quadratics = Quadratics(alike=True)
    difference = _difference(tested.algorithm, Algorithm(), quadratics, _full_participation(quadratics, 10))
    return None if difference is None else f"{difference}, although there is no drift to correct"


def _finds_optimum(tested: CheckedAlgorithm) -> str | None:
    """Check that an algorithm ends 20 times closer to the joint optimum than FedAvg, which drifts away from it."""
    final, fedavg = _final_distance(tested.algorithm), _fedavg_distance()
    if final < 0.05 * fedavg:
        return None
    return (
        f"after {ROUNDS_TO_CONVERGE} rounds with all clients its distance is {final:.3g}, and that of FedAvg, "
        f"which drifts, {fedavg:.3g}; check the sign of the correction and that control variates are updated"
    )


def _final_distance(tested: Algorithm) -> float:
    """Return the distance to the joint optimum after many rounds with all clients."""
    quadratics = Quadratics()
    cohorts = _full_participation(quadratics, ROUNDS_TO_CONVERGE)
    return _distance(run_rounds(tested, quadratics, cohorts, steps=3, lr=0.1).x[-1], quadratics.optimum())


@cache
def _fedavg_distance() -> float:
    """Return the final distance of FedAvg, with which all algorithms are compared."""
    return _final_distance(Algorithm())


def _with_parameters(tested: Algorithm, values: Mapping[str, float]) -> Algorithm:
    """Return a copy of an algorithm with some parameters changed, in every slot that has them."""
    specs = {slot: getattr(tested, slot) for slot in SLOTS}
    names = {slot: {field.name for field in fields(spec)} for slot, spec in specs.items()}
    for name, value in values.items():
        slots = [slot for slot in SLOTS if name in names[slot]]
        if not slots:
            raise one_of("parameter", name, set().union(*names.values()))
        for slot in slots:
            specs[slot] = replace(specs[slot], **{name: value})
    return replace(tested, **specs)


ALWAYS: dict[str, Check] = {
    "local steps compute as many gradients as declared": _passes_are_declared,
    "runs are deterministic": _is_deterministic,
    "iterates stay finite at a small learning rate": _stays_finite,
    "engines agree": _engines_agree,
    "the order of clients is irrelevant": _order_is_irrelevant,
    "client states are independent": _states_are_independent,
    "tiny local steps hardly move the server model": _small_steps_move_little,
    "a single client descends at a small learning rate": _descends,
    "all clients together approach the joint optimum": _approaches_optimum,
    "clients may have unequal numbers of examples and steps": _handles_unequal_clients,
}
"""Properties of every algorithm, by name."""
CLAIMS: dict[str, Check] = {
    "with equal clients it is FedAvg": _equals_fedavg,
    "finds the joint optimum": _finds_optimum,
    "clients drift no further apart than with FedAvg": _drifts_no_further,
    ASCENT: _perturbations_ascend,
}
"""Further properties that an algorithm may claim, by name."""
