"""Runs with virtual time: golden iterates, identities with synchronous runs, policies and availability."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat.algorithms.algorithm import flat_fields, flat_state
from fedflat.data import from_clients
from fedflat.engines.round.contract import Cost
from fedflat.errors import UserError
from fedflat.experiment.timeline.asynchronous import ClientUpdates
from fedflat.testing.quadratics import QuadraticModel, ValueTask
from fedflat.timing import Flight, ServerUpdate

from ..reference.arrivals import arrivals, iterates

MATRICES, CENTRES = [np.diag([1.0, 2.0]), np.diag([3.0, 0.5])], [np.array([1.0, -1.0]), np.array([-1.0, 2.0])]
START = np.array([0.5, 0.25])
GOLDEN = {
    "fedasync(alpha=0.6,staleness=constant)": [
        (0.0840008, 0.159703), (0.506361814712, -0.40500979328), (0.0641632640279, -0.223786606991)],
    "fedasync(alpha=0.6)": [
        (0.305258441259, -0.00571491959376), (0.526104165473, -0.387643620123), (0.377995035742, -0.456677128431)],
    "fedasync(alpha=0.6,staleness=hinge,a=10,b=1)": [
        (0.559910981818, -0.196099727273), (0.675024383148, -0.516589528553), (0.720904706759, -0.688554666684)],
    "fedasync(alpha=0.6) prox": [
        (0.311312486948, 0.00048516399295), (0.526039558851, -0.37499022658), (0.381005532469, -0.444817919887)],
    "fedbuff(buffer=2)": [
        (0.595, -0.2), (0.363006656196, -0.28367495273), (0.298229241088, -0.562151798822)],
    "fedbuff(buffer=3,staleness=constant)": [
        (0.308333333333, 0.006875), (0.308333333333, 0.006875), (0.427611111111, -0.384775)],
    "fedbuff(buffer=2,sum=true,reference=1)": [
        (0.768700576851, -1.02279220614), (0.0658508652763, -0.840563309204), (-0.0525314022614, -0.760787360232)],
}  # fmt: skip
"""The model after arrivals 3, 5 and 8 (section 6.3)."""
DIGITS: dict[str, Any] = {
    "rounds": 5,
    "clients": 12,
    "clients_per_round": 4,
    "local_steps": 2,
    "workers": 1,
    "model": "mlp(hidden=4)",
    "evaluation__examples": 20,
}


def quadratics(algorithm: str = "fedavg", rounds: int = 4, clients: int = 2, **settings: Any) -> list[Tensor]:
    """The server models x^0, ..., x^T of a run on the quadratics of the specification."""
    inputs = [np.concatenate([A.ravel(), b])[None] for A, b in zip(MATRICES, CENTRES, strict=True)]
    data = from_clients([(each, np.zeros(1, dtype=np.int64)) for each in inputs[:clients]], test=(inputs[0], [0]))
    settings = {"local_steps": 2, "lr": 0.1, "batch_size": 1, "clients_per_round": clients, "workers": 1} | settings
    settings |= {"partition": "natural", "data__clients": None}
    rounds_of_run = fedflat.rounds(
        algorithm,
        dataset=data,
        model=QuadraticModel(torch.from_numpy(START)),
        task=ValueTask(),
        rounds=rounds,
        engine__precision="float64",
        federation__weighting="uniform",
        **settings,
    )
    models = [torch.from_numpy(START)]
    models += [round.server.model.weights.clone() for round in rounds_of_run]
    return models


def two_speeds(folder: Path) -> str:
    """A clock with which the clients need 1 and 2.5 seconds for two steps."""
    file = folder / "speeds.csv"
    file.write_text("client,seconds_per_step\n1,1.25\n0,0.5\n")
    return f"trace(path={file})"


def weights(algorithm: str = "fedavg", **settings: Any) -> Tensor:
    return fedflat.run(algorithm, **(DIGITS | settings)).record.models["server"].weights


@pytest.mark.parametrize("text", GOLDEN)
def test_golden_iterates(text: str, tmp_path: Path) -> None:
    policy, _, prox = text.partition(" ")
    models = quadratics("fedprox(mu=0.5)" if prox else "fedavg", rounds=8, clock=two_speeds(tmp_path), policy=policy)
    buffer = {"fedbuff(buffer=2": 2, "fedbuff(buffer=3": 3}.get(policy[:16], 1)
    versions = [arrivals([1.0, 2.5], buffer, arrival)[-1].version for arrival in (3, 5, 8)]
    np.testing.assert_allclose([models[version].numpy() for version in versions], GOLDEN[text], rtol=0, atol=1e-11)


def test_any_number_of_updates_agrees_with_the_reference(tmp_path: Path) -> None:
    """Forty arrivals, in which the fast client starts several times from one version."""

    def train(client: int, y: np.ndarray) -> np.ndarray:
        for _ in range(2):
            y = y - 0.1 * MATRICES[client] @ (y - CENTRES[client])
        return y

    models = quadratics(rounds=8, clock=two_speeds(tmp_path), policy="fedbuff(buffer=5,a=0.7)")
    expected = iterates(train, START, arrivals([1.0, 2.5], 5, 40), 5, lambda tau: (1 + tau) ** -0.7, mixes_models=False)
    np.testing.assert_allclose(torch.stack(models).numpy(), expected, rtol=0, atol=1e-12)


def test_identities_of_the_specification(tmp_path: Path) -> None:
    """Identities 159 to 164."""
    clock = two_speeds(tmp_path)

    def same(left: list[Tensor], right: list[Tensor], exact: bool = True) -> None:
        torch.testing.assert_close(torch.stack(left), torch.stack(right), rtol=0, atol=0 if exact else 1e-13)

    for staleness in ("polynomial", "constant", "hinge"):  # 159
        policy = f"fedbuff(buffer=2,staleness={staleness})"
        same(quadratics(clock="constant", policy=policy), quadratics())
    same(  # 160 and 161
        quadratics("fedavg(server_lr=0.6)", clients=1, policy="fedbuff(buffer=1,staleness=constant)"),
        quadratics("fedavg(server_lr=0.6)", clients=1),
    )
    same(quadratics(clients=1, policy="fedasync(0.6)"), quadratics("fedavg(server_lr=0.6)", clients=1))
    constant = quadratics(clock=clock, policy="fedasync(staleness=constant)")  # 162
    same(quadratics(clock=clock, policy="fedasync(staleness=hinge,b=99)"), constant)
    same(quadratics(clock=clock, policy="fedasync(a=0)"), constant)
    result = fedflat.run(policy="fedasync", **(DIGITS | {"rounds": 8}))  # 163: cohorts of four arrive at one instant
    assert [line["staleness"] for line in result.record.history] == [None, 0, 1, 2, 3, 0, 1, 2, 3]
    same(  # 164
        quadratics("fedavg(server_lr=0.5)", clock=clock, policy="fedbuff(buffer=2,sum=true)"),
        quadratics(clock=clock, policy="fedbuff(buffer=2)"),
        exact=False,
    )


@pytest.mark.parametrize(
    "algorithm",
    ["scaffold", "fedmoswa+asam", "fedcm", "fedwmsam", "mimelite", "fedlesam", "local-adamw+momentum", "ghbm"],
)
def test_zero_latency_and_a_buffer_of_cohort_size_is_synchronous(algorithm: str) -> None:
    synchronous = weights(algorithm)
    assert torch.equal(weights(algorithm, policy="fedbuff(buffer=4)"), synchronous)
    assert torch.equal(weights(algorithm, clock="lognormal+uplink(mbps=1)"), synchronous)


def test_loop_and_lanes_agree_on_asynchronous_runs() -> None:
    """Eight of twelve clients are in flight, so that some train in one group, and others alone or repeatedly."""
    settings = {"clock": "lognormal(1)", "policy": "fedbuff(buffer=6)", "clients_per_round": 8, "rounds": 6}
    for algorithm in ("scaffold", "fedmoswa+sam"):
        assert torch.equal(
            weights(algorithm, engine="loop", **settings), weights(algorithm, engine="lanes", **settings)
        )


def test_stale_control_variates_stay_the_mean_of_those_of_clients_that_arrived() -> None:
    """With all clients in one buffer, the server's control variate is the mean of the clients' control variates."""
    settings = DIGITS | {"clients": 4, "clock": "lognormal(1)", "policy": "fedbuff(buffer=3)"}
    for round in fedflat.rounds("scaffold", **settings):
        flying = {flight.client for flight in round.run.timeline._simulation.state.in_flight}
        flying |= {flight.client for flight in round.run.timeline._pending}
        if not flying:
            continue
        trained = [round.client_state(client)["drift.c"] for client in range(4)]
        pending = [update.tensors["sent/drift.dc"] for update in round.run.timeline._pending.values()]
        mean = torch.stack(trained).sum(0) - torch.stack(pending).sum(0) if pending else torch.stack(trained).sum(0)
        torch.testing.assert_close(round.server_state()["drift.c"], mean / 4, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("algorithm", "message"), [("scaffold", 1.5), ("mimelite-sgdm", 1.25)])
def test_a_buffer_is_combined_by_shares_and_staleness(algorithm: str, message: float) -> None:
    """An update with 3 samples, staleness 3 and weight 1/2, and a fresh one with 1 sample and weight 1."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 10))
    settings = DIGITS | {"model": model, "policy": "fedbuff(buffer=2)", "rounds": 1}
    run = next(iter(fedflat.rounds(algorithm, **settings))).run
    x, buffers = run.server.model.weights, run.server.model.buffers
    (name,) = flat_fields(run.algorithm.message_fields())

    def update(flight: Flight, samples: int, value: float, lr_sum: float, passes: int) -> ClientUpdates:
        tensors = {"displacement": torch.full_like(x, value), f"sent/{name}": torch.full_like(x, value)}
        tensors |= {"lr_sum": torch.tensor(lr_sum), "loss": torch.tensor(value)}
        tensors["buffers"] = torch.full_like(buffers, 4 * value)
        return ClientUpdates([flight], [samples], tensors, Cost(backward_passes=passes))

    flights = [Flight(1.0, 0, version=0, repetition=0), Flight(2.0, 1, version=3, repetition=0)]
    groups = [update(flights[0], 3, 1.0, 0.5, 1), update(flights[1], 1, 2.0, 0.25, 3)]
    outcome = run.timeline._combine(run.server, ServerUpdate(3, 2.0, flights, []), groups, [])
    assert outcome.cohort_means.displacement.unique().item() == 3 / 4 / 2 * 1 + 1 / 4 * 2
    assert outcome.cohort_means.uniform.unique().item() == 1 / 2 / 2 * 1 + 1 / 2 * 2
    torch.testing.assert_close(outcome.cohort_means.direction, torch.full_like(x, (-2 / 2 - 8) / 1.5))
    torch.testing.assert_close(outcome.buffers, (1 - 0.375 - 0.25) * buffers + 0.375 * 4 + 0.25 * 8)
    assert flat_state(outcome.message_means)[name].unique().item() == message
    assert outcome.loss == (1 * 1 + 3 * 2) / 4


