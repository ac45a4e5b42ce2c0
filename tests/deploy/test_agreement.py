"""A federation is bit-identical to the loop engine for every part of an algorithm, and sends what the card says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from fedflat.algorithms import algorithm
from fedflat.deploy.server.app import serve
from fedflat.deploy.settings import config_of
from fedflat.experiment.run import Run
from fedflat.experiment.store.run_folder import Record

from ..compositions import EVERY_PART
from .direct import SMALL, DirectGrid, federation_of

TEXTS = [*EVERY_PART, "feddyn", "fedmoswa(option=I)", "fedavg+wima(window=2)+ema"]


def deployed(text: str, folder: Path, **more: Any) -> tuple[Record, DirectGrid]:
    settings = {**SMALL, "algorithm": text, "deploy.out": str(folder / "run"), **more}
    grid = federation_of(folder, settings)
    return serve(grid, settings), grid


def simulated(text: str, **more: Any) -> Record:
    settings = {**SMALL, "algorithm": text, **more}
    return Run(config_of(settings)).execute()


@pytest.mark.parametrize("text", TEXTS)
def test_a_federation_agrees_with_the_loop_and_sends_the_bytes_of_the_card(text: str, tmp_path: Path) -> None:
    record, grid = deployed(text, tmp_path)
    expected = simulated(text)
    assert record.status == "finished"
    assert record.models.keys() == expected.models.keys()
    for name, model in expected.models.items():
        assert torch.equal(record.models[name].weights, model.weights), name
    assert record.history == expected.history
    size, chosen = len(record.models["server"].weights), algorithm(text)
    tasks = SMALL["training.rounds"] * SMALL["federation.clients_per_round"]
    assert _numbers(grid.sent) == tasks * chosen.floats_down(size)
    assert _numbers(grid.came) == tasks * chosen.floats_up(size)
    assert record.history[-1]["bytes_up"] == 4 * tasks * chosen.floats_up(size)


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


@pytest.mark.parametrize("train", ["lora(rank=2,exact=true)", "lora(rank=2,only_b=true)"])
def test_language_models_agree_with_the_loop(train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "data"))
    (tmp_path / "words.txt").write_text("".join(f"{'to be or not to be'[n % 9 :]}\n" for n in range(40)))
    sizes = {"vocab_size": 257, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.5)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    more = {"model": f"hf({tmp_path / 'llama'})", "data.dataset": f"text(path={tmp_path / 'words.txt'},length=8)"}
    more |= {"data.partition": "iid", "training.train": train, "training.task": "perplexity", "training.rounds": 2}
    record, _ = deployed("scaffold+sam", tmp_path, **more)
    expected = simulated("scaffold+sam", **more)
    server, same = (result.models["server"] for result in (record, expected))
    assert torch.equal(server.weights, same.weights) and torch.equal(server.buffers, same.buffers)
    assert bool(server.buffers.any()) == ("exact" in train)
    assert record.history == expected.history and expected.history[0]["test"] != expected.history[-1]["test"]


def _numbers(messages: list[Any], floats_only: bool = False) -> int:
    records = [record for message in messages for record in message.content.array_records.values()]
    arrays = [array.numpy() for record in records for array in record.values()]
    return sum(array.size for array in arrays if array.dtype.kind == "f" or not floats_only)
