"""User-supplied objects of the wrong type raise clear errors."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.callback import require_remote

SMALL = {"rounds": 1, "clients": 12, "clients_per_round": 2, "local_steps": 1, "workers": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": fedflat.Classification}, "task is the class Classification"),
        ({"task": "accuracy"}, "task='accuracy'.*'mse'"),
        ({"dataset": 123}, "dataset is an int"),
        ({"base": {"seed": 1}}, "base is a dict; .*YAML"),
        ({"callbacks": [fedflat.Callback]}, "<class .* is not a callback"),
        ({"callbacks": None}, "None is not a callback"),
        ({"out": 5}, "out is 5; .*path"),
        ({"out": ""}, "out is ''; expected a path"),
        ({"model": nn.Sequential(nn.Flatten(), nn.LazyLinear(10))}, r"1\.weight of custom:Sequential has no shape yet"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_objects_of_the_wrong_type_are_refused(arguments: dict[str, Any], message: str) -> None:
    for call in (fedflat.run, fedflat.rounds):
        with pytest.raises(UserError, match=message):
            call("fedavg", **SMALL, **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fedflat.load(None), "folder is None; expected a path"),
        (lambda: fedflat.resume(5), "folder is 5; expected a path"),
        (lambda: fedflat.sweep(5), "source is 5; expected a path, such as 'sweep.yaml'"),
        (lambda: fedflat.sweep({}, out=5), "out is 5; expected a path"),
        (lambda: fedflat.compare(["fedavg"], out=5, **SMALL), "out is 5; expected a path"),
        (lambda: fedflat.compare(["fedavg"], jobs="2", **SMALL), "jobs='2'"),
        (lambda: fedflat.sweep({}, jobs=0), "jobs=0"),
        (lambda: fedflat.Comparison(["runs/x"]), r"'runs/x' is not a run; .*Comparison\.load"),
        (lambda: fedflat.Comparison("runs/x"), r"'runs/x' is not a run; .*Comparison\.load"),
        (lambda: fedflat.run("fedavg", **SMALL).export(None), "path is None; expected a path, such as 'model.pt'"),
    ],
)
def test_paths_and_run_counts_are_validated(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


class Leaving(fedflat.Callback):
    """Changes the working directory whenever a run is evaluated."""

    def evaluated(self, run: Any) -> None:
        os.chdir(tempfile.mkdtemp(dir=Path.cwd()))


@pytest.mark.parametrize("of", ["compare", "sweep"])
def test_runs_stay_in_their_folder_if_callbacks_change_the_directory(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ["fedavg", "fedsam"]
    if of == "compare":
        found = fedflat.compare(texts, seeds=1, out="runs", callbacks=Leaving(), **SMALL)
    else:
        found = fedflat.sweep({"base": SMALL, "grid": {"algorithm": texts}}, out="runs", callbacks=Leaving())
    assert sorted(path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("config.yaml")) == [
        ("runs", text) for text in texts
    ]
    assert all(record.folder and record.folder.status()["status"] == "finished" for record in found.records)


@pytest.mark.parametrize("algorithms", [[None], None])
def test_only_algorithm_texts_can_be_compared(algorithms: Any) -> None:
    with pytest.raises(UserError, match="None is not an algorithm"):
        fedflat.compare(algorithms, seeds=1, **SMALL)


def test_only_an_algorithm_text_can_be_run() -> None:
    with pytest.raises(UserError, match=r"is not an algorithm; expected a text such as 'fedavg\+sam"):
        fedflat.run(fedflat.algorithm("scaffold"), **SMALL)  # type: ignore[arg-type]


def test_time_before_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment waits for its sites there."""
    real, waited = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + waited)

    class Waiting(fedflat.Callback):
        def began(self, run: object) -> None:
            nonlocal waited
            waited = 1e6

    assert fedflat.run("fedavg", callbacks=Waiting(), **SMALL).record.seconds < 1e6


def test_one_callback_needs_no_list() -> None:
    class Counting(fedflat.Callback):
        rounds = 0

        def round_done(self, run: object) -> None:
            self.rounds += 1

    counting = Counting()
    fedflat.run("fedavg", callbacks=counting, **SMALL)
    assert counting.rounds == 1


def test_only_remote_callbacks_observe_other_processes() -> None:
    class Local(fedflat.Callback):
        pass

    remote = fedflat.RemoteCallback()
    assert require_remote([remote]) == (remote,)
    with pytest.raises(UserError, match=r"Local .*fedflat\.RemoteCallback"):
        require_remote([remote, Local()])