def test_momentum_of_fedmo_moves_towards_stale_control_variates_from_its_current_value() -> None:
    settings = DIGITS | {"clock": "lognormal(1)", "policy": "fedbuff(buffer=1)", "rounds": 8}
    momentum, stale = None, 0
    for round in fedflat.rounds("fedmo", **settings):
        run = round.run
        (client,) = run.timeline.participants
        c, m = run.client(client).state["drift"]["c"], run.server.states["drift"]["m"]
        if momentum is not None:
            torch.testing.assert_close(m, momentum + 0.2 * (c - momentum))
        momentum, stale = m, stale + run.history[-1]["staleness"]
    assert stale


def test_momentum_of_fedcm_is_a_mean_of_directions_without_the_mixing_weight() -> None:
    """With one client, the first directions of FedAsync and of the synchronous run are the same."""
    settings = DIGITS | {"clients": 1, "clients_per_round": 1, "rounds": 1}
    one, other = (
        next(iter(fedflat.rounds("fedcm", **settings | more))).run.server.states["drift"]["momentum"]
        for more in ({}, {"clock": "constant", "policy": "fedasync(alpha=0.5)"})
    )
    assert torch.equal(one, other)


def test_a_client_that_starts_twice_from_one_version_draws_other_batches() -> None:
    """With equal batches, the mean of the two displacements would be that of FedAvg's only client."""
    settings = {"clients": 1, "clients_per_round": 1, "rounds": 1}
    twice, once = weights(policy="fedbuff(buffer=2)", **settings), weights(**settings)
    assert (twice - once).abs().max() > 1e-4


