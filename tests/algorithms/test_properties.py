"""Random compositions: their texts and symmetries, and local SGD against explicit formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedflat.algorithms import algorithm, canonical
from fedflat.algorithms.algorithm import SLOTS, flat_state
from fedflat.algorithms.composition import parts as known_parts
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.named import NAMED, RELEASED
from fedflat.errors import UserError
from fedflat.text import show

from ..quadratics import Walk, walk
from ..reference import Quadratics, Setting, bed, unit
from .settings import same

Values = dict[str, Any]
CHOICES: dict[str, Values] = {
    "prox": {"mu": [0.0, 0.1, 0.5]},
    "scaffold": {"option": ["I", "II"], "cv_weight": [1.0, 0.1]},
    "dyn": {"alpha": [0.01, 0.1, 0.5], "dual_scope": ["all", "active"], "all_mean": [False, True]},
    "adabest": {"mu": [0.02, 0.3], "beta": [0.9, 0.3]},
    "mime": {"beta": [0.0, 0.9], "form": ["fedjax", "ema"]},
    "mimelite": {"beta": [0.0, 0.9], "form": ["fedjax", "ema"]},
    "cm": {"alpha": [0.1, 0.6, 1.0]},
    "acg": {"lam": [0.85, 0.4], "beta": [0.002, 0.3]},
    "memoryless-acg": {"lam": [0.85, 0.4], "beta": [0.002, 0.3]},
    "mo": {
        "gamma": [0.2, 0.7],
        "option": ["I", "II"],
        "normaliser": ["sum", "trapezoid"],
        "gamma_first_round": [None, 1.0],
    },
    "wmsam": {
        "alpha0": [0.1, 0.5],
        "lam": [0.01, 0.4],
        "personal": [True, False],
        "alpha_signal": ["disagreement", "agreement"],
    },
    "gmt": {"gamma": [1.0, 0.3, 0.0], "tau": [3.0, 1.0], "beta": [10.0, 2.0], "alpha": [0.95, 0.5]},
    "gloss": {
        "alpha": [0.01, 0.5],
        "server_rho": [0.15, 0.3],
        "ramp": [0, 2],
        "ramp_rho": [None, 0.2],
        "dual_divisor": ["clients", "cohort"],
    },
    "ghbm": {"beta": [0.9, 0.3], "tau": [1, 2, 10]},
    "localghbm": {"beta": [0.9, 0.3], "participation": [0.1, 0.6], "first_anchor": ["absent", "initial"]},
    "hbm": {"beta": [0.9, 1.0], "participation": [0.1, 0.6], "first_anchor": ["absent", "initial"]},
    "dc": {"alpha": [0.01, 0.1, 0.5], "dual_scope": ["all", "active"], "all_mean": [False, True]},
    "nova": {"mu": [0.0, 0.2]},
    "ramped-sam": {"rho": [0.15, 0.4], "ramp": [0, 2], "start_rho": [0.001, 0.2]},
    "sam": {"rho": [0.05, 0.1, 0.4], "share": [1.0, 0.3], "normalise": [True, False]},
    "asam": {"rho": [0.5, 0.1], "eta": [0.2, 0.0], "scope": ["weight", "all"]},
    "lesam": {"rho": [0.1, 0.4], "direction": ["client", "global"], "indexing": ["vector", "tensor"]},
    "smoo": {"rho": [0.1, 0.3], "s_source": ["paper", "dual"]},
    "guided": {"rho": [0.01, 0.3], "perturb_sign": [1, -1], "indexing": ["vector", "tensor"]},
    "sol": {"rho": [1.0, 0.2], "adaptive": [True, False], "tau": [3.0, 1.0]},
    "linear": {"final_lr": [0.1, 0.6], "early_decay": [False, True]},
    "cyclic": {"low": [0.0001, 0.01], "length": [20, 2], "start": [0.75, 0.3]},
    "poly": {"power": [0.9, 2.0], "span": ["run", "round"]},
    "adamw": {"beta1": [0.9, 0.0], "beta2": [0.999, 0.5], "eps": [1e-8, 0.1]},
    "local-adam": {"beta1": [0.9, 0.0], "beta2": [0.999, 0.5], "eps": [1e-8, 0.1]},
    "muon": {"beta": [0.95, 0.5], "alpha": [0.5, 1.0], "orthogonalise": ["ns5", "exact"]},
    "fedadamw": {"gamma": [0.5, 0.0], "second_moment": ["tensor", "weight"], "m_steps": ["round", "run"]},
    "fedmuon": {"beta": [0.98, 0.5], "gamma": [0.5, 0.0], "shape_factor": ["matrix", "kernel"]},
    "sgd": {"server_lr": [1.0, 0.5, 1.5]},
    "momentum": {"beta": [0.9, 0.4], "server_lr": [1.0, 0.5]},
    **{
        name: {
            "server_lr": [0.1, 0.3],
            "tau": [0.001, 0.3],
            "beta1": [0.9, 0.0],
            "bias_correction": [False, True],
            "v_init": [None, 0.2],
        }
        for name in ("adam", "yogi", "adagrad")
    },
    "exp": {"server_lr": [1.0, 1.5], "eps": [0.001, 0.1], "eps_scale": ["one", "cohort"], "eps_decay": [1.0, 0.9]},
    "relaxed": {"beta": [0.1, 0.5], "server": ["displacement", "average"]},
    "scam": {"rho": [0.05, 0.3], "alpha": [1.0, 0.1], "kappa": [1.0, 0.3], "pilot": ["step", "gradient"]},
    "disco": {"a": [0.5, 0.1], "b": [0.1, 0.0], "metric": ["kl", "l2"]},
    "aligned": {"gamma": [1.0, 0.2], "beta": [0.8, 0.3]},
    "awa": {"server_steps": [1, 3], "weights_lr": [0.001, 0.1], "weights_from": ["before", "after"]},
    "swa": {"start": [0.75, 0.0], "every": [None, 2], "weighting": ["mean", "literal"]},
    "wima": {"window": [100, 3], "part": ["all", "classifier"]},
    "ema": {"decay": [0.99, 0.5]},
}
BY_SLOT = {slot: [name for name, (where, _) in known_parts().items() if where == slot] for slot in (*SLOTS, "averages")}


def test_every_part_is_composed() -> None:
    assert set(CHOICES) == set(known_parts())
    for name, values in CHOICES.items():
        assert set(values) <= set(known_parts()[name][1].__dataclass_fields__)


@st.composite
def part(draw: st.DrawFn, slot: str, among: list[str] | None = None) -> tuple[str, Values]:
    name = draw(st.sampled_from(among or BY_SLOT[slot]))
    return name, {key: draw(st.sampled_from(choices)) for key, choices in CHOICES[name].items()}


@st.composite
def compositions(draw: st.DrawFn) -> dict[str, tuple[str, Values]]:
    """Any compatible drift, perturbation, schedule and server optimiser, each optional."""
    chosen: dict[str, tuple[str, Values]] = {}
    if draw(st.booleans()):
        chosen["drift"] = draw(part("drift"))
    drift = chosen.get("drift", ("none", {}))[0]
    among = [
        "sam",
        "ramped-sam",
        "asam",
        *([] if drift == "gloss" else ["lesam"]),
        "scam",
        "sol",
        *(["smoo"] if drift == "dyn" else []),
        *(["guided"] if drift == "wmsam" else []),
    ]
    if draw(st.booleans()):
        chosen["perturbation"] = draw(part("perturbation", among))
    if draw(st.booleans()):
        chosen["lr_schedule"] = draw(part("lr_schedule"))
    needs_sgd = drift in ("cm", "wmsam", "ghbm", "localghbm", "hbm", "dc", "nova") or (
        drift in ("scaffold", "mo") and chosen["drift"][1]["option"] == "II"
    )
    if not needs_sgd and draw(st.booleans()):
        chosen["local_optimiser"] = draw(part("local_optimiser"))
    if drift not in ("acg", "memoryless-acg") and draw(st.booleans()):
        chosen["server"] = draw(part("server", ["sgd"] if drift in ("ghbm", "localghbm", "hbm") else None))
    weights = ["disco", *(["aligned"] if chosen.get("perturbation", ("", {}))[0] == "scam" else [])]
    if drift != "mime" and draw(st.booleans()):
        chosen["start"] = draw(part("start"))
    else:
        weights.append("awa")
    if draw(st.booleans()):
        chosen["weights"] = draw(part("weights", weights))
    if chosen.get("server", ("", {}))[1].get("bias_correction"):
        chosen["server"][1].pop("v_init", None)
    names = {name for name, _ in chosen.values()}
    if "dual_scope" in chosen.get("drift", ("", {}))[1] and names & {"fedadamw", "fedmuon", "awa", "exp"}:
        chosen["drift"][1]["dual_scope"] = "all"
    if "start" in chosen and (drift in ("gloss", "memoryless-acg") or chosen.get("server", ("", {}))[0] == "exp"):
        chosen["start"][1]["server"] = "displacement"
    return chosen


def text_of(chosen: dict[str, tuple[str, Values]]) -> str:
    return "+".join(["fedavg", *(show(name, values) for name, values in chosen.values())])


def changed(chosen: dict[str, tuple[str, Values]], change: Any) -> dict[str, tuple[str, Values]]:
    return {
        slot: (name, {key: change(name, key, value) for key, value in values.items()})
        for slot, (name, values) in chosen.items()
    }


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A named algorithm with some parameters, some parts in any order, and averages; values may equal the defaults."""
    base = draw(st.sampled_from(list(NAMED)))
    values: Values = {}
    start = NAMED[base]
    if base in RELEASED and draw(st.booleans()):
        values["variant"], start = "released", RELEASED[base]
    free = []
    for slot in SLOTS:
        spec = getattr(start, slot)
        name = next((name for name in BY_SLOT[slot] if known_parts()[name][1] is type(spec)), None)
        if spec == getattr(NAMED["fedavg"], slot):
            free.append(slot)
        if name:
            values |= {
                key: draw(st.sampled_from(options)) for key, options in CHOICES[name].items() if draw(st.booleans())
            }
    parts = [draw(part(slot)) for slot in draw(st.permutations(free)) if draw(st.booleans())]
    parts = [(name, {key: value for key, value in some.items() if draw(st.booleans())}) for name, some in parts]
    averages = draw(st.lists(part("averages"), max_size=3, unique_by=repr))
    return "+".join([show(base, values), *(show(name, some) for name, some in parts + averages)])


