"""Parallel runs equal sequential ones, and the failure of one does not affect the others."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fedflat
from fedflat.algorithms import composition
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.named import NAMED
from fedflat.data import from_arrays
from fedflat.errors import SomeFailed, UserError
from fedflat.experiment.callback import Callback, RemoteCallback
from fedflat.experiment.campaign import compare as comparing
from fedflat.experiment.campaign.compare import ResumableRun, compare
from fedflat.experiment.campaign.processes import RunUpdate, _warnings_sent, _Worker, run_in_parallel
from fedflat.experiment.config import Config, parse_config
from fedflat.models import MODELS, ImageModelSpec
from fedflat.registry import load_plugins

BASE = parse_config(
    {
        "model": "mlp(hidden=4)",
        "data": {"clients": 10},
        "federation": {"clients_per_round": 3},
        "training": {"rounds": 4, "local_steps": 2},
        "engine": {"device": "cpu", "checkpoint_every": 2, "workers": 1},
    }
)


WERE_THERE = set(multiprocessing.active_children())


def others() -> list[multiprocessing.process.BaseProcess]:
    """The processes that this test started, without workers that an earlier test may have left."""
    return [child for child in multiprocessing.active_children() if child not in WERE_THERE]


@pytest.fixture(autouse=True)
def note_processes() -> None:
    WERE_THERE.clear()
    WERE_THERE.update(multiprocessing.active_children())


class Watcher(RemoteCallback):
    """Records its events."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, int]] = []

    def _note(self, event: str, run) -> None:
        self.told.append((event, f"{run.config.algorithm} {run.config.seed}", run.rounds))

    def began(self, run):
        assert run.primary in ("server", "wima(window=2)", "swa(start=0.5,every=9)") and run.metric == "accuracy"
        self._note("began", run)

    def round_done(self, run):
        self._note("round", run)

    def ended(self, run, record):
        assert run.history[-1] == record.history[-1]
        self._note("ended", run)


class Killer(Watcher):
    """Kills the only process when the first run begins, and simulates Ctrl-C when the fourth does."""

    def began(self, run):
        begun = [event for event, _, _ in self.told].count("began")
        if begun == 0:
            (child,) = others()
            os.kill(child.pid or 0, signal.SIGKILL)
        if begun == 3:
            assert others()
            raise KeyboardInterrupt
        super().began(run)


def test_concurrent_runs_equal_sequential_runs_and_a_user_error_stops_none_of_them(tmp_path: Path) -> None:
    texts, watcher = ["fedavg+wima(window=2)", "scaffold"], Watcher()
    row, beside = [], []
    for name, records, jobs in (("row", row, 1), ("beside", beside, 2)):
        (tmp_path / name / "fedsam").mkdir(parents=True)
        for seed in (0, 1):
            (tmp_path / name / "fedsam" / f"seed-{seed}").write_text("not a run")
        callbacks = (watcher,) if name == "beside" else ()
        with pytest.raises(SomeFailed, match=r"^fedsam, seed 0 .*seed-0.*--out.*\(and 1 more\)"):
            for record in compare(BASE, ["fedsam", *texts], [0, 1], tmp_path / name, callbacks, jobs=jobs):
                records.append(record)
        assert [(r.config.seed, r.config.algorithm) for r in records] == [(s, text) for s in (0, 1) for text in texts]
    for one, other in zip(row, beside, strict=True):
        assert one.config == other.config and one.history == other.history and one.status == other.status == "finished"
        assert other.user_objects == {"data": None, "model": None, "task": None} and list(one.models) == list(
            other.models
        )
        for name, model in one.models.items():
            assert torch.equal(model.weights, other.models[name].weights)
    for name in (
        "metrics.jsonl",
        "config.yaml",
        "model.safetensors",
        "checkpoint/state.safetensors",
        "state/clients/rows.bin",
    ):
        for path in sorted((tmp_path / "row").rglob(name)):
            assert path.read_bytes() == (tmp_path / "beside" / path.relative_to(tmp_path / "row")).read_bytes(), path
    assert [event for event, _, _ in watcher.told].count("began") == 4
    assert {told for told in watcher.told if told[0] == "ended"} == {
        ("ended", f"{t} {s}", 4) for t in texts for s in (0, 1)
    }