def test_batch_norm_statistics_are_mixed_by_staleness() -> None:
    """With FedAsync and alpha near 0, neither weights nor statistics move."""
    settings = DIGITS | {
        "model": "resnet20(norm=batch)",
        "clients_per_round": 2,
        "rounds": 2,
    }
    runs = [fedflat.run(policy=f"fedasync({alpha})", **settings) for alpha in (1e-9, 1.0)]
    start, end = (run.record.models["server"].buffers for run in runs)
    torch.testing.assert_close(start, torch.where(start > 0.5, 1.0, 0.0), rtol=0, atol=1e-6)
    assert (start > 0.5).any()  # the initial variances
    assert (end - start).abs().max() > 0.01


def test_over_selection_keeps_the_fastest(tmp_path: Path) -> None:
    file = tmp_path / "speeds.csv"
    file.write_text("client,seconds_per_step\n" + "".join(f"{client},{1 + client}\n" for client in range(12)))
    settings = DIGITS | {"clock": f"trace({file})", "local_steps": 2, "clients_per_round": 2, "rounds": 3}
    for round in fedflat.rounds(policy="over-select(extra=5)", **settings):  # all twelve are sampled
        assert round.cohort == (0, 1)
    record = round.run.record or round.run
    assert record.history[-1]["virtual_seconds"] == 3 * 2 * 2.0
    floats = record.history[-1]["bytes_up"] / 6
    assert record.history[-1]["bytes_down"] / 36 == floats  # all twelve receive the model, two send an update
    assert torch.equal(weights(policy="over-select(extra=0)", clock="lognormal"), weights())


