"""A site without Flower."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fedflat.deploy.site.site import MODEL, Site
from fedflat.engines.round.client import write_full_gradient
from fedflat.engines.round.contract import ClientRound
from fedflat.experiment.config import parse_config


def test_dropout_in_a_full_gradient_agrees_with_the_simulation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    values = {
        "algorithm": "mime",
        "model": "custom:Sequential",
        "data": {"clients": 4},
        "federation": {"clients_per_round": 2},
    }
    site = Site(parse_config(values), 1, tmp_path, model=model)
    received = {MODEL: site.problem.initial_state()[0]}
    torch.manual_seed(1)  # earlier draws must not matter
    gradient, _ = site.full_gradient(3, received)
    cohort = site._cohort_of_one(received, {})
    write_full_gradient(site.problem, site.training, cohort, 0, ClientRound(3, 1, site.indices))
    assert torch.equal(gradient, cohort.gradient[0])
    assert not torch.equal(gradient, site.full_gradient(4, received)[0])