def test_a_killed_job_stops_no_other_job_and_an_interruption_all_of_them() -> None:
    endless = BASE.model_copy(update={"training": BASE.training.model_copy(update={"rounds": 10**6})})
    warning = BASE.model_copy(update={"algorithm": "fedavg+swa(start=0.5,every=9)"})
    jobs = [ResumableRun(config) for config in (endless, warning, warning.model_copy(update={"seed": 1}), endless)]
    outcomes = {}
    with pytest.warns(UserWarning, match=r"SWA .* 4 rounds") as told, pytest.raises(KeyboardInterrupt):
        for number, outcome in run_in_parallel(jobs, 1, (Killer(),)):
            outcomes[number] = outcome
    assert all(Path(warning.filename).is_relative_to(Path(fedflat.__file__).parent) for warning in told)
    assert isinstance(outcomes[0], SomeFailed) and "was killed" in str(outcomes[0]) and "memory" in str(outcomes[0])
    assert [getattr(outcomes[number], "status", "") for number in (1, 2)] == ["finished", "finished"]
    assert not others()


def test_an_evaluation_in_another_process_is_announced_once() -> None:
    class Evaluations(Watcher):
        def evaluated(self, run):
            self._note("evaluated", run)

    watcher, worker = Evaluations(), _Worker(child=None, device=None)  # type: ignore[arg-type]
    started = {"primary": "server", "metric": "accuracy"}
    for rounds, evaluated, began in ((0, None, started), (0, 0, None), (3, 0, None), (5, 5, None), (5, 5, None)):
        evaluation = None if evaluated is None else {"round": evaluated}
        worker._apply_update(ResumableRun(BASE), RunUpdate(rounds, evaluation, began), (watcher,))
    events = [(event, rounds) for event, _, rounds in watcher.told]
    assert [rounds for event, rounds in events if event == "evaluated"] == [0, 5]
    assert [rounds for event, rounds in events if event == "round"] == [0, 3, 5, 5] and events[0] == ("began", 0)


def test_runs_that_cannot_be_concurrent() -> None:
    for jobs in (None, 1):
        assert comparing.parallel_runs([BASE] * 10, (Callback(),), jobs, {}) == 1
    with pytest.raises(UserError, match=r"2 runs.*Callback"):
        comparing.parallel_runs([BASE] * 10, (Callback(),), 2, {})
    with pytest.raises(UserError, match=r"engine\.workers=4"):
        comparing.parallel_runs([_with(BASE, workers=4)] * 10, (), 2, {})

    class Mine(nn.Module):
        pass

    with pytest.raises(UserError, match="other processes cannot import"):
        comparing.parallel_runs([BASE] * 10, (), 2, {"model": Mine()})
    assert comparing.parallel_runs([BASE] * 1, (), 8, {}) == 1


def test_small_runs_are_concurrent_by_default(monkeypatch) -> None:
    monkeypatch.setattr(comparing, "available_cores", lambda: 4)
    long = BASE.model_copy(update={"training": BASE.training.model_copy(update={"rounds": 2000})})
    assert comparing.parallel_runs([long] * 10, (), None, {}) == 4
    assert comparing.parallel_runs([long] * 3, (), None, {}) == 3
    assert comparing.parallel_runs([BASE] * 10, (), None, {}) == 1, "too short"
    assert comparing.parallel_runs([long.model_copy(update={"model": "mlp(hidden=5000)"})] * 10, (), None, {}) == 1, (
        "too large"
    )
    assert comparing.parallel_runs([_with(long, workers=2)] * 10, (), None, {}) == 1
    assert comparing.parallel_runs([_with(long, name="lanes")] * 10, (), None, {}) == 1
    monkeypatch.setattr(comparing, "available_cores", lambda: 1)
    assert comparing.parallel_runs([long] * 10, (), None, {}) == 1


