"""Every method with every switch, library against reference: iterates, states and additional evaluated models."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import flat_state
from fedflat.algorithms.drift import Drift
from fedflat.algorithms.slot import LocalContext
from fedflat.algorithms.state import Fields, State, Weighting, scalar

from ..quadratics import Walk, counts_of, text_of, walk
from ..reference import METHODS, Trace, cyclic_rates, golden
from .settings import BY_SAMPLES, DECAY, FULL, PARTIAL, SETTINGS, STEPS, by_samples, library, reference, same, uneven
from .switches import SWITCHES

Scale = Callable[[Any, dict[str, Any]], Any]


def _plain(value: Any, _: dict[str, Any]) -> Any:
    return value


def _dual(value: Any, parameters: dict[str, Any]) -> Any:
    """The dual of FedDyn and FedGloSS in gradient units: h = -alpha a, with the default of the method."""
    return -parameters["alpha"] * value


SERVER: dict[str, dict[str, tuple[str, Scale]]] = {
    **{name: {"server.m": ("m", _plain)} for name in ("fedavgm", "fedadam", "fedyogi", "fedadagrad")},
    **{name: {"drift.m": ("m", _plain)} for name in ("fedacg", "mime", "mimelite", "fedmo", "fedmoswa")},
    **{name: {"drift.momentum": ("Dlt", _plain)} for name in ("fedcm", "mofedsam")},
    **{name: {"drift.c": ("c", _plain)} for name in ("scaffold", "fedgamma", "fedlesam_s")},
    "feddyn": {"drift.a": ("h", _dual)},
    "fedscam": {"perturbation.u": ("u", _plain)},
    "fedawa": {"weights.moved": ("moved", _plain)},
    "fedsmoo": {"drift.a": ("a", _plain), "perturbation.s": ("s", _plain)},
    "fedgmt": {"drift.a": ("h", _plain), "drift.teacher": ("e", _plain)},
    "fedlesam_d": {"drift.a": ("a", _plain)},
    "adabest": {"drift.aggregate": ("xbar", _plain)},
    **{
        name: {f"local_optimiser.{field}": (field, _plain) for field in (moment, "last", "lr")}
        for name, moment in (("fedadamw", "v"), ("fedmuon", "M"))
    },
    "fedgloss": {"drift.a": ("sigma", _dual), "drift.q": ("q", _plain), "drift.round": ("round", _plain)},
    "feddc": {"drift.a": ("a", _plain), "drift.s": ("s", _plain)},
    "fednsam": {"drift.m": ("m", _plain), "perturbation.step": ("m", _plain)},
    "ghbm": {f"drift.{name}": (name, _plain) for name in ("old", *(f"x{age}" for age in range(1, 10)))},
    "fedwmsam": {"drift.momentum": ("Dlt", _plain), "drift.c": ("c", _plain), "drift.alpha": ("alpha", _plain)},
}
for _name in ("fedadam", "fedyogi", "fedadagrad"):
    SERVER[_name]["server.v"] = ("v", _plain)
CLIENT: dict[str, dict[str, tuple[str, Scale]]] = {
    **{
        name: {"drift.c": ("c", _plain)}
        for name in ("scaffold", "fedgamma", "fedlesam_s", "fedmo", "fedmoswa", "fedwmsam")
    },
    "feddyn": {"drift.a": ("ghat", _dual), "drift.last": ("y", _plain)},
    "fedspeed": {"drift.a": ("ghat", _dual)},
    "fedgmt": {"drift.a": ("h", _plain)},
    "fedsmoo": {"drift.a": ("a", _plain), "perturbation.mu": ("mu", _plain)},
    "fedlesam_d": {"drift.a": ("a", _plain)},
    "adabest": {"drift.h": ("h", _plain), "drift.last": ("last", _plain)},
    "fedgloss": {"drift.a": ("state", _dual)},
    "feddc": {"drift.a": ("a", _plain), "drift.s": ("s", _plain)},
    "localghbm": {"drift.last": ("y", _plain)},
    "fedhbm": {"drift.last": ("y", _plain)},
    "fedinit": {"start.last": ("y", _plain)},
}
for _name in ("fedlesam", "fedlesam_s", "fedlesam_d"):
    CLIENT.setdefault(_name, {})["perturbation.last"] = ("w_old", _plain)
DEFAULTS = {"feddyn": {"alpha": 0.01}, "fedspeed": {"alpha": 0.1}, "fedgloss": {"alpha": 0.1}}


def cases() -> Iterator[Any]:
    """Every switch in the most general setting; in the others, which add no branch, one per method."""
    for method, sets in SWITCHES.items():
        for parameters in sets:
            for setting in ("full", "partial", "uneven-partial") if parameters is sets[-1] else ("uneven-partial",):
                yield pytest.param(method, parameters, setting, id=f"{text_of(method, **parameters)}-{setting}")


ELSEWHERE = {"drift.active", "drift.everyone", "drift.seen", "perturbation.step", "perturbation.seen", "server.t"}
"""State that other tests look at."""


def agree(walked: Walk, trace: Trace, method: str, parameters: dict[str, Any]) -> None:
    """Compare the iterates and all state that the library keeps with the reference."""
    same(walked.x, trace.x)
    full = DEFAULTS.get(method, {}) | parameters
    for server, clients, expected, theirs in zip(
        walked.server, walked.clients, trace.server, trace.clients, strict=True
    ):
        for name, value in flat_state(server).items():
            if name not in ELSEWHERE and (method, name) != (
                "fedspeed",
                "drift.a",
            ):  # the mean of the clients' (identity 43)
                other, scale = SERVER[method][name]
                same(scale(value.numpy(), full), expected[other])
        for i, state in clients.items():
            for name, value in flat_state(state).items():
                if name not in ELSEWHERE:
                    other, scale = CLIENT[method][name]
                    same(scale(value.numpy(), full), theirs[i][other] if other in theirs.get(i, {}) else 0.0)


def test_every_method_and_switch_is_here() -> None:
    assert set(SWITCHES) == set(METHODS)
    for method, run in METHODS.items():
        switches = {p.name: p for p in inspect.signature(run).parameters.values() if p.kind is p.KEYWORD_ONLY}
        tried = {(name, value) for parameters in SWITCHES[method] for name, value in parameters.items()}
        assert {name for name, _ in tried} | {"weight_mask", "scope", "weight_decay"} >= set(switches), method
        for name, switch in switches.items():
            for word in typing.get_args(switch.annotation) if name != "scope" else ():
                assert word in (switch.default, type(None)) or not isinstance(word, str) or (name, word) in tried, (
                    method,
                    name,
                    word,
                )


@pytest.mark.parametrize(("method", "parameters", "setting"), list(cases()))
def test_library_equals_reference(method: str, parameters: dict[str, Any], setting: str) -> None:
    """To 1e-9: equal or unequal steps and rates, full or partial participation, equal weights or sample counts."""
    text = text_of(method, **parameters)
    if setting.startswith("uneven") and method in BY_SAMPLES:
        trace = by_samples(SETTINGS[setting]).run(METHODS[method], **parameters)
        agree(library(text, setting, "samples"), trace, method, parameters)
    # MIME's G is always weighted by samples, and FedDisco's labels depend on the number of samples.
    if not setting.startswith("uneven") or method not in ("mime", "mimelite", "feddisco"):
        agree(library(text, setting), reference(method, setting, **parameters), method, parameters)


def test_the_gradient_by_formula_is_autograds() -> None:
    for text in ("fedsam", "mime-sgdm", "fedmoswa(option=I)"):
        same(walk(text, PARTIAL).x, walk(text, PARTIAL, quick=True).x, atol=1e-13)
        same(walk(text, uneven(FULL), scale=3.0).x, walk(text, uneven(FULL), scale=3.0, quick=True).x, atol=1e-13)


@pytest.mark.parametrize("scope", ["weight", "all"])
@pytest.mark.parametrize("eta", [0.0, 0.2, 3.0])
def test_asam_scales_what_is_named_weight(scope: str, eta: float) -> None:
    names = ("layer1_weight", "layer1_bias", "weight_of_norm")
    mask = np.array([True, True, False, False, True, True])
    parameters = {"rho": 0.4, "asam_eta": eta}
    if scope == "weight":
        trace = PARTIAL.run(METHODS["fedasam"], weight_mask=mask, **parameters)
        same(walk(text_of("fedasam", **parameters), PARTIAL, names=names, quick=True).x, trace.x)
        assert np.abs(np.array(trace.x) - reference("fedasam", "partial", **parameters).x).max() > 1e-3
    elif eta == 0:  # the other common variant: |w| on everything, and no eta
        trace = PARTIAL.run(METHODS["fedasam"], scope="all", **parameters)
        same(walk(text_of("fedasam", scope="all", **parameters), PARTIAL, names=names, quick=True).x, trace.x)
    else:  # with eta it is the scaling of weights, on everything
        same(walk(text_of("fedasam", scope="all", **parameters), PARTIAL, names=names, quick=True).x,
             reference("fedasam", "partial", **parameters).x)  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_feddyn_evaluates_the_active_mean_and_on_request_the_mean_of_all_clients(setting: str) -> None:
    dyn, trace = library("feddyn(alpha=0.3,all_mean=true)", setting), reference("feddyn", setting, alpha=0.3)
    agree(dyn, trace, "feddyn", {"alpha": 0.3})
    same([models["active mean"] for models in dyn.evaluated], trace.evaluated["active_mean"])
    same([models["all mean"] for models in dyn.evaluated], trace.evaluated["all_mean"])
    assert set(library("feddyn", setting).evaluated[0]) == {"active mean"}
    same(
        [m["active mean"] for m in library("feddyn", setting).evaluated],
        reference("feddyn", setting).evaluated["active_mean"],
    )
    best, trace = library("adabest(mu=0.3,beta=0.5)", setting), reference("adabest", setting, mu=0.3, beta=0.5)
    same([models["aggregate"] for models in best.evaluated], trace.evaluated["avg"])


def test_the_active_mean_is_the_mean_of_the_cohorts_models_or_not_offered() -> None:
    """FedSpeed's clients upload y + a_i, from which the mean of y cannot be computed."""
    active = library("fedspeed(dual_scope=active)", "partial")
    ends = [
        np.mean([x + (after[i]["drift"]["a"] - before[i]["drift"]["a"]).numpy() for i in cohort], 0)
        for x, cohort, before, after in zip(
            active.x, PARTIAL.cohorts[1:], active.clients, active.clients[1:], strict=False
        )
    ]
    for models, expected in zip(active.evaluated[1:], ends, strict=True):
        if "active mean" in models:
            same(models["active mean"], expected)