@settings(max_examples=50, derandomize=True)
@given(texts())
def test_text_round_trip(text: str) -> None:
    """The canonical text parses into the same algorithm, is a fixed point, and is not longer than the given text."""
    try:
        built = algorithm(text)
    except UserError as refusal:
        assert any(
            words in str(refusal)
            for words in (
                " twice",
                "requires the",
                "FedACG",
                "memoryless-acg",
                "GHBM",
                "FedGloSS",
                "SGD",
                "MIME",
                "FedAWA",
                "FedExP",
                "dual_scope",
            )
        )
        assume(False)
    shortest = canonical(built)
    assert algorithm(shortest) == built
    assert canonical(algorithm(shortest)) == shortest
    assert len(shortest) <= len(text)


@settings(max_examples=50, derandomize=True)
@given(compositions(), st.randoms())
def test_parts_commute(chosen: dict[str, tuple[str, Values]], random: Any) -> None:
    shuffled = list(chosen.items())
    random.shuffle(shuffled)
    assert algorithm(text_of(chosen)) == algorithm(text_of(dict(shuffled)))


_bed = bed()
COHORTS = [[0, 1, 2], [1, 3], [0, 1, 3], [2, 0]]
TINY = Setting(
    Quadratics(_bed.problem.A[:4, :4, :4], _bed.problem.b[:4, :4]),
    _bed.x0[:4],
    [0.1 * 0.9**t for t in range(len(COHORTS))],
    [3, 1, 2, 3],
    COHORTS,
)


