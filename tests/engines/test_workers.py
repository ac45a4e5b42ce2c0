"""Results are bit-identical for any number of workers."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat import processes
from fedflat.bench.setting import RandomImages
from fedflat.engines.cpu import engine as cpu_engine
from fedflat.engines.cpu.engine import LoopEngine, ProcessPool, process_pool
from fedflat.engines.problem import kernels
from fedflat.errors import MachineFailed, UserError
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign.processes import _run_next_task
from fedflat.experiment.make_config import make_config
from fedflat.experiment.run import Run
from fedflat.operating_system import KEEPS_FREED_MEMORY
from fedflat.processes import sendable_error

SETTINGS = {"rounds": 3, "clients": 10, "clients_per_round": 5, "local_steps": 3, "model": "mlp(hidden=8)"}
WORKERS = 2
"""The same number everywhere, so that all tests share the processes, which take seconds to start."""


NARROW = {
    "dataset": RandomImages(size=200, side=20).dataset(),
    "model": "lenet5",
    "engine__compile": "on",
    "batch_size": 10,
    "local_steps": 2,
    "rounds": 2,
}
"""A model for whose small images there are kernels in C++."""
NEEDS_COMPILER = pytest.mark.skipif(kernels.compiler() is None, reason="there is no C++ compiler")


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedavg", {}),
        ("fedmoswa+asam+wima(window=2)", {}),
        ("scaffold(option=I)", {"flatness": "every=1,what=drift"}),
        ("mime-sgdm", {"model": "femnist-cnn", "batch_size": 4, "rounds": 1}),  # with dropout
        ("fedsmoo", {}),
        ("fedwmsam", {}),
        ("adabest", {}),
        ("fedmoswa", {"model": "vit-tiny(depth=1,width=12)", "train": "lora(rank=2)"}),  # with a frozen part
        pytest.param("fedsam", NARROW, marks=NEEDS_COMPILER),
    ],
)
def test_one_and_several_workers_agree(algorithm: str, more: dict[str, Any]) -> None:
    settings = {**SETTINGS, **more}
    one, several = (fedflat.run(algorithm, workers=workers, **settings).record for workers in (1, WORKERS))
    assert one.history == several.history
    for name, model in one.models.items():
        assert torch.equal(model.weights, several.models[name].weights)


def test_batch_norm_statistics_agree_too() -> None:
    small = {
        **SETTINGS,
        "model": "resnet20(norm=batch)",
        "clients": 4,
        "clients_per_round": 3,
        "rounds": 1,
        "local_steps": 1,
        "batch_size": 4,
    }
    one, several = (fedflat.run("fedsam", workers=workers, **small).record.models["server"] for workers in (1, WORKERS))
    assert torch.equal(one.buffers, several.buffers)
    assert not torch.equal(one.buffers, torch.zeros_like(one.buffers))


def test_workers_keep_freed_memory() -> None:
    pool = ProcessPool(1)
    try:
        assert pool.map(partial(os.getenv, "MIMALLOC_PURGE_DELAY"), [()]) == [
            KEEPS_FREED_MEMORY["MIMALLOC_PURGE_DELAY"]
        ]
    finally:
        pool.close()


def test_workers_are_closed_at_the_end_of_a_child_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing forgets finalisers when a child begins, even if it is a fork that has imported the engine."""
    monkeypatch.setattr("fedflat.engines.cpu.engine._pool", None)
    before = dict(util._finalizer_registry)
    util._finalizer_registry.clear()
    try:
        pool = process_pool(1)
        util._run_finalizers(0)
    finally:
        util._finalizer_registry.update(before)
    assert not pool.is_alive


def test_two_runs_side_by_side_do_not_disturb_each_other() -> None:
    """Worker processes are shared, so that engines take turns."""
    runs = {"fedavg": SETTINGS, "scaffold": SETTINGS | {"model": "mlp(hidden=4)"}}
    together = list(
        zip(*(fedflat.rounds(text, workers=WORKERS, **settings) for text, settings in runs.items()), strict=True)
    )
    for (text, settings), state in zip(runs.items(), together[-1], strict=True):
        alone = fedflat.run(text, workers=1, **settings).record.models["server"].weights
        assert torch.equal(state.server.model.weights, alone)