def test_fedacg_broadcasts_its_look_ahead() -> None:
    walked, trace = library("fedacg(lam=0.6,beta=0.3)", "partial"), reference("fedacg", "partial", lam=0.6, beta=0.3)
    same([outcome.cohort_means.z for outcome in walked.outcomes], [state["z"] for state in trace.server])
    same([outcome.cohort_means.x for outcome in walked.outcomes], [PARTIAL.x0, *trace.x[:-1]])


def test_fedlesam_keeps_the_model_received_or_the_last_step() -> None:
    for method in ("fedlesam", "fedlesam_s", "fedlesam_d"):
        trace = reference(method, "partial", rho=0.5)
        walked = library(text_of(method, rho=0.5), "partial")
        for states, theirs in zip(walked.clients, trace.clients, strict=True):
            assert [float(states[i]["perturbation"]["seen"]) for i in range(5)] == [
                float("w_old" in theirs.get(i, {})) for i in range(5)
            ]
            for i in theirs:
                if "w_old" in theirs[i]:
                    same(states[i]["perturbation"]["last"], theirs[i]["w_old"])
        trace = reference(method, "partial", rho=0.5, direction="global")
        walked = library(text_of(method, rho=0.5, direction="global"), "partial")
        steps = [x - state["before"] for x, state in zip(trace.x, trace.server, strict=True)]
        same([state["perturbation"]["step"] for state in walked.server], steps)


