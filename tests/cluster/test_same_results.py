"""Ray is bit-identical to the loop engine for any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedflat
from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import flat_fields
from fedflat.algorithms.named import NAMED, RELEASED
from fedflat.data import from_arrays
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.round.contract import ModelState
from fedflat.experiment.analysis.replay import Replay
from fedflat.experiment.setup.problem import build_problem
from tests.language.tiny import Tiny, language

from .federations import engine_of, same, small, walk

TEXTS = [
    *NAMED,
    *(f"{name}(variant=released)" for name in RELEASED),
    "scaffold(option=I)",
    "mime+sam",
    "fedspeed(share=0.5)",
]


def kind_of_state(text: str) -> tuple[Any, ...]:
    """What Ray sends between processes for an algorithm: vectors or scalars, and how they are averaged."""
    parts = algorithm(text)
    fields = (parts.server_fields(), parts.client_fields(), parts.message_fields())
    kinds = [frozenset((f.vector, f.sent, f.weighting) for f in flat_fields(each).values()) for each in fields]
    return parts.drift.full_gradient, parts.perturbation.pilot_batches, parts.weights.are_chosen, *kinds


ONE_OF_EACH_KIND = list({kind_of_state(text): text for text in TEXTS}.values())


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_every_kind_of_state_on_two_workers(ray: Any) -> None:
    """Three rounds, so that more than half of the later cohorts have taken part before and have state."""
    engine = engine_of(small(), 2)
    configs = {text: small(algorithm=text) for text in ONE_OF_EACH_KIND}
    different = [text for text, config in configs.items() if not same(walk(config, engine, 3), walk(config, rounds=3))]
    assert different == [] and len(set(engine.pool.process_ids)) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"federation__aggregation": "median"},
        {"training__statistics": "own"},
        {"algorithm": "fedavg+disco"},
        {"training__statistics": "own", "privacy": "dp(noise=1)"},
        {"training__statistics": "own", "privacy": "local-dp(noise=1)"},
    ],
    ids=str,
)
def test_cohorts_of_many_blocks_and_normalisation(ray: Any, settings: dict[str, Any]) -> None:
    """Seventy clients make nine blocks, enough for two workers to return sums, unless rows are needed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))
    settings = {"algorithm": "fedmoswa"} | settings
    config = small(clients=80, clients_per_round=70, local_steps=1, batch_size=4, partition="iid", **settings)
    engine = engine_of(config, 2, model)
    assert same(walk(config, engine, 2, model), walk(config, rounds=2, model=model))
    has_rows = engine.cohort_buffers is not None
    assert has_rows == ("federation__aggregation" in settings or settings["algorithm"] == "fedavg+disco")


def test_rows_of_private_clients(ray: Any) -> None:
    """Rows are clipped on the workers, and the driver adds the noise."""
    for privacy in ("dp(noise=1,clip=0.01)", "local-dp(noise=1,clip=0.01)"):
        config = small(algorithm="scaffold", privacy=privacy)
        assert same(walk(config, engine_of(config, 2), 2), walk(config, rounds=2))


@pytest.mark.parametrize("settings", [{}, {"training__statistics": "own"}], ids=str)
def test_workers_that_sum_their_shares(ray: Any, settings: dict[str, Any]) -> None:
    """As workers with a GPU do: equal up to rounding, with each client's own statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))
    config = small(algorithm="fedmoswa", clients=12, clients_per_round=7, **settings)
    engine = engine_of(config, 2, model)
    engine.sums_shares = True
    result, expected = walk(config, engine, 3, model), walk(config, rounds=3, model=model)
    assert engine.cohort_buffers is None and result.keys() == expected.keys()
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_evaluation_agrees_with_the_loop(ray: Any) -> None:
    config = small(data__validation=0.1, evaluation__batch_size=50)
    engine = engine_of(config, 2)
    problem = build_problem(config)[0]
    model = ModelState(*problem.initial_state())
    models = {"one": model, "other": model._replace(weights=model.weights * 2)}
    assert engine.evaluate(models, engine.problem.evaluation_sets) == LoopEngine(problem, 1).evaluate(
        models, problem.evaluation_sets
    )


def test_a_run_with_user_supplied_data_and_model(ray: Any, tmp_path: Path) -> None:
    x, y = torch.randn(120, 6, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 3
    data = from_arrays(x[:90], y[:90], x[90:], y[90:], name="mine")
    settings: dict[str, Any] = {
        "dataset": data,
        "clients": 6,
        "clients_per_round": 3,
        "rounds": 3,
        "local_steps": 2,
        "device": "cpu",
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    runs = [
        fedflat.run("fedsam+ema", model=model, engine=name, workers=2, out=tmp_path / name, **settings)
        for name in ("loop", "ray")
    ]
    assert runs[0].history == runs[1].history
    one, other = (run.state_dict("ema") for run in runs)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("train", ["all", "lora(rank=2,exact=true)", "lora(rank=2,only_b=true)"])
def test_a_run_with_a_language_model(ray: Any, train: str) -> None:
    """With the calling convention of ``transformers``, whose import takes seconds on each worker."""
    torch.manual_seed(0)
    user_objects = {"dataset": language(), "model": Tiny()}
    settings = {"clients": 4, "clients_per_round": 3, "partition": "iid", "rounds": 2, "local_steps": 3, "lr": 0.5}
    loop, cluster = (
        fedflat.run("scaffold+sam", **user_objects, **settings, train=train, engine=name, workers=workers, device="cpu")
        for name, workers in (("loop", 1), ("ray", 2))
    )
    one, other = (result.record.models["server"] for result in (loop, cluster))
    assert torch.equal(one.weights, other.weights) and torch.equal(one.buffers, other.buffers)
    assert bool(one.buffers.any()) == ("exact" in train) and loop.record.history == cluster.record.history


def test_groups_of_clients_train_together(ray: Any) -> None:
    """Afterwards, their states can be read, and each group has the loop's outcome."""
    config = small(algorithm="scaffold")
    engine, replay = engine_of(config, 2), Replay(config, *build_problem(config), workers=1)
    first, second, *others = replay.clients()
    groups, moment = [others, [second], [first]], replay.moment
    train = replay.training, 0, moment.model, moment.states, groups
    cluster, loop = engine.train_groups(*train), replay.engine.train_groups(*train)
    assert len(cluster) == 3
    for one, other in zip(cluster, loop, strict=True):
        assert torch.equal(one.cohort_means.displacement, other.cohort_means.displacement) and one.cost == other.cost
        for client, expected in zip(one.clients, other.clients, strict=True):
            assert client.number == expected.number
            assert torch.equal(client.state["drift"]["c"], expected.state["drift"]["c"])


@pytest.mark.parametrize("policy", ["fedbuff(buffer=3)", "fedasync", "deadline(seconds=0.6,late=partial)"])
def test_virtual_time_agrees_with_the_loop_engine(ray: Any, policy: str) -> None:
    """Few clients, so that some start several times from one version, with states that are still on a worker."""
    settings = {"rounds": 6, "clients": 4, "clients_per_round": 3, "local_steps": 3, "model": "mlp(hidden=2)"}
    settings |= {"clock": "lognormal(1)", "policy": policy, "evaluation__examples": 20}
    loop, cluster = (
        fedflat.run("scaffold", engine=engine, workers=workers, **settings)
        for engine, workers in (("loop", 1), ("ray", 2))
    )
    assert torch.equal(loop.record.models["server"].weights, cluster.record.models["server"].weights)
    assert loop.record.history == cluster.record.history