TINY = """
from dataclasses import dataclass
from math import prod
from fedflat.models import ImageModelSpec
from torch import nn

@dataclass(frozen=True)
class Tiny(ImageModelSpec):
    name = "tiny"

    def smallest_side(self):
        return 1

    def network(self, input_shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))
"""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[ImageModelSpec]]:
    """A registered model and algorithm, and an algorithm that no other process can import."""
    (tmp_path / "tiny_model.py").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    made: type[ImageModelSpec] = importlib.import_module("tiny_model").Tiny
    MODELS.register("tiny", made)
    composition.register("mine", fedflat.Algorithm(Scaffold()))
    composition.register("nowhere", fedflat.Algorithm(Nowhere()))
    yield made
    MODELS.unregister("tiny")
    NAMED.unregister("mine")
    NAMED.unregister("nowhere")
    sys.modules.pop("tiny_model")


class Nowhere(Scaffold):
    """Defined in a module that only pytest can import."""


PLUGIN = """
import fedflat
from fedflat.algorithms.drift.scaffold import Scaffold

fedflat.register("plugin-scaffold", fedflat.Algorithm(Scaffold(cv_weight=0.5)))
"""


def test_user_data_and_components_are_sent_to_processes(
    tiny: type[ImageModelSpec], tmp_path: Path, restore_registries: object
) -> None:
    """A dataset, a registered model and algorithm, and an algorithm of a plugin."""
    plugin = tmp_path / "plugin_scaffold.py"
    plugin.write_text(PLUGIN)
    load_plugins([plugin])
    inputs, targets = torch.randn(40, 1, 3, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    own = from_arrays(inputs, targets, inputs, targets, name="own")
    settings = {"dataset": own, "model": "tiny", "seeds": 1, "base": BASE, "clients": 4, "clients_per_round": 2}
    in_a_row, beside = (
        fedflat.compare(["mine+wima", "plugin-scaffold"], jobs=jobs, out=tmp_path / str(jobs), **settings)
        for jobs in (1, 2)
    )
    assert [record.history for record in in_a_row.records] == [record.history for record in beside.records]
    assert beside.records[0].user_objects["data"] is own
    recorded = [json.loads(path.read_text()) for path in tmp_path.rglob("plugins.json")]
    assert sorted(map(list, recorded)) == [[str(plugin)]] * 2 + [["unused"]] * 2


def test_components_defined_in_a_script_are_not_sent(
    tiny: type[ImageModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "__module__", "__main__")
    own = BASE.model_copy(update={"model": "tiny"})
    with pytest.raises(UserError, match=r"import tiny .*use jobs=1"):
        comparing.parallel_runs([BASE, own], (), 2, {})
    assert comparing.parallel_runs([BASE, own], (), None, {}) == 1
    assert comparing.parallel_runs([BASE, BASE], (), 2, {}) == 2, "which do not use it"


def _with(base: Config, **engine: object) -> Config:
    return base.model_copy(update={"engine": base.engine.model_copy(update=engine)})


def test_a_custom_warning_is_sent_as_a_user_warning() -> None:
    class Own(RuntimeWarning):
        pass

    sent: list[object] = []
    with warnings.catch_warnings(), _warnings_sent(sent.append):
        warnings.simplefilter("always")
        warnings.warn("beware", Own, stacklevel=1)
        warnings.warn("older", DeprecationWarning, stacklevel=1)
    assert [(warning.message, warning.category) for warning in sent] == [
        ("beware", UserWarning),
        ("older", DeprecationWarning),
    ]  # type: ignore[attr-defined]