def test_fedlesam_on_fedacg_tells_the_models_received_from_the_servers() -> None:
    """Where z is not x, a client goes back to the z it received; the last global step is that of x."""
    walked = library("fedacg+lesam(rho=0.5)", "partial")
    for t, cohort in enumerate(PARTIAL.cohorts):
        for i in cohort:
            same(walked.clients[t][i]["perturbation"]["last"], walked.outcomes[t].cohort_means.z)
    walked = library("fedacg+lesam(rho=0.5,direction=global)", "partial")
    same([state["perturbation"]["step"] for state in walked.server], np.diff([PARTIAL.x0, *walked.x], axis=0))


@pytest.mark.parametrize("signal", ["agreement", "disagreement"])
def test_fedwmsam_signal(signal: str) -> None:
    walked, trace = (run("fedwmsam", "partial", signal=signal, lam=0.5) for run in (_walked, reference))
    same(
        [outcome.message_means["drift"]["signal"] for outcome in walked.outcomes],
        [state["signal"] for state in trace.server],
    )


def _walked(method: str, setting: str, **parameters: Any) -> Walk:
    return library(text_of(method, **parameters), setting)


def test_option_i_of_fedmo_may_look_at_a_few_batches() -> None:
    """All samples of a client are equal, so any subset has its full-batch gradient; only the passes differ."""
    whole, some = (walk(f"fedmo(option=I,option_I_batches={n})", SETTINGS["uneven"], quick=True) for n in (0, 2))
    same(whole.x, some.x)
    saved = sum(n - min(n, 2) for n in STEPS)
    assert whole.outcomes[0].cost.backward_passes - some.outcomes[0].cost.backward_passes == saved


