"""The plain loop trains the same model as fedflat, so that the comparison is fair."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from fedflat.bench.contenders import SpeedBound
from fedflat.bench.plain import PlainLoop
from fedflat.bench.setting import BenchmarkSetting, RandomImages
from fedflat.experiment.callback import Callback
from fedflat.experiment.run import Run

SETTING = BenchmarkSetting(
    "lenet5",
    "random(size=120,side=16)",
    clients_per_round=3,
    local_steps=3,
    batch_size=8,
    lr=0.1,
    device="cpu",
    workers=1,
)


class Enough(Exception):
    """Ends a run."""


class Until(Callback):
    """Keeps the model of a round and then ends the run."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, run):
        if run.rounds == self.round:
            self.state = run.problem.layout.views(run.server.model.weights.clone())
            raise Enough


@pytest.mark.parametrize(
    "setting",
    [
        SETTING,
        replace(SETTING, augmentation="crop-flip+cutout(size=4)"),
        replace(SETTING, model="mlp(hidden=8)", partition="dirichlet(alpha=0.5)"),
        replace(SETTING, local_steps=7, batch_size=5),
    ],
)
def test_the_plain_loop_ends_at_the_same_model(setting):
    config = setting.config(precision="float64", clients=8)
    loop, until = PlainLoop(config, setting.load_data()), Until(2)
    start = {name: tensor.clone() for name, tensor in loop.state.items()}
    for number in range(2):
        loop.round(number)
    with pytest.raises(Enough):
        Run(config, data=setting.load_data(), callbacks=(until,)).execute()
    for name, tensor in loop.state.items():
        assert torch.allclose(tensor, until.state[name], rtol=0, atol=1e-12), name
        assert not torch.equal(tensor, start[name])


def test_the_plain_loop_is_in_the_usual_memory_format():
    loop = PlainLoop(SETTING.config(clients=8), SETTING.load_data())
    inputs, _ = next(loop.batches(loop.partition.clients[0], 0, 0))
    assert inputs.is_contiguous() and not inputs.is_contiguous(memory_format=torch.channels_last)


def test_the_bound_trains():
    setting = replace(SETTING, model="mlp(hidden=8)", lr=1.0)
    bound = SpeedBound(setting, clients=8)
    step = bound.build_step(setting.config(clients=8))
    weights = next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, list))
    before = [w.detach().clone() for w in weights]
    step()
    assert all(not torch.equal(w, b) for w, b in zip(weights, before, strict=True))


def test_the_tensors_of_a_captured_step_live_as_long_as_its_graph(monkeypatch):
    def capture(step):
        reference = weakref.ref(step)  # like a CUDA graph, it does not keep the step's tensors alive

        def replay():
            reference()()

        return replay

    class TwoRounds:
        rounds = 0

        def round_done(self):
            self.rounds += 1
            if self.rounds == 2:
                raise Enough

    monkeypatch.setattr("fedflat.bench.contenders.capture", capture)
    monkeypatch.setattr(BenchmarkSetting, "on_gpu", True)
    with pytest.raises(Enough):
        SpeedBound(replace(SETTING, model="mlp(hidden=8)"), clients=8).run_rounds(TwoRounds())


def test_random_images_are_always_the_same():
    one, two = (RandomImages(size=5, side=4).dataset() for _ in range(2))
    assert one.content == two.content and one.input_shape == (3, 4, 4) and one.train.inputs.dtype == torch.uint8


def test_a_named_data_set_has_a_small_test_set():
    data = BenchmarkSetting(dataset="digits").load_data()
    assert data.name == "digits" and len(data.test) <= 500
