"""A federation is bit-identical to the loop engine for every algorithm, and sends what the card says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from fedflat.algorithms import algorithm
from fedflat.algorithms.named import NAMED
from fedflat.deploy.server.app import serve
from fedflat.deploy.settings import experiment_of
from fedflat.experiment.run import Run
from fedflat.experiment.store.run_folder import Record

from .direct import SMALL, DirectGrid, federation_of

TEXTS = [*NAMED, "scaffold(option=I)", "fedmoswa(option=I)", "mime+sam", "fedavg+wima(window=2)+ema"]


def deployed(text: str, folder: Path, **more: Any) -> tuple[Record, DirectGrid]:
    settings = {**SMALL, "algorithm": text, "deploy.out": str(folder / "run"), **more}
    grid = federation_of(folder, settings)
    return serve(grid, settings), grid


def simulated(text: str, **more: Any) -> Record:
    settings = {**SMALL, "algorithm": text, **more}
    return Run(experiment_of(settings)).execute()


@pytest.mark.parametrize("text", TEXTS)
def test_a_federation_agrees_with_the_loop(text: str, tmp_path: Path) -> None:
    record, _ = deployed(text, tmp_path)
    expected = simulated(text)
    assert record.status == "finished"
    assert record.models.keys() == expected.models.keys()
    for name, model in expected.models.items():
        assert torch.equal(record.models[name].weights, model.weights), name
    assert record.history == expected.history


@pytest.mark.parametrize("statistics", ["averaged", "own"])
def test_batch_norm_statistics_are_averaged_or_stay(statistics: str, tmp_path: Path) -> None:
    more = {
        "model": "resnet20(norm=batch)",
        "training.statistics": statistics,
        "training.rounds": 2,
        "training.local_steps": 1,
    }
    record, grid = deployed("fedavg", tmp_path, **more)
    expected = simulated("fedavg", **more)
    assert torch.equal(record.models["server"].weights, expected.models["server"].weights)
    assert torch.equal(record.models["server"].buffers, expected.models["server"].buffers)
    travels = any(
        "buffers" in reply.content.array_records.get("arrays", {}) for reply in grid.came if reply.has_content()
    )
    assert travels == (statistics == "averaged")
    counted, floats = record.history[-1], (_numbers(messages, floats_only=True) for messages in (grid.sent, grid.came))
    assert [counted["bytes_down"], counted["bytes_up"]] == [4 * numbers for numbers in floats]


@pytest.mark.parametrize("text", ["fedavg", "scaffold", "feddyn", "fedmoswa", "fedwmsam", "fedsmoo", "mime-sgdm"])
def test_messages_hold_exactly_the_bytes_of_the_card(text: str, tmp_path: Path) -> None:
    record, grid = deployed(text, tmp_path)
    size, chosen = len(record.models["server"].weights), algorithm(text)
    tasks = SMALL["training.rounds"] * SMALL["federation.clients_per_round"]
    assert _numbers(grid.sent) == tasks * chosen.floats_down(size)
    assert _numbers(grid.came) == tasks * chosen.floats_up(size)
    assert record.history[-1]["bytes_up"] == 4 * tasks * chosen.floats_up(size)


def _numbers(messages: list[Any], floats_only: bool = False) -> int:
    records = [record for message in messages for record in message.content.array_records.values()]
    arrays = [array.numpy() for record in records for array in record.values()]
    return sum(array.size for array in arrays if array.dtype.kind == "f" or not floats_only)
