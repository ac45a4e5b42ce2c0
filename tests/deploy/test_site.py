"""A site by itself, without Flower around it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fedflat.deploy.site.site import MODEL, Site
from fedflat.engines.round.client import common_gradient
from fedflat.experiment.config import config


def test_dropout_of_a_whole_gradient_is_that_of_the_simulation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    values = {
        "algorithm": "mime",
        "model": "custom:Sequential",
        "data": {"clients": 4},
        "federation": {"clients_per_round": 2},
    }
    site = Site(config(values), 1, tmp_path, model=model)
    received = {MODEL: site.problem.initial()[0]}
    torch.manual_seed(1)  # whatever else was drawn in its process
    found, _ = site.whole_gradient(3, received)
    expected, _, _ = common_gradient(site.problem, site.training, site._table(received, {}), 3, 1, site.indices, 0)
    assert torch.equal(found, expected)
    assert not torch.equal(found, site.whole_gradient(4, received)[0])