def tiny(chosen: dict[str, tuple[str, Values]], setting: Setting = TINY, **options: Any) -> Walk:
    return walk(text_of(chosen), setting, names=("weight", "bias"), quick=True, **options)


def close(left: Any, right: Any, tolerance: float) -> bool:
    """Relative to the larger of 1 and what is compared: a composition may be unstable without being wrong."""
    left, right = np.asarray(left), np.asarray(right)
    return bool(np.abs(left - right).max() <= tolerance * max(1.0, np.abs(left).max()))


some = settings(max_examples=25, derandomize=True)


@some
@given(compositions())
def test_the_order_of_clients_does_not_matter(chosen: dict[str, tuple[str, Values]]) -> None:
    turned = TINY.but(cohorts=[cohort[::-1] for cohort in COHORTS])
    left, right = (tiny(chosen, setting, weighting="samples") for setting in (TINY, turned))
    assert close(left.x, right.x, 1e-10)


@some
@given(compositions())
def test_54_translation(chosen: dict[str, tuple[str, Values]]) -> None:
    shift = np.array([1.0, -2.0, 0.5, 3.0])
    moved = TINY.but(problem=Quadratics(TINY.problem.A, TINY.problem.b + shift), x0=TINY.x0 + shift)
    left, right = tiny(chosen).x, tiny(chosen, moved).x
    if chosen.get("weights", ("", {}))[0] == "awa":  # its weights depend on the angle between models
        return
    adaptive = chosen.get("perturbation", ("", {}))[0] == "asam" and chosen.get("drift", ("", {}))[0] != "mime"
    assert close(np.add(left, shift), right, 1e-8) == (
        not adaptive
    )  # on a quadratic MIME's difference forgets the perturbation


