"""Identities that every algorithm keeps, and claims that some make, checked on quadratics through the real engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm, algorithm, canonical
from fedflat.algorithms.algorithm import flat_fields, flat_state
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.errors import one_of
from fedflat.testing.bowls import Bowls, walk
from fedflat.testing.broken import Broken

EXACT, CLOSE = 1e-12, 1e-9
SOME = ([0, 2], [1, 3], [0, 1, 3], [2], [0, 1, 2, 3], [1, 2])
"""Cohorts of different sizes."""
ROUNDS_TO_COME_NEARER, ROUNDS_TO_CONVERGE = 40, 100
"""Enough on quadratics."""
Check = Callable[[str, Algorithm], None]


def check_algorithm(
    what: str | Algorithm,
    *,
    claims: Sequence[str] = (),
    limits: Mapping[str, float] | None = None,
    becomes: str | Algorithm = "fedavg",
) -> list[str]:
    """Check an algorithm, of your own or of the table, and return the identities that it keeps; ``Broken`` names one that it does not.

    Every algorithm must keep those of ``ALWAYS``. ``claims`` are further ones that yours makes (``CLAIMS`` lists them). ``limits`` are
    parameters, by name, at which it ``becomes`` another: ``limits={"rho": 0.0}`` for a perturbation that vanishes.
    """
    name, method = (what, algorithm(what)) if isinstance(what, str) else (_name(what), what)
    for claim in claims:
        if claim not in CLAIMS:
            raise one_of("claim", claim, CLAIMS)
    checks = {**ALWAYS, **{claim: CLAIMS[claim] for claim in claims}}
    if method.perturbation.ascent_passes:
        checks["perturbations climb"] = _climbs
    for check in checks.values():
        check(name, method)
    if limits:
        _limit(name, method, limits, algorithm(becomes) if isinstance(becomes, str) else becomes)
    return [*checks, *(["limits"] if limits else [])]


def _name(method: Algorithm) -> str:
    parts = (type(method.drift).__name__, type(method.perturbation).__name__)
    return "+".join(part for part in parts if part not in ("Drift", "Perturbation")) or "the algorithm"


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


# --- what every algorithm keeps ------------------------------------------------------------------------------------------------------


def _fields_are_declared(name: str, method: Algorithm) -> None:
    identity = "what is kept and sent is what is declared"
    bowls = Bowls()
    try:
        outcome = walk(method, bowls, [[0, 1]]).outcomes[0]
    except KeyError as missing:
        raise Broken(
            name, identity, f"{missing} is kept or sent, but on_client() or sends() does not name it"
        ) from missing
    for declared, found in (
        (method.client_fields(), outcome.clients[0].state),
        (method.message_fields(), outcome.means),
    ):
        for full, field in flat_fields(declared).items():
            value = flat_state(found).get(full)
            shape = (bowls.size,) if field.vector else ()
            if value is None or tuple(value.shape) != shape:
                raise Broken(
                    name,
                    identity,
                    f"{full} is {'missing' if value is None else f'of shape {tuple(value.shape)}'}; expected {shape}",
                )


def _same_again(name: str, method: Algorithm) -> None:
    one, other = (walk(method, Bowls(), SOME).x[-1] for _ in range(2))
    if not torch.equal(one, other):
        raise Broken(
            name,
            "the same seed gives the same bits",
            f"two runs differ by {_apart(one, other):.3g}: is something drawn inside a slot?",
        )


def _stays_finite(name: str, method: Algorithm) -> None:
    for round, x in enumerate(walk(method, Bowls(), SOME * 5, lr=0.01).x):
        if not bool(x.isfinite().all()):
            raise Broken(
                name, "iterates stay finite at a small rate", f"after round {round} they are not, at rate 0.01"
            )


def _engines_agree(name: str, method: Algorithm) -> None:
    loop, lanes = walk(method, Bowls(), SOME), walk(method, Bowls(), SOME, engine=LaneEngine)
    for round, (one, other) in enumerate(zip(loop.x, lanes.x, strict=True)):
        if _apart(one, other) > CLOSE:
            raise Broken(
                name, "engines agree", f"after round {round} loop and lanes differ by {_apart(one, other):.3g}"
            )


def _order_does_not_matter(name: str, method: Algorithm) -> None:
    there, back = (walk(method, Bowls(), [cohort[::step] for cohort in SOME]).x[-1] for step in (1, -1))
    if _apart(there, back) > CLOSE:
        raise Broken(
            name,
            "the order of a cohort does not matter",
            f"turned round, the model differs by {_apart(there, back):.3g}",
        )


def _states_are_apart(name: str, method: Algorithm) -> None:
    identity = "clients keep their state to themselves"
    done = walk(method, Bowls(), SOME)
    for round, cohort in enumerate(SOME):
        for number, state in done.states[round].items():
            if number not in cohort and any(
                not torch.equal(value, flat_state(done.states[round + 1][number])[key])
                for key, value in flat_state(state).items()
            ):
                raise Broken(name, identity, f"client {number} changed in round {round}, in which it took no part")
    if method.drift.whole_gradient == "common":
        return
    alone, together = (walk(method, Bowls(), [cohort]).states[1][0] for cohort in ([0], [0, 1, 2]))
    for key, value in flat_state(alone).items():
        if _apart(value, flat_state(together)[key]) > EXACT:
            raise Broken(name, identity, f"{key} of client 0 depends on who else took part")


def _descends(name: str, method: Algorithm) -> None:
    bowls = Bowls(clients=1)
    values = [bowls.value(x) for x in walk(method, bowls, [[0]] * 40, steps=2, lr=0.02).x]
    if values[-1] >= values[0]:
        raise Broken(
            name,
            "one client with a small rate descends",
            f"in 40 rounds the loss went from {values[0]:.4g} to {values[-1]:.4g}: "
            "look for a wrong sign in the direction or in the server's step",
        )


def _comes_nearer(name: str, method: Algorithm) -> None:
    bowls = Bowls()
    x = walk(method, bowls, [list(range(bowls.clients))] * ROUNDS_TO_COME_NEARER, lr=0.1).x
    before, after = (_apart(one, bowls.optimum()) for one in (x[0], x[-1]))
    if not after < before:
        raise Broken(
            name,
            "all clients together come nearer to their joint optimum",
            f"in {ROUNDS_TO_COME_NEARER} rounds the distance went from {before:.3g} to {after:.3g}: "
            "look for a wrong sign in the correction, or in what clients keep or send of it",
        )


# --- what some claim -----------------------------------------------------------------------------------------------------------------


def _climbs(name: str, method: Algorithm) -> None:
    """SAM's offset must raise the loss: f(y + e) >= f(y) at every first gradient of a pair."""
    bowls = Bowls(clients=1)
    problem = bowls.problem()
    points: list[Tensor] = []
    inner = problem.loss_and_gradient

    def noted(vector: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        points.append(vector.clone())
        return inner(vector, *rest)  # type: ignore[arg-type]

    problem.loss_and_gradient = noted  # type: ignore[method-assign, assignment]
    bowls.problem = lambda: problem  # type: ignore[method-assign]
    walk(method, bowls, [[0]], steps=1)
    if bowls.value(points[-1]) < bowls.value(points[0]):
        raise Broken(
            name,
            "perturbations climb",
            f"the loss at the perturbed point is {bowls.value(points[-1]):.4g}, below {bowls.value(points[0]):.4g} at the iterate: "
            "look for a wrong sign in the offset",
        )


def _alike(name: str, method: Algorithm) -> None:
    bowls = Bowls(alike=True)
    everyone = [list(range(bowls.clients))] * 10
    for round, (one, other) in enumerate(
        zip(walk(method, bowls, everyone).x, walk(algorithm("fedavg"), bowls, everyone).x, strict=True)
    ):
        if _apart(one, other) > CLOSE:
            raise Broken(
                name,
                "with equal clients it is FedAvg",
                f"after round {round} the models differ by {_apart(one, other):.3g}, though there is no drift to correct",
            )


def _joint_optimum(name: str, method: Algorithm) -> None:
    bowls = Bowls()
    everyone = [list(range(bowls.clients))] * ROUNDS_TO_CONVERGE
    found, plain = (walk(one, bowls, everyone, steps=3, lr=0.1).x[-1] for one in (method, algorithm("fedavg")))
    off, off_plain = (_apart(x, bowls.optimum()) for x in (found, plain))
    if not off < 0.05 * off_plain:
        raise Broken(
            name,
            "finds the joint optimum",
            f"with all clients in {ROUNDS_TO_CONVERGE} rounds it ends {off:.3g} from it, and FedAvg, which drifts, {off_plain:.3g}: "
            "look for a wrong sign in the correction, or a variate that is not renewed",
        )


def _limit(name: str, method: Algorithm, limits: Mapping[str, float], other: Algorithm) -> None:
    at_limit = _revised(method, limits)
    shown = ", ".join(f"{key}={value:g}" for key, value in limits.items())
    for round, (one, two) in enumerate(zip(walk(at_limit, Bowls(), SOME).x, walk(other, Bowls(), SOME).x, strict=True)):
        if _apart(one, two) > CLOSE:
            raise Broken(
                name,
                f"at {shown} it is {canonical(other)}",
                f"after round {round} the models differ by {_apart(one, two):.3g}",
            )


def _revised(method: Algorithm, limits: Mapping[str, float]) -> Algorithm:
    slots = {slot: getattr(method, slot) for slot in ("drift", "perturbation", "lr_schedule", "server")}
    for key, value in limits.items():
        owners = [slot for slot, one in slots.items() if key in {field.name for field in fields(one)}]
        if not owners:
            raise one_of("parameter", key, sorted({field.name for one in slots.values() for field in fields(one)}))
        for slot in owners:
            slots[slot] = replace(slots[slot], **{key: value})
    return replace(method, **slots)


ALWAYS: dict[str, Check] = {
    "what is kept and sent is what is declared": _fields_are_declared,
    "the same seed gives the same bits": _same_again,
    "iterates stay finite at a small rate": _stays_finite,
    "engines agree": _engines_agree,
    "the order of a cohort does not matter": _order_does_not_matter,
    "clients keep their state to themselves": _states_are_apart,
    "one client with a small rate descends": _descends,
    "all clients together come nearer to their joint optimum": _comes_nearer,
}
CLAIMS: dict[str, Check] = {
    "with equal clients it is FedAvg": _alike,
    "finds the joint optimum": _joint_optimum,
}
"""What an algorithm may claim besides, by name."""