def test_a_deadline_with_dropped_and_partial_work(tmp_path: Path) -> None:
    file = tmp_path / "speeds.csv"
    file.write_text("client,seconds_per_step\n0,1\n1,2\n2,9\n")
    settings = DIGITS | {"clients": 3, "clients_per_round": 3, "local_steps": 4, "rounds": 2, "clock": f"trace({file})"}
    dropped = list(fedflat.rounds(policy="deadline(seconds=5)", **settings))
    assert [round.cohort for round in dropped] == [(0,), (0,)]
    assert dropped[-1].evaluation["virtual_seconds"] == 10 and dropped[-1].evaluation["backward_passes"] == 8
    partial = list(fedflat.rounds(policy="deadline(seconds=5,late=partial)", **settings))
    assert [round.cohort for round in partial] == [(0, 1), (0, 1)]
    assert partial[-1].evaluation["backward_passes"] == 2 * (4 + 2)
    patient = list(fedflat.rounds(policy="deadline(seconds=99)", **settings))
    assert patient[-1].evaluation["virtual_seconds"] == 2 * 4 * 9
    partial_work = settings | {"policy": "deadline(seconds=5,late=partial)"}
    assert torch.equal(weights("fednova", **partial_work, engine="lanes"), weights("fednova", **partial_work))


def test_a_deadline_that_only_clients_with_little_work_meet() -> None:
    """Clients that complete only part of their steps, or that have few examples among many clients, may meet it."""
    settings = DIGITS | {"local_steps": 4, "rounds": 1, "clock": "constant(2)", "policy": "deadline(seconds=3)"}
    with pytest.raises(UserError, match="even the fastest one needs 8 s"):
        fedflat.run(**settings)
    assert fedflat.run(**settings, federation__partial=0.5).status == "finished"
    assert fedflat.run(**settings | {"clients": 1001, "partition": "iid"}).status == "finished"


def test_sam_takes_twice_as_long_and_twice_the_upload_too() -> None:
    def seconds(algorithm: str, clock: str) -> float:
        settings = DIGITS | {"rounds": 1, "local_steps": 3}
        return fedflat.run(algorithm, clock=clock, **settings).record.history[-1]["virtual_seconds"]

    assert seconds("fedsam", "constant(2)") == 2 * seconds("fedavg", "constant(2)") == 12
    assert seconds("scaffold", "uplink(1)") == 2 * seconds("fedavg", "uplink(1)") > 0
    assert seconds("fedavg", "latency(7)") == 7


def test_idle_rounds_do_not_make_updates_stale(tmp_path: Path) -> None:
    """The update of client 0 waits in the buffer during idle rounds until client 1 comes, at 200 s."""
    file = tmp_path / "sessions.csv"
    file.write_text("client,start,end\n0,0,10\n1,200,9999\n")
    settings = DIGITS | {"clients": 2, "clients_per_round": 2, "local_steps": 1, "rounds": 6}
    settings |= {"clock": f"constant(20)+sessions({file})"}
    policies = ("fedbuff(buffer=2)", "fedbuff(buffer=2,staleness=constant)")
    record, constant = (fedflat.run(policy=policy, **settings).record for policy in policies)
    assert record.history[-1]["idle_rounds"] == 3 < record.history[-1]["round"]
    assert all(not line.get("staleness") for line in record.history)
    assert torch.equal(record.models["server"].weights, constant.models["server"].weights)


