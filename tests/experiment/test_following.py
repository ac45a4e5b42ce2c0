"""A run that another process works on, seen by what lies in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fedflat
from fedflat.experiment.callback import RemoteCallback
from fedflat.experiment.campaign.following import Followed
from fedflat.experiment.store.record import load_record

SMALL = {"model": "mlp(hidden=4)", "clients": 4, "clients_per_round": 2, "rounds": 3, "local_steps": 2, "workers": 1}


class Told(RemoteCallback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def began(self, run: Any) -> None:
        self.told.append(("began",))

    def evaluated(self, run: Any) -> None:
        self.told.append(("evaluated", run.history[-1]["round"], run.primary))

    def round_done(self, run: Any) -> None:
        self.told.append(("round", run.rounds))

    def ended(self, run: Any, record: Any) -> None:
        self.told.append(("ended", record.status))


def test_it_is_told_as_it_is_written(tmp_path: Path) -> None:
    """The metrics of a finished run, line by line: as another process would see them while they are written."""
    fedflat.run("fedavg+swa(start=0.5)", out=tmp_path / "run", **SMALL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    config, listening = load_record(tmp_path / "run").config, Told()
    followed = Followed(config, tmp_path / "run", (listening,))

    def seen(data: bytes) -> list[tuple[Any, ...]]:
        metrics.write_bytes(data)
        listening.told.clear()
        followed.look()
        return list(listening.told)

    assert seen(b"") == []
    assert seen(lines[0][: len(lines[0]) // 2]) == [], "the first line is being written"
    assert seen(lines[0]) == [("began",), ("evaluated", 0, "server"), ("round", 0)]
    assert seen(lines[0]) == [], "nothing new"
    average = "swa(start=0.5)"
    assert seen(b"".join(lines[:3])) == [("evaluated", 2, average), ("round", 2)], (
        "what was missed between two looks is not made up"
    )
    listening.told.clear()
    metrics.write_bytes(b"".join(lines))
    assert followed.ended().status == "finished"
    assert listening.told == [("evaluated", 3, average), ("round", 3), ("ended", "finished")]


def test_a_run_that_has_not_begun_has_nothing_to_tell(tmp_path: Path) -> None:
    fedflat.run("fedavg", out=tmp_path / "run", **SMALL)
    listening = Told()
    Followed(load_record(tmp_path / "run").config, tmp_path / "not yet", (listening,)).look()
    assert listening.told == []