WITH_LOSS = {
    ("prox", "mu"),
    ("dyn", "alpha"),
    ("adabest", "mu"),
    ("acg", "beta"),
    ("memoryless-acg", "beta"),
    ("gloss", "alpha"),
    ("dc", "alpha"),
    ("nova", "mu"),
}
AGAINST_LOSS = {("cyclic", "low"), ("gmt", "beta")}


@some
@given(compositions())
def test_55_scale_of_the_loss(chosen: dict[str, tuple[str, Values]]) -> None:
    """Quantities in gradient units scale with s, learning rates with 1/s; components that mix units are exempt."""
    s = 2.0
    steep = TINY.but(eta=[lr / s for lr in TINY.eta])
    scaled = changed(
        chosen,
        lambda name, key, v: s * v if (name, key) in WITH_LOSS else v / s if (name, key) in AGAINST_LOSS else v,
    )
    left, right = tiny(chosen).x, tiny(scaled, steep, scale=s).x
    name, values = chosen.get("perturbation", ("", {}))
    mixes = name in ("smoo", "guided", "scam") or (name == "sam" and not values["normalise"])
    mixes |= "local_optimiser" in chosen  # the size of Adam's steps does not depend on that of the gradient
    assert close(left, right, 1e-8) or mixes


@pytest.mark.parametrize(
    "mixing",
    ["fedsmoo(alpha={})", "fedwmsam(rho=0.3)", "fedavg+sam(normalise=false,rho=0.3)", "fedprox", "feddyn", "adabest"],
)
def test_55_fails_where_units_are_mixed_or_left_behind(mixing: str) -> None:
    s = 2.0
    steep = TINY.but(eta=[lr / s for lr in TINY.eta])
    left, right = (
        walk(mixing.format(a), TINY if a == 0.1 else steep, quick=True, scale=1.0 if a == 0.1 else s)
        for a in (0.1, 0.2)
    )
    assert not close(left.x, right.x, 1e-6)