@pytest.mark.parametrize("policy", ["wait", "fedbuff(buffer=2)"])
def test_rounds_without_anybody_make_no_progress(policy: str, tmp_path: Path) -> None:
    """All clients are there until 10 s, and again from 200 s on. Early stopping ignores the three idle rounds."""
    file = tmp_path / "sessions.csv"
    file.write_text("client,start,end\n" + "".join(f"{c},0,10\n{c},200,9999\n" for c in range(12)))
    settings = DIGITS | {"clients_per_round": 2, "rounds": 7, "local_steps": 1, "policy": policy}
    settings |= {"data__validation": 0.2, "stop__patience": 3}
    history = fedflat.run("fedavg+ema", clock=f"constant(20)+sessions({file})", **settings).record.history
    times, idle = [line["virtual_seconds"] for line in history], [line["idle_rounds"] for line in history]
    assert times == [0, 20, 80, 140, 200, 220, 240, 260] and idle == [0, 0, 1, 2, 3, 3, 3, 3]
    assert history[1]["test"] == history[4]["test"] != history[5]["test"]


def test_only_available_clients_are_sampled() -> None:
    """With clients available for a tenth of the day, cohorts are small, and differ over the day."""
    settings = DIGITS | {"clients": 40, "rounds": 6, "local_steps": 1}
    run = fedflat.rounds(clock="constant(9000)+diurnal(share=0.1)", **settings)
    for round in run:
        timeline = round.run.timeline
        before = round.run.history[-2]["virtual_seconds"]
        assert timeline.clock.available(np.array(round.cohort, dtype=np.int64), before).all()
        assert len(round.cohort) <= 4


REFUSED = {
    "mime": "mean of the cohort's gradients",
    "feddyn": "mean of the clients' duals",
    "fedgmt": "mean of the clients' duals",
    "fedacg": "momentum that has changed",
    "fednova": "normalised by the mean steps",
    "adabest": "whole cohorts",
    "feddisco": "chooses the weights",
    "fedinit": "a model of its own",
    "fedexp": "with their mean",
}


@pytest.mark.parametrize("algorithm", REFUSED)
def test_algorithms_that_need_a_common_start_are_refused(algorithm: str) -> None:
    with pytest.raises(UserError, match=f"does not work with {algorithm}: .*{REFUSED[algorithm]}.*synchronous policy"):
        weights(algorithm, policy="fedbuff")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "fedcm", "policy": "fedbuff(sum=true)"}, "also computes server state; use fedbuff without sum"),
        ({"clock": "constant+markov", "federation__dropout": 0.5}, "decides who is available"),
        ({"policy": "fedbuff(buffer=10001)"}, "buffer.*10000"),
        ({"policy": "deadline"}, "needs virtual time; add a clock, such as --clock 'lognormal"),
        ({"clock": "lognormal", "policy": "deadline(0.001)"}, "even the fastest one needs .* s; use a longer deadline"),
        ({"clock": "lognormal+constant"}, "sets the speed twice"),
        ({"clock": "constant(0)"}, "out of range; expected a number above 0"),
        ({"clock": "uplink(mbps=-1)"}, "out of range"),
        ({"clock": "tiers(seconds=0.1|0)"}, "expected numbers above 0"),
        ({"clock": "tiers(shares=1|2)"}, "3 step times but 2 shares"),
        ({"clock": "lognromal"}, "did you mean lognormal"),
        ({"policy": "fedbuf"}, "did you mean fedbuff"),
        ({"clock": "trace"}, r"trace needs a file; write trace\(path=FILE.csv\)"),
        ({"clock": "trace(missing.csv)"}, "does not exist"),
        ({"policy": "fedbuff", "federation__aggregation": "median"}, "use mean"),
        ({"policy": "fedbuff", "federation__sampling": "bernoulli"}, "in flight"),
        ({"policy": "fedbuff", "federation__dropout": 0.1}, "in flight"),
        ({"policy": "fedbuff", "flatness": "1"}, "use --flatness every=1,what=lambda_max[+]gap"),
    ],
)
def test_bad_input_is_explained_before_the_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        weights(**settings)


def test_a_reference_staleness_without_weight_is_rejected() -> None:
    with pytest.raises(UserError, match="reference=10000 is zero up to rounding"):
        fedflat.run("fedavg", **DIGITS | {"policy": "fedbuff(a=100,reference=10000)"})
