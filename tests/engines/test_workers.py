"""The number of workers changes nothing, bit for bit."""

from __future__ import annotations

import pytest
import torch

import fedflat

SETTINGS = {"rounds": 3, "clients": 10, "per_round": 5, "steps": 3, "model": "mlp(hidden=8)"}


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedmoswa+asam+wima(window=2)", "scaffold(option=I)", "mime-sgdm", "fedsmoo", "fedwmsam", "adabest"]
)
def test_one_and_four_workers_agree(algorithm: str) -> None:
    one, four = (fedflat.run(algorithm, workers=workers, **SETTINGS).record for workers in (1, 4))
    assert one.history == four.history
    for name, model in one.models.items():
        assert torch.equal(model.weights, four.models[name].weights)


def test_batch_norm_statistics_agree_too() -> None:
    small = {**SETTINGS, "model": "resnet20(norm=batch)", "clients": 4, "per_round": 3, "rounds": 1, "steps": 1, "batch": 4}
    one, four = (fedflat.run("fedsam", workers=workers, **small).record.models["server"] for workers in (1, 4))
    assert torch.equal(one.buffers, four.buffers)
    assert not torch.equal(one.buffers, torch.zeros_like(one.buffers))