@some
@given(compositions())
def test_56_states_are_isolated(chosen: dict[str, tuple[str, Values]]) -> None:
    """Swapped clients have swapped states, and clients that do not take part keep theirs bit for bit."""
    swap = [1, 0, 2, 3]
    other = TINY.but(
        problem=Quadratics(TINY.problem.A[swap], TINY.problem.b[swap]),
        steps=[TINY.steps[i] for i in swap],
        cohorts=[[swap[i] for i in cohort] for cohort in COHORTS],
    )
    left, right = tiny(chosen), tiny(chosen, other)
    assert close(left.x, right.x, 1e-10)
    built = algorithm(text_of(chosen))
    before = {i: built.new_client(torch.from_numpy(TINY.x0)) for i in range(4)}
    for t, cohort in enumerate(COHORTS):
        for i, state in left.clients[t].items():
            twin = flat_state(right.clients[t][swap[i]])
            for name, value in flat_state(state).items():
                assert close(value, twin[name], 1e-9)
                if i not in cohort:
                    assert torch.equal(value, flat_state(before[i])[name])
        before = left.clients[t]


def clipped(v: np.ndarray, norm: float | None) -> np.ndarray:
    length = np.linalg.norm(v)
    return v if norm is None or length <= norm else v * norm / length


def by_hand(setting: Setting, rho: float, descent: Descent) -> list[np.ndarray]:
    """SCAFFOLD II with SAM; weight decay acts at the unperturbed point, unclipped; momentum restarts every round."""
    problem, x = setting.problem, setting.x0
    c, c_i, found = np.zeros_like(x), np.zeros_like(problem.b), []
    for t, cohort in enumerate(setting.cohorts):
        ends, change = [], np.zeros_like(x)
        for i in cohort:
            y, velocity = x, np.zeros_like(x)
            for _ in range(setting.steps[i]):
                g = problem.gradient(i, y + rho * unit(problem.gradient(i, y)))
                if descent.clip_mode == "grad":
                    d = clipped(g, descent.clip) - c_i[i] + c
                else:
                    d = clipped(g - c_i[i] + c, descent.clip)
                velocity = descent.momentum * velocity + d + descent.weight_decay * y
                y = y - setting.eta[t] * velocity
            new = c_i[i] - c + (x - y) / (setting.steps[i] * setting.eta[t])
            change += (new - c_i[i]) / problem.N
            c_i[i] = new
            ends.append(y)
        x, c = np.mean(ends, 0), c + change
        found.append(x)
    return found


@settings(max_examples=25, derandomize=True)
@given(
    st.sampled_from([0.0, 0.3]),
    st.builds(
        Descent,
        weight_decay=st.sampled_from([0.0, 0.1, 1.0]),
        momentum=st.sampled_from([0.0, 0.5, 0.9]),
        clip=st.sampled_from([None, 0.5, 2.0, 100.0]),
        clip_mode=st.sampled_from(["total", "grad"]),
    ),
)
def test_weight_decay_clipping_and_local_momentum(rho: float, descent: Descent) -> None:
    same(walk(f"fedgamma(rho={rho})", TINY, descent=descent, quick=True).x, by_hand(TINY, rho, descent))


def test_clipping_acts() -> None:
    """Clipping in either mode changes the trajectory, and the modes differ."""
    walks = [
        by_hand(TINY, 0.3, Descent(clip=clip, clip_mode=mode))
        for clip, mode in ((None, "total"), (0.5, "total"), (0.5, "grad"))
    ]
    assert not any(close(walks[a], walks[b], 1e-3) for a, b in ((0, 1), (0, 2), (1, 2)))
