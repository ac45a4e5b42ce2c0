"""Training functions of a Flower app whose local steps follow fedflat's algorithms."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedflat.deploy import Strategy, client
from fedflat.errors import UserError
from fedflat.experiment.make_config import make_config
from fedflat.experiment.run import Run

from .direct import AppGrid, node

SITES, ROUNDS, LR = 4, 3, 0.2
DESCENT: dict[str, Any] = {"lr_decay": 0.9, "weight_decay": 0.01, "clip": 0.5}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def tied_network() -> nn.Module:
    """Two layers share their parameters, one bias is frozen, and a flat vector stores filters in another order."""
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    filters = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 5)
    layers = nn.Sequential(*filters, nn.Flatten(), shared, nn.Tanh(), shared, nn.Linear(8, 10))
    layers[6].bias.requires_grad_(False)
    return layers


class Federation:
    """The same federation twice: as a run of fedflat, and as a Flower app with a decorated training function."""

    def __init__(self, algorithm: str, folder: Path, make: Callable[[], nn.Module] = network, **settings: Any) -> None:
        self.algorithm, self.make, self.descent = algorithm, make, DESCENT | settings
        config = make_config(
            settings={
                "algorithm": algorithm,
                "clients": SITES,
                "clients_per_round": SITES - 1,
                "rounds": ROUNDS,
                "local_steps": 2,
                "batch_size": 8,
                "lr": LR,
                "device": "cpu",
                "workers": 1,
                **{f"training__{name}": value for name, value in self.descent.items()},
            }
        )
        self.run = Run(config, None, model=make())
        self.grid = AppGrid([node(folder, {}, number) for number in range(SITES)], self.app())

    def optimiser_arguments(self, steps: int) -> dict[str, Any]:
        return {"lr": LR, "steps": steps, **self.descent}

    def app(self) -> ClientApp:
        """A ClientApp that trains on the same batches as the run."""
        app, run = ClientApp(), self.run

        @app.train()
        @client
        def train(message: Message, context: Context, make_optimiser: Callable[..., Any]) -> Message:
            (arrays,) = message.content.array_records.values()
            (config,) = message.content.config_records.values()
            number = int(context.node_config["partition-id"])
            indices = run.partition.clients[number]
            batches = run.training.plan.batches(run.config.seed, config["server-round"] - 1, number, len(indices))
            model = self.make()
            model.load_state_dict(arrays.to_torch_state_dict())
            optimiser = make_optimiser(model, **self.optimiser_arguments(len(batches)))
            for positions in batches:
                batch = run.problem.batch(torch.from_numpy(indices[positions]), {})

                def closure(batch: Any = batch) -> Tensor:
                    loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
                    loss.backward()
                    return loss

                optimiser.step(closure)
            metrics = MetricRecord({"num-examples": len(indices)})
            arrays = ArrayRecord(model.state_dict())
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        return app

    def compare(self) -> None:
        """Run both, and require equal models after each round.

        All nodes train in every round, but the server receives only the replies of the clients in the run's cohort, so
        the others must forget the round.
        """

        def of_cohort(reply: Message) -> Message | None:
            round = (len(self.grid.sent) - 1) // SITES
            return reply if reply.metadata.src_node_id - 100 in self.run.timeline.choose_cohort(round) else None

        self.grid.tamper = of_cohort
        evaluated: list[ArrayRecord] = []
        initial = ArrayRecord(self.run.problem.state_dict(*self.run.server.model))
        strategy = Strategy(self.algorithm, fraction_evaluate=0.0)
        strategy.start(self.grid, initial, ROUNDS, evaluate_fn=lambda round, arrays: evaluated.append(arrays))
        for arrays, _ in zip(evaluated[1:], self.run.train_rounds(), strict=True):
            models = self.run.models()
            expected = self.run.problem.state_dict(*models.get(self.run.primary, models["server"]))
            found = arrays.to_torch_state_dict()
            assert list(found) == list(expected)
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("fedavg+cyclic(length=3,start=0.5)", {"momentum": 0.5}),
        ("scaffold", {}),
        ("fedsam", {}),
        ("fedmoswa+wima(window=2)", {}),
        ("feddyn", {}),
        ("feddyn(dual_scope=active)", {}),  # does not upload y_K - z
        ("fedcm", {}),
        ("fedinit", {}),  # the state of a new client contains the initial model
        ("fedgloss", {}),  # broadcasts another model than the server's
        ("fedwmsam", {}),  # sends scalars
        ("fednova", {}),
        ("fedmuon", {}),
    ],
)
def test_decorated_training_agrees_with_the_engine(algorithm: str, settings: dict[str, Any], tmp_path: Path) -> None:
    Federation(algorithm, tmp_path, **settings).compare()


def test_tied_and_frozen_parameters(tmp_path: Path) -> None:
    Federation("feddyn(dual_scope=active)+asam", tmp_path, tied_network).compare()


Body = Callable[[Callable[..., Any], nn.Module], None]
"""The part of a training function between receiving a model and returning it."""


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def backward(model: nn.Module) -> Callable[[], Tensor]:
    """A closure for a batch of one example."""

    def closure() -> Tensor:
        loss = (model(torch.tensor([[1.0, 2.0]])) ** 2).sum()
        loss.backward()
        return loss

    return closure


def one_step(make_optimiser: Callable[..., Any], model: nn.Module) -> None:
    make_optimiser(model, lr=0.1, steps=1).step(backward(model))


def small_federation(body: Body, folder: Path) -> AppGrid:
    """Two nodes with a decorated training function."""
    app = ClientApp()

    @app.train()
    @client
    def train(message: Message, context: Context, make_optimiser: Callable[..., Any]) -> Message:
        model = small_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        body(make_optimiser, model)
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return AppGrid([node(folder, {}, number) for number in range(2)], app)


def start(algorithm: str, grid: AppGrid, rounds: int = 1) -> dict[str, Tensor]:
    """Train with the strategy; returns the last model."""
    strategy = Strategy(algorithm, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(small_model().state_dict()), rounds)
    return dict(result.arrays.to_torch_state_dict())


def too_many_steps(make_optimiser: Callable[..., Any], model: nn.Module) -> None:
    optimiser = make_optimiser(model, lr=0.1, steps=1)
    for _ in range(2):
        optimiser.step(backward(model))


def two_optimisers(make_optimiser: Callable[..., Any], model: nn.Module) -> None:
    for _ in range(2):
        make_optimiser(model, lr=0.1, steps=1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda make, model: None, "took no steps of the algorithm"),
        (lambda make, model: make(model, lr=1, steps=2).step(backward(model)), "took 1 steps, but .* for 2"),
        (too_many_steps, "made for 1 steps"),
        (two_optimisers, "called twice"),
        (lambda make, model: make(model, lr=1, steps=1).step(lambda: 0.0), "computed no gradient"),
        (lambda make, model: make(nn.Linear(3, 1), lr=1, steps=1), r"no array 'weight' of shape \(1, 3\)"),
        (lambda make, model: make(model, lr=0, steps=1), "lr=0"),
        (lambda make, model: make(model, lr=1, steps=0), "steps=0"),
        (lambda make, model: make(model, lr=1, steps=1, momentum=0.9), "adamw has its own momentum"),
    ],
)
def test_mistakes_in_a_training_function(body: Body, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        start("local-adamw", small_federation(body, tmp_path))


def test_a_decorated_client_needs_the_strategy(tmp_path: Path) -> None:
    grid = small_federation(one_step, tmp_path)
    with pytest.raises(UserError, match=r"use fedflat\.deploy\.Strategy"):
        FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(small_model().state_dict()), 1)


def test_the_schedule_of_the_algorithm_and_the_loss_of_a_step(tmp_path: Path) -> None:
    lrs: list[float] = []
    losses: list[tuple[float, float]] = []

    def body(make_optimiser: Callable[..., Any], model: nn.Module) -> None:
        nn.init.zeros_(model.weight)  # the optimiser starts from the received model
        optimiser = make_optimiser(model, lr=0.1, steps=2, lr_decay=0.5)
        for _ in range(2):
            lrs.append(optimiser.lr)
            before = backward(model)().item()
            losses.append((before, optimiser.step(backward(model)).item()))

    start("fedswa(final_lr=0.2)+sam", small_federation(body, tmp_path), rounds=2)
    assert lrs == pytest.approx([0.1, 0.06] * 2 + [0.05, 0.03] * 2)
    for before, loss in losses:
        assert loss == pytest.approx(before)


def test_a_node_that_lost_its_state_trains_as_a_new_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = small_federation(one_step, tmp_path)

    def lose(reply: Message) -> Message:
        if len(grid.sent) > 2 and reply.metadata.src_node_id == 100:  # after the second round and later
            grid.contexts[100].state.clear()
        return reply

    grid.tamper = lose
    with caplog.at_level(logging.WARNING, "flwr"):
        start("scaffold", grid, rounds=3)
    lost = [record.getMessage() for record in caplog.records if "lost its state" in record.getMessage()]
    assert lost == ["this node has lost its state after round 2 and trains as a new client"]
    assert sorted(grid.contexts[101].state) == ["fedflat-client-2", "fedflat-client-3"]


def change(name: str, value: np.ndarray | None) -> Callable[[RecordDict], None]:
    """A function that replaces or removes an array of a reply."""

    def changed(content: RecordDict) -> None:
        del content["arrays"][name]
        if value is not None:
            content["arrays"][name] = Array(value.astype(np.float32))

    return changed


def without_messages(content: RecordDict) -> None:
    for name in ("fedflat/lr_sum", "fedflat/drift.dc"):
        del content["arrays"][name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_messages, "its ClientApp trains with SGD"),
        (change("fedflat/drift.dc", None), "its messages are not those of scaffold"),
        (change("fedflat/drift.dc", np.zeros(4)), "its messages are not those of scaffold"),
        (change("fedflat/drift.dc", np.full(3, np.nan)), "its arrays contain values that are not finite"),
        (change("fedflat/lr_sum", np.zeros(())), "the sum of its learning rates is not positive"),
        (change("bias", None), "its arrays differ from the model's"),
        (lambda content: content["metrics"].clear(), "num-examples is None"),
        (lambda content: content["metrics"].update({"num-examples": 1e300}), "num-examples is 1e+300"),
    ],
)
def test_unsuitable_replies_are_ignored(
    change: Callable[[RecordDict], None], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = start("scaffold", small_federation(one_step, tmp_path))

    def tamper(reply: Message) -> Message:
        if reply.metadata.src_node_id == 101:
            reply.content["arrays"]["weight"] = Array(np.ones((1, 2), np.float32))
            change(reply.content)
        return reply

    grid = small_federation(one_step, tmp_path)
    grid.tamper = tamper
    with caplog.at_level(logging.WARNING, "flwr"):
        found = start("scaffold", grid)
    assert any(record.getMessage().startswith(f"ignoring node 101: {message}") for record in caplog.records)
    torch.testing.assert_close(found, expected)