def test_runs_in_several_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the worker processes, which none of them has started yet."""
    monkeypatch.setattr(cpu_engine, "_pool", None)

    def trained(seed: int) -> Tensor:
        return fedflat.run("scaffold", seed=seed, workers=WORKERS, **SETTINGS).record.models["server"].weights

    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(trained, range(6)))
    for seed, weights in enumerate(together):
        assert torch.equal(weights, trained(seed))
    process_pool(WORKERS).close()


class Unpicklable(Exception):
    """Can be pickled but not unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} is not {other}")


def test_any_error_can_be_sent() -> None:
    replacement = sendable_error(Unpicklable(3, 7))
    assert isinstance(replacement, RuntimeError) and str(replacement) == "Unpicklable: 3 is not 7"
    error = ValueError("picklable")
    assert sendable_error(error) is error


def test_batch_norm_counters_need_no_file_per_client() -> None:
    layers = [layer for _ in range(10) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16))]
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), *layers, nn.Linear(16, 10))
    data = RandomImages(size=300, side=4).dataset()
    open_files = []

    class Watch(fedflat.Callback):
        def round_done(self, run: object) -> None:
            open_files.append(len(list(Path("/proc/self/fd").iterdir())))

    for clients_per_round in (5, 30):
        settings: dict[str, Any] = {
            "clients": 30,
            "rounds": 1,
            "local_steps": 1,
            "batch_size": 5,
            "partition": "iid",
            "device": "cpu",
        }
        fedflat.run(
            "fedavg",
            dataset=data,
            model=model,
            workers=WORKERS,
            callbacks=[Watch()],
            clients_per_round=clients_per_round,
            **settings,
        )
    assert open_files[1] - open_files[0] < 20


def test_a_batch_of_one_cannot_be_normalised() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    data = RandomImages(size=33, side=4).dataset()
    with pytest.raises(
        UserError,
        match=r"a single example.*training\.batch_size",
    ):
        fedflat.run(
            "fedavg",
            dataset=data,
            model=model,
            clients=3,
            clients_per_round=3,
            rounds=1,
            batch_size=5,
            partition="iid",
            workers=1,
        )


def test_models_that_cannot_be_pickled_train_in_this_process() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 10))
    run = Run(make_config(None, SETTINGS | {"workers": WORKERS}), model=nn.Sequential(nn.Flatten(), layer))
    assert isinstance(run.engine, LoopEngine) and run.engine.workers == 1


def test_processes_that_cannot_start_others_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``multiprocessing.Pool``, which are daemonic, and forks of a process that has workers."""
    changes = (
        (multiprocessing.current_process()._config, "daemon", True),
        (vars(processes), "_starter", os.getpid() - 1),
    )
    for change in changes:
        with monkeypatch.context() as patch:
            patch.setitem(*change)
            run = Run(make_config(None, SETTINGS | {"workers": WORKERS, "rounds": 1}))
            assert isinstance(run.engine, LoopEngine) and run.engine.workers == 1 == processes.available_cores()
            with pytest.raises(UserError, match=r"cannot start others.*workers=1, jobs=1"):
                ProcessPool(1)
    assert processes.can_start_children()


class KillsWorker(Callback):
    def round_done(self, run: Any) -> None:
        assert cpu_engine._pool is not None
        os.kill(cpu_engine._pool.children[0].pid, signal.SIGKILL)


def test_a_killed_worker_is_a_failure_of_the_machine() -> None:
    with pytest.raises(MachineFailed, match="a worker process was killed, most likely because memory ran out"):
        fedflat.run("fedavg", rounds=2, workers=WORKERS, callbacks=[KillsWorker()])


def test_full_shared_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_7_5>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(MachineFailed, match=r"no space left on device \(28\).*--workers 1"):
        fedflat.run("fedavg", rounds=1, workers=WORKERS)


MODULE = """
from torch import nn

class Elsewhere(nn.Sequential):
    def __init__(self, classes=10, inputs=64):
        super().__init__(nn.Flatten(), nn.Linear(inputs, classes))
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """A model of a module that this process has loaded from a file and others cannot import."""
    (tmp_path / "elsewhere_model.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("elsewhere_model", tmp_path / "elsewhere_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "elsewhere_model", module)
    spec.loader.exec_module(module)
    model: type[nn.Module] = module.Elsewhere
    return model


