"""Identities 29 and 57 of the specification through ``fedflat.run``, with real data, batches and augmentation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat import data, models
from fedflat.data.augmentations import Mixup
from fedflat.data.batches import Batch
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.plan import Plan
from fedflat.randomness import seed_torch

SMALL: dict[str, Any] = {
    "rounds": 2,
    "clients": 6,
    "clients_per_round": 3,
    "local_steps": 2,
    "batch_size": 8,
    "workers": 1,
    "model": "mlp(hidden=4)",
}


def weights(algorithm: str = "fedavg", **settings: Any) -> torch.Tensor:
    return fedflat.run(algorithm, **(SMALL | settings)).record.models["server"].weights


@pytest.mark.filterwarnings("ignore:training.statistics=own")
@pytest.mark.parametrize("algorithm", ["fedavg", "fedmoswa+asam"])
def test_29_silobn_without_batch_norm_is_the_base(algorithm: str) -> None:
    first, second = (fedflat.run(algorithm, **SMALL, training__statistics=kind).record for kind in ("averaged", "own"))
    assert torch.equal(first.models["server"].weights, second.models["server"].weights)
    assert first.history == second.history


def test_29_silobn_with_batch_norm_is_not() -> None:
    one = {
        "model": "resnet20(norm=batch)",
        "rounds": 2,
        "clients": 3,
        "clients_per_round": 2,
        "local_steps": 1,
        "batch_size": 4,
        "eval_every": 2,
    }
    first, second = (
        fedflat.run("fedavg", **(SMALL | one), training__statistics=kind).record for kind in ("averaged", "own")
    )
    left, right = first.models["server"], second.models["server"]
    assert torch.allclose(left.weights, right.weights, atol=1e-2)
    assert not torch.equal(left.buffers, right.buffers)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsam"])
def test_29_mixup_with_share_1_is_none(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, mixed = weights(algorithm), weights(algorithm, augmentation="mixup")
    assert not torch.equal(base, mixed)
    draws = Mixup.draws

    def whole(self: Mixup, *uniforms: Any) -> Any:
        drawn = draws(self, *uniforms)
        return drawn | {"lam": torch.ones_like(drawn["lam"])}

    monkeypatch.setattr(Mixup, "draws", whole)
    assert torch.equal(base, weights(algorithm, augmentation="mixup"))


def test_29_cutout_of_nothing_is_none() -> None:
    base = weights()
    assert torch.equal(base, weights(augmentation="cutout(size=0)"))
    assert not torch.equal(base, weights(augmentation="cutout(size=3)"))


@pytest.mark.parametrize("partition", ["centralised", "iid"])
def test_29_one_client_is_centralised_sgd(partition: str) -> None:
    """FedAvg with N = 1 against torch's own SGD over the same K T batches."""
    settings = {
        "rounds": 3,
        "clients": 1,
        "clients_per_round": 1,
        "local_steps": 4,
        "partition": partition,
        "lr": 0.2,
        "weight_decay": 0.01,
    }
    settings["engine__precision"] = "float64"
    found = weights(**settings)
    digits = data.load("digits")
    with torch.random.fork_rng(devices=[]):
        seed_torch(0, "weights")
        model = models.build("mlp(hidden=4)", digits.input_shape, digits.num_classes).double()
    indices = data.make_partition(partition, digits.train.targets, digits.num_classes, 1, 0).clients[0]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.01)
    for round in range(3):
        for positions in Plan(batch_size=8, steps=4).batches(0, round, 0, len(indices)):
            batch = digits.train.take(torch.from_numpy(indices[positions]))
            inputs = (batch.inputs.double() / 255 - digits.mean[0]) / digits.std[0]
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), batch.targets).backward()
            optimiser.step()
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)


class Spy:
    """Every batch that a gradient was taken of, with its loss."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Batch, float]] = []
        inner = Problem.loss_and_gradient

        def spied(
            problem: Problem, vector: torch.Tensor, buffers: Any, batch: Batch, *teacher: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            loss, gradient = inner(problem, vector, buffers, batch, *teacher)
            self.seen.append((batch, float(loss)))
            return loss, gradient

        monkeypatch.setattr(Problem, "loss_and_gradient", spied)


@pytest.mark.parametrize("algorithm", ["fedsam", "fedasam", "fedgamma", "fedsmoo", "mime+sam(rho={rho})"])
@pytest.mark.parametrize("augmentation", ["mixup", "crop-flip(padding=1)+cutout(size=3)+mixup"])
def test_57_both_passes_see_the_same_inputs(algorithm: str, augmentation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: inputs, targets and shares, and so the losses, when rho is too small to change a float."""
    spy, rho = Spy(monkeypatch), 1e-300
    text = algorithm.format(rho=rho) if "{" in algorithm else f"{algorithm}(rho={rho})"
    fedflat.run(text, **(SMALL | {"rounds": 1, "augmentation": augmentation}))
    whole = (
        3 if algorithm.startswith("mime") else 0
    )  # MIME's full-batch gradients come first, and every step has a third pass at z
    passes = 3 if whole else 2
    steps = spy.seen[whole:]
    assert len(steps) == 3 * 2 * passes
    for start in range(0, len(steps), passes):
        (first, loss), *others = steps[start : start + passes]
        assert first.mixed_targets is not None
        for batch, other in others:
            assert torch.equal(first.inputs, batch.inputs)
            assert torch.equal(first.targets, batch.targets)
            assert batch.mixed_targets is not None
            assert torch.equal(first.mixed_targets, batch.mixed_targets)
            assert first.share == batch.share
            if others.index((batch, other)) == 0:
                assert loss == other
    shares = {float(steps[start][0].share) for start in range(0, len(steps), passes)}
    assert len(shares) == 3 * 2
