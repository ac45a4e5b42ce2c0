"""The server's memory does not grow with the number of sites."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedflat.deploy.server import arrivals
from fedflat.deploy.server.app import serve
from fedflat.deploy.server.arrivals import keep_on_disk, sum_one_by_one
from fedflat.deploy.trust.certificates import write_certificates
from fedflat.deploy.trust.signatures import add_receipt, read_private_key
from fedflat.engines.round.aggregation import block_sum, weighted_sum

from .direct import SMALL, DirectGrid

HIDDEN, SITES = 12_000, int(os.environ.get("SITES", "16"))
PARAMETERS = 64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10
MODEL = 4 * PARAMETERS
M_MMAP_THRESHOLD = -3


def anonymous_memory() -> int:
    """Bytes of this process that are not backed by files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class SyntheticGrid(DirectGrid):
    """Sites whose answers are made when they are pulled, so that the grid holds no arrays."""

    def __init__(self, sites: int, peaks: list[int], certificates: Path) -> None:
        super().__init__([])
        self.keys = [read_private_key(certificates / f"site-{number}.key") for number in range(sites)]
        self.contexts = dict.fromkeys(range(100, 100 + sites))  # type: ignore[arg-type]
        self.peaks, self.questions = peaks, dict[str, Message]()
        self.records: set[int] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.questions)}"
            message.metadata.__dict__["_run_id"] = 1
            self.questions[message.metadata.message_id] = message
            self.records |= {id(record) for record in message.content.array_records.values()}
            yield message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        answers = [self._answer(self.questions.pop(number)) for number in message_ids]
        self.peaks.append(anonymous_memory())
        return answers

    def _answer(self, question: Message) -> Message:
        client = question.metadata.dst_node_id - 100
        header = {**question.content.config_records["header"], "client": client, "examples": 5}
        records = RecordDict({"header": ConfigRecord(header)})
        if question.metadata.message_type == "train":
            displacement = np.full(PARAMETERS, 1e-6 * (client + 1), np.float32)
            records["arrays"] = ArrayRecord({"displacement": Array(displacement)})
            numbers = {"lr_sum": 0.05, "loss": 1.0, "steps": 1, "backward_passes": 1, "samples": 5, "examples": 5}
            records["numbers"] = MetricRecord(dict(numbers))
        add_receipt(records, question.content, self.keys[client])
        return Message(records, reply_to=question)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_many_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three models more than with two or three sites; all updates of 16 sites would take 13 or more."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # return freed arrays to the system at once
    peaks: list[int] = []

    def measured(rows: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        peaks.append(anonymous_memory())
        return block_sum(rows, weights)

    monkeypatch.setattr(arrivals, "block_sum", measured)
    largest = {}
    for sites in (3, 2, SITES):
        write_certificates(tmp_path / f"keys-{sites}", ["127.0.0.1"], sites, days=1)
        settings: dict[str, Any] = {
            **SMALL,
            "algorithm": "fedavg",
            "model": f"mlp(hidden={HIDDEN})",
            "data.clients": sites,
            "federation.clients_per_round": sites,
            "training.rounds": 1,
            "training.local_steps": 1,
            "training.batch_size": 5,
            "deploy.out": str(tmp_path / str(sites)),
            "deploy.sites": str(tmp_path / f"keys-{sites}" / "sites.txt"),
            "deploy.minimum": sites,
        }
        peaks.clear()
        gc.collect()  # otherwise garbage of the last run may be freed in this one
        grid = SyntheticGrid(sites, peaks, tmp_path / f"keys-{sites}")
        assert serve(grid, settings).status == "finished"
        assert len(grid.records) == 1  # the broadcast model, shared by all messages
        largest[sites] = max(peaks) / MODEL  # includes memory that an allocator has kept since an earlier run
    print("models:", largest)
    assert largest[SITES] - max(largest[2], largest[3]) <= 3, largest


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_sums_one_by_one_equal_the_sum_of_all_rows(count: int) -> None:
    rows = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    rows[:, 0] = -0.0
    weights = [1 / (position + 3) for position in range(count)]
    sums = sum_one_by_one(count, lambda position: {"x": (rows[position][None], [weights[position]])})
    assert sums["x"].numpy().tobytes() == weighted_sum(rows, weights).numpy().tobytes()


def test_large_arrays_wait_on_disk(tmp_path: Path) -> None:
    arrays = {
        "large": np.arange(100_000, dtype=np.float32),
        "scalar": np.float32(3.0) * np.ones(()),
        "integers": np.arange(20_000).reshape(2, -1),
        "empty": np.zeros((0, 3)),
    }
    kept = keep_on_disk(arrays, tmp_path)
    assert [name for name, array in kept.items() if isinstance(array, np.memmap)] == ["large", "integers"]
    for name, array in arrays.items():
        assert np.array_equal(kept[name], array) and kept[name].dtype == array.dtype, name
    assert not list(tmp_path.iterdir())