@pytest.mark.parametrize("perturbation", ["sam(rho=0.4)", "asam(rho=0.4)", "lesam(rho=0.4)"])
def test_mime_takes_both_gradients_of_its_difference_at_one_offset(perturbation: str) -> None:
    """So that on a quadratic, g(y + e) - g(z + e) = A (y - z), the offset cancels."""
    same(library(f"mime(beta=0.5)+{perturbation}", "partial").x, reference("mime", "partial", beta=0.5).x)


def test_cyclic_rate() -> None:
    T, high = len(PARTIAL.cohorts), 0.05
    for decay in (1.0, DECAY):
        rates = cyclic_rates(T, high=high, low=0.01, cycle=3, start=0.4)
        trace = PARTIAL.but(eta=[lr * decay**t for t, lr in enumerate(rates)]).run(METHODS["scaffold"])
        same(walk("scaffold+cyclic(low=0.01,length=3,start=0.4)", PARTIAL, decay=decay, quick=True).x, trace.x)
    same(walk("fedavg+cyclic(low=0.01,length=1,start=0.4)", PARTIAL, quick=True).x, reference("fedavg", "partial").x)


@pytest.mark.parametrize("method", ["fedswa", "fedmoswa"])
def test_released_fedswa_decays_before_the_first_round(method: str) -> None:
    rates = [0.06 * DECAY ** (t + 1) for t in range(len(PARTIAL.cohorts))]
    released = {} if method == "fedswa" else {"gamma": 0.1, "gamma_first_round": 1.0, "normaliser": "trapezoid"}
    trace = PARTIAL.but(eta=rates, steps=STEPS).run(METHODS[method], **released)
    same(library(f"{method}(variant=released)", "uneven-partial").x, trace.x)


@pytest.mark.parametrize(
    ("text", "common", "own"),
    [("scaffold", "c", "c"), ("fedmo", "m", "c"), ("fedwmsam", "c", "c"), ("feddyn", "a", "a")],
)
def test_displacements_follow_the_weights_and_everything_else_is_uniform(text: str, common: str, own: str) -> None:
    """D_i follows from the state of client i: -H (c_i+ - c_i + c) for variates, a_i+ - a_i for a dual."""
    setting, walked = SETTINGS["uneven-partial"], library(text, "uneven-partial", "samples")
    n, x, zero = counts_of(setting), setting.x0, np.zeros(6)
    kept, server = dict.fromkeys(range(5), zero), zero
    for t, cohort in enumerate(setting.cohorts):
        now = {i: state["drift"][own].numpy() for i, state in walked.clients[t].items()}
        H = {i: n[i] * setting.eta[t] for i in cohort}
        D = {i: now[i] - kept[i] if text == "feddyn" else -H[i] * (now[i] - kept[i] + server) for i in cohort}
        means = walked.outcomes[t].cohort_means
        same(means.displacement, sum(n[i] * D[i] for i in cohort) / n[cohort].sum())
        same(means.uniform, np.mean(list(D.values()), 0))
        same(means.direction, np.mean([-D[i] / H[i] for i in cohort], 0))
        kept, server = now, walked.server[t]["drift"][common].numpy()
        if text != "fedmo":
            same(server, np.mean(list(kept.values()), 0))
        same(walked.x[t], x + means.displacement.numpy() + (server if text == "feddyn" else 0.0))
        x = walked.x[t]


@dataclass(frozen=True)
class SendsSteps(Drift):
    """FedAvg whose clients send their number of steps three times, averaged with different weights."""

    def sends(self) -> Fields:
        return tuple(scalar(weighting, weighting=weighting) for weighting in typing.get_args(Weighting))

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {}, dict.fromkeys(typing.get_args(Weighting), ctx.steps)


def test_a_message_is_averaged_with_the_weights_that_it_declares() -> None:
    n = np.array(STEPS)  # the uneven setting has one sample per step
    uniform, samples = n.mean(), (n**2).sum() / n.sum()
    for weighting, aggregation in (("uniform", uniform), ("samples", samples)):
        outcome = walk(Algorithm(SendsSteps()), uneven(FULL), weighting=weighting, quick=True).outcomes[0]
        same(list(outcome.message_means["drift"].values()), [uniform, samples, aggregation], atol=1e-12)


def test_golden_setting_is_what_golden_says() -> None:
    same(walk("fedavg", golden(), quick=True).x, golden().run(METHODS["fedavg"]).x, atol=1e-13)
