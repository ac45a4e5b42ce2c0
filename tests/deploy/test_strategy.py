"""fedflat's algorithms as a strategy of an existing Flower app."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedflat.deploy import Strategy
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError
from fedflat.experiment.make_config import make_config
from fedflat.experiment.run import Run

from .direct import AppGrid, node

SITES, ROUNDS = 4, 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


class RecordedRun:
    """A run of fedflat's own engine: its models, and the model that each client returned in each round."""

    def __init__(self, algorithm: str, **settings: Any) -> None:
        defaults = {"clients": SITES, "clients_per_round": SITES, "rounds": ROUNDS, "local_steps": 2, "batch_size": 8}
        config = make_config(settings={"algorithm": algorithm, "device": "cpu", "workers": 1, **defaults, **settings})
        self.run = Run(config, None, model=network())
        self.replies: list[dict[int, tuple[int, dict[str, Tensor]]]] = []
        self.initial = self.state_dict(self.run.server.model)
        train = self.run.engine.train

        def recorded(*arguments: Any) -> Any:
            outcome = train(*arguments)
            assert outcome.rows is not None
            replies = {}
            for row, client in enumerate(outcome.clients):
                weights = outcome.cohort_means.z + outcome.rows.displacements[row]
                model = ModelState(weights, outcome.rows.buffers[row], outcome.integer_buffers)
                replies[client.number] = len(client.indices), self.state_dict(model)
            self.replies.append(replies)
            return outcome

        vars(self.run.engine)["train"] = recorded
        self.primary = []
        for _ in self.run.train_rounds():
            models = self.run.models()
            self.primary.append(self.state_dict(models.get(self.run.primary, models["server"])))

    def state_dict(self, model: ModelState) -> dict[str, Tensor]:
        return {key: tensor.clone() for key, tensor in self.run.problem.state_dict(*model).items()}

    def app(self) -> ClientApp:
        """A ClientApp that returns what the run's clients returned."""
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            assert list(message.content.array_records) == ["arrays"]
            round = int(message.content["config"]["server-round"])
            examples, state = self.replies[round - 1][int(context.node_config["partition-id"])]
            metrics = MetricRecord({"num-examples": examples})
            return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)

        return app


def start(strategy: Strategy, recorded: RecordedRun, folder: Path, grid: AppGrid | None = None) -> Any:
    """Run the strategy on recorded replies; returns Flower's result and the arrays evaluated after every round."""
    grid = grid or AppGrid([node(folder, {}, number) for number in range(SITES)], recorded.app())
    evaluated: list[ArrayRecord] = []
    result = strategy.start(
        grid, ArrayRecord(recorded.initial), ROUNDS, evaluate_fn=lambda round, arrays: evaluated.append(arrays)
    )
    return result, evaluated[1:]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("fedavg", {}),
        ("fedavgm+wima(window=2)", {}),
        ("fedadam+ema", {}),
        ("fedexp", {}),
        ("fedswa+swa(start=0.25)", {}),
        ("fedavgm", {"aggregation": "median"}),
        ("fedavg", {"aggregation": "trimmed", "trim": 0.25}),
    ],
)
def test_the_strategy_agrees_with_the_engine(algorithm: str, settings: dict[str, Any], tmp_path: Path) -> None:
    recorded = RecordedRun(algorithm, **{f"federation__{name}": value for name, value in settings.items()})
    result, evaluated = start(Strategy(algorithm, fraction_evaluate=0.0, **settings), recorded, tmp_path)
    assert len(evaluated) == ROUNDS
    for arrays, expected in zip([*evaluated, result.arrays], [*recorded.primary, recorded.primary[-1]], strict=True):
        found = arrays.to_torch_state_dict()
        assert list(found) == list(expected)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def test_unsuitable_replies_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded = RecordedRun("fedavg")
    replies = [{number: replies[number] for number in (0, 1)} for replies in recorded.replies]
    wrong = [torch.zeros(9), torch.zeros(10, dtype=torch.int64)]  # another shape, another type
    for number, (kept, own) in enumerate(zip(replies, recorded.replies, strict=True)):
        kept[2] = own[2][0], {**own[2][1], "4.bias": torch.full((10,), torch.nan)}
        kept[3] = own[3][0], {**own[3][1], "4.bias": wrong[number % 2]}
    recorded.replies = replies
    grid = AppGrid([node(tmp_path, {}, number) for number in range(SITES)], recorded.app())
    with caplog.at_level(logging.WARNING, "flwr"):
        result, _ = start(Strategy(fraction_evaluate=0.0), recorded, tmp_path, grid)
    (n, one), (m, other) = replies[-1][0], replies[-1][1]
    mean = (n * one["4.bias"] + m * other["4.bias"]) / (n + m)
    torch.testing.assert_close(result.arrays.to_torch_state_dict()["4.bias"], mean)
    messages = [record.getMessage() for record in caplog.records]
    assert "ignoring node 102: its arrays contain values that are not finite" in messages
    assert any(message.startswith("ignoring node 103: its arrays differ from the model's") for message in messages)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("mime", "needs the gradient of all of a client's data"),
        ("fedavg+scam", "needs gradients of further batches"),
        ("fedsol", "needs the logits of a teacher"),
        ("fedawa", "needs client weights that the server chooses"),
        ("fedavg+wima(part=classifier)", "part=all"),
    ],
)
def test_algorithms_that_need_more_are_rejected(algorithm: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Strategy(algorithm)


def test_control_variates_need_the_mean() -> None:
    Strategy("fedmoswa", aggregation="median")
    with pytest.raises(UserError, match="aggregation=median does not work with scaffold: the server's control variate"):
        Strategy("scaffold", aggregation="median")


def test_clients_that_take_other_steps_need_the_decorator(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no client can train with fedsam: .* decorate .* fedflat\.deploy\.client"):
        start(Strategy("fedsam", fraction_evaluate=0.0), RecordedRun("fedsam"), tmp_path)


def test_data_types_are_kept() -> None:
    strategy = Strategy()
    initial = ArrayRecord({"half": Array(np.ones((2, 1), np.float16)), "steps": Array(np.array(3))})
    strategy._begin(initial, 1)
    record = strategy.evaluated()
    assert [(array.dtype, tuple(array.shape)) for array in record.values()] == [("float16", (2, 1)), ("int64", ())]
