"""Every engine gives what the loop engine gives, for every algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedflat.algorithms.table import NAMED, RELEASED
from fedflat.engines.lanes import LaneEngine
from fedflat.engines.loop import LoopEngine

from ..quadratics import problem_of, walk
from ..reference import bed

TEXTS = [
    *NAMED,
    *(f"{name}(variant=released)" for name in RELEASED),
    "fedmoswa(option=I)",
    "scaffold(option=I)",
    "mime+sam",
    "fedspeed(share=0.5)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_lanes_agree_with_the_loop(text: str) -> None:
    setting = bed(rounds=4, size=3)
    loop = walk(text, setting, decay=0.9, engine=LoopEngine(problem_of(setting), workers=1))
    lanes = walk(text, setting, decay=0.9, engine=LaneEngine(problem_of(setting), lanes=2))
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-12
    assert loop.outcomes[-1].cost == lanes.outcomes[-1].cost
    for one, other in zip(loop.outcomes, lanes.outcomes, strict=True):
        assert torch.isclose(one.loss, other.loss)
