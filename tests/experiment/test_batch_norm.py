"""BatchNorm statistics in runs: averaged, estimated, or kept by clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedflat
from fedflat.data import load
from fedflat.experiment.config import parse_config
from fedflat.experiment.run import Run
from fedflat.experiment.store.client_states import FileRowStore

SMALL = {"rounds": 6, "clients": 12, "clients_per_round": 4, "local_steps": 3, "workers": 1, "model": "mlp(hidden=8)"}


class Normalised(nn.Module):
    """A classifier with BatchNorm, always with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def test_averaged_and_estimated_statistics_differ() -> None:
    averaged = fedflat.run("fedavg+ema(decay=0.5)", **(SMALL | {"model": Normalised()}))
    estimated = fedflat.run(
        "fedavg+ema(decay=0.5)", evaluation__statistics="estimated", **(SMALL | {"model": Normalised()})
    )
    ema, estimated_ema = (r.record.models["ema(decay=0.5)"] for r in (averaged, estimated))
    assert torch.equal(ema.weights, estimated_ema.weights) and not torch.equal(ema.buffers, estimated_ema.buffers)
    server = averaged.record.models["server"]
    assert server.integer_buffers["layers.2.num_batches_tracked"] == 3 * 6


def test_estimated_statistics_match_the_training_data() -> None:
    model = Normalised()
    run = Run(
        parse_config({"data": {"clients": 4}, "federation": {"clients_per_round": 2}, "engine": {"workers": 1}}),
        model=model,
    )
    weights, _, integer_buffers = run.problem.initial_state()
    buffers = run.problem.buffer_layout.views(run.problem.estimate_buffers(weights, integer_buffers))
    train = run.problem.data.train.inputs
    hidden = model.layers[1](run.problem.normalised(train).flatten(1).to(torch.float32))
    parts = hidden.split(run.problem.evaluation_batch)
    assert torch.allclose(buffers["layers.2.running_mean"], torch.stack([p.mean(0) for p in parts]).mean(0), atol=1e-5)


def test_own_statistics_stay_with_their_clients(tmp_path: Path) -> None:
    """With SiLoBN, the server's statistics never change, and every client's statistics are stored."""
    settings = SMALL | {"training__statistics": "own"}
    result = fedflat.run("fedavg", **(settings | {"model": Normalised()}), out=tmp_path / "run")
    assert torch.equal(result.record.models["server"].buffers, torch.cat([torch.zeros(8), torch.ones(8)]))
    rows = FileRowStore(tmp_path / "run/state/clients", 16, torch.float32)
    kept = [rows[client] for client in range(12) if client in rows]
    assert len(kept) > 4 and all(not torch.equal(a, b) for a in kept for b in kept if a is not b)
    own = fedflat.run("scaffold", **(settings | {"model": Normalised()})).record.statistics.values()
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in own), (
        "copies, which do not keep the clients' states in memory"
    )


@pytest.mark.parametrize("algorithm", ["fedavg", "mime"])
@pytest.mark.parametrize(
    ("sizes", "batch_size", "message"),
    [
        ((4, 1, 4), 4, "client 1 has one example, which BatchNorm cannot normalise; choose a partition"),
        ((4, 5, 4), 4, "client 1 has 5 examples, so .* a single example, .*; choose another"),
    ],
)
def test_a_batch_of_one_example_raises_an_error(
    algorithm: str, sizes: tuple[int, ...], batch_size: int, message: str
) -> None:
    clients = [(torch.rand(size, 64), torch.zeros(size, dtype=torch.long)) for size in sizes]
    settings = {"clients_per_round": 3, "rounds": 1, "workers": 1, "evaluation__batch_size": batch_size}
    with pytest.raises(fedflat.UserError, match=message):
        next(fedflat.rounds(algorithm, Normalised(), clients, batch_size=batch_size, **settings))


def test_batch_norm_without_running_statistics_raises_a_warning() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 10))
    with pytest.warns(UserWarning, match="without running statistics") as caught:
        fedflat.run("fedavg", **(SMALL | {"model": model, "rounds": 1}))
    assert len(caught) == 1


def test_own_statistics_without_batch_norm_raise_a_warning() -> None:
    with pytest.warns(UserWarning, match="has no BatchNorm"):
        own = fedflat.run("fedavg", training__statistics="own", **SMALL)
    assert own.history == fedflat.run("fedavg", **SMALL).history


def test_sam_updates_statistics_once_per_step() -> None:
    settings = SMALL | {"model": Normalised(), "rounds": 1, "local_steps": 1, "batch_size": 64}
    plain, sam = (fedflat.run(text, **settings).record.models["server"] for text in ("fedavg", "fedsam(rho=1e-9)"))
    assert torch.allclose(plain.buffers, sam.buffers, atol=1e-6)
    assert sam.integer_buffers["layers.2.num_batches_tracked"] == 1


def test_estimated_statistics_exclude_validation_examples() -> None:
    """Changing validation examples and held-out clients does not change the estimated statistics."""
    data = load("digits")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    values = {
        "algorithm": "fedavg+wima",
        "model": "custom:Sequential",
        "data": {"clients": 6, "validation": 0.2, "partition": "iid+held-out(share=0.3)"},
        "federation": {"clients_per_round": 3},
        "training": {"rounds": 2, "local_steps": 1},
        "evaluation": {"statistics": "estimated", "batch_size": 7},
        "engine": {"workers": 1, "device": "cpu"},
    }
    unseen = torch.ones(len(data.train), 1, 1, 1, dtype=torch.bool)
    unseen[torch.from_numpy(Run(parse_config(values), data=data, model=network).partition.trained_on)] = False
    assert 0.2 < unseen.double().mean() < 0.7
    statistics = []
    for inputs in (data.train.inputs, torch.where(unseen, 255 - data.train.inputs, data.train.inputs)):
        moved = replace(data, train=replace(data.train, inputs=inputs))
        statistics.append(Run(parse_config(values), data=moved, model=network).execute().models["wima"].buffers)
    assert torch.equal(*statistics)