def test_a_class_that_workers_cannot_import_is_named(
    elsewhere: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "model": elsewhere()}
    message = r"cannot import.*'elsewhere_model'.*define it in a module.*workers=1, jobs=1"
    with pytest.raises(UserError, match=message):
        fedflat.run("fedavg", workers=WORKERS, **settings)
    assert fedflat.run("fedavg", workers=1, **settings).status == "finished"
    parent, child = multiprocessing.Pipe()
    parent.send(elsewhere())
    monkeypatch.delitem(sys.modules, "elsewhere_model")  # as in a process of a comparison with jobs=2
    answer = _run_next_task(child)
    assert isinstance(answer, UserError) and re.search(message, str(answer))


class Sleep:
    """Keeps a worker that unpickles it busy until it is killed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (600,)


def test_stale_answers_do_not_reach_the_next_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption, the workers are stopped, so that the next caller gets others."""

    def interrupt(children: object) -> None:
        raise KeyboardInterrupt

    pool, tasks = process_pool(WORKERS), [(None, ("answer", number)) for number in range(4)]
    workers = pool.children
    assert pool.map(dict.get, tasks) == [answer for _, answer in tasks]
    monkeypatch.setattr("fedflat.engines.cpu.engine.wait_for_any", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.map(dict.get, [(Sleep(), ("stale", number)) for number in range(4)])
    assert not pool.is_alive and not any(worker.is_alive for worker in workers)


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({}, 1),
        ({"rounds": 667}, 3),  # 10,005 steps
        ({"model": "mlp(hidden=400)"}, 3),
        ({"model": "lenet5"}, 3),
        ({"workers": 2}, 2),
    ],
)
def test_short_runs_of_small_models_start_no_workers(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], workers: int
) -> None:
    monkeypatch.setattr("fedflat.experiment.setup.engine.available_cores", lambda: 3)
    engine = Run(make_config(None, SETTINGS | {"rounds": 666} | changes), data=NARROW["dataset"]).engine
    assert isinstance(engine, LoopEngine) and engine.workers == workers


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, True),
        ({"model": "mlp(hidden=400)"}, False),  # its size is not known before the data
        ({"model": "mlp(hidden=400)", "workers": 2}, True),
        ({"workers": 1}, False),
        ({"engine": "lanes"}, False),
        ({"user_device": "cuda"}, False),
        ({"user_model": nn.Linear(2, 2)}, False),
        ({"user_task": lambda *_: None}, False),  # cannot be sent to workers
    ],
)
def test_the_import_for_workers_starts_before_the_data_are_loaded(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], starts: bool
) -> None:
    events: list[Any] = []
    monkeypatch.setattr("fedflat.experiment.setup.engine.available_cores", lambda: 3)
    monkeypatch.setattr(
        "fedflat.processes.forkserver.ensure_running",
        lambda: events.append([os.environ.get(name) for name in ("PYTHONSAFEPATH", *KEEPS_FREED_MEMORY)]),
    )

    def load(*_: object) -> None:
        events.append("loading")
        raise UserError("no data")

    monkeypatch.setattr("fedflat.experiment.setup.problem.load_data", load)
    for module in ("engine", "problem"):
        device = torch.device(changes.get("user_device", "cpu"))
        monkeypatch.setattr(f"fedflat.experiment.setup.{module}.device_of", lambda _, device=device: device)
    objects: dict[str, Any] = {name: changes.get(f"user_{name}") for name in ("model", "task")}
    settings = {name: value for name, value in changes.items() if not name.startswith("user_")}
    with pytest.raises(UserError, match="no data"):
        Run(make_config(None, SETTINGS | {"model": "lenet5"} | settings), **objects)
    started = [["1", *KEEPS_FREED_MEMORY.values()]]
    assert events == [*(started if starts else []), "loading"]


class Recurrent(nn.Module):
    """A small model whose steps take long."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layer, self.head = nn.RNN(width, 4, batch_first=True), nn.Linear(4, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(images[:, 0])[0][:, -1])
        return logits


def test_short_runs_of_slow_models_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.experiment.setup.engine.available_cores", lambda: 3)
    data = NARROW["dataset"]
    engine = Run(make_config(None, SETTINGS), data=data, model=Recurrent(data.input_shape[-1], data.num_classes)).engine
    assert isinstance(engine, LoopEngine) and engine.workers == 3
