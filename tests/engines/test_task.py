"""Tasks: their losses by hand, and text through every engine."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedflat
from fedflat.data import Dataset, Examples, load
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.step import compiled_step
from fedflat.engines.problem.objective import divergence
from fedflat.engines.problem.segmentation import Segmentation
from fedflat.engines.problem.task import Classification, Task, Totals, task_for
from fedflat.engines.problem.text import F1Classification, TokenPrediction
from fedflat.experiment.config import parse_config
from fedflat.experiment.run import Run
from tests.language.tiny import Tiny, language

LENGTH, CHARACTERS = 6, "abc"


def repeating(count: int, offset: int) -> Examples:
    """Texts abcabc, bcabca, ..., in which each character determines the next one."""
    rows = (torch.arange(offset, offset + count)[:, None] + torch.arange(LENGTH + 1)) % len(CHARACTERS)
    return Examples(rows[:, :-1].clone(), rows[:, 1:].clone(), torch.arange(count) % 4)


def alphabet() -> Dataset:
    return Dataset("alphabet", repeating(24, 0), repeating(9, 1), tuple(CHARACTERS), kind="text")


SMALL = {
    "model": "char-lstm(hidden=8,layers=1)",
    "partition": "natural",
    "clients_per_round": 3,
    "batch_size": 4,
    "workers": 1,
    "device": "cpu",
}


def test_every_kind_of_data_has_its_task():
    assert task_for(alphabet()) == TokenPrediction() and task_for(load("digits")) == Classification()
    assert isinstance(task_for(load("digit_masks")), Segmentation)
    assert isinstance(TokenPrediction(), Task)


def test_the_loss_of_characters_is_their_mean():
    logits, targets = torch.randn(5, LENGTH, 7, dtype=torch.float64), torch.randint(7, (5, LENGTH))
    by_hand = [-math.log(torch.softmax(logits[i, j], 0)[targets[i, j]]) for i in range(5) for j in range(LENGTH)]
    assert TokenPrediction().loss(logits, targets).item() == pytest.approx(np.mean(by_hand))


def test_every_valid_token_has_the_same_weight_in_all_metrics():
    logits, targets = torch.randn(3, 4, 5), torch.tensor([[0, 0, 4, 3], [0, 1, -100, -100], [-100] * 4])
    task, tokens = TokenPrediction("exact_match"), targets != -100
    logits[1, 0, 0] = logits[1, 1, 1] = 9.0  # one of the two texts that count is predicted exactly
    expected = F.cross_entropy(logits[tokens], targets[tokens]).item()
    assert task.loss(logits, targets).item() == pytest.approx(expected)
    assert task.loss(logits[2:], targets[2:]).item() == 0  # nothing counts, but the loss is no NaN
    totals = Totals(task)
    for rows in (slice(0, 1), slice(1, 3)):
        totals.add(task.sums(logits[rows], targets[rows]), len(targets[rows]))
    accuracy = (logits.argmax(2) == targets)[tokens].double().mean().item()
    assert totals.metrics() == pytest.approx(
        {"loss": expected, "accuracy": accuracy, "perplexity": math.exp(expected), "exact_match": 0.5}, rel=1e-6
    )
    teacher = torch.randn(3, 4, 5)
    assert task.distillation(logits, teacher, targets, 2.0).item() == pytest.approx(
        divergence(logits[tokens], teacher[tokens], 2.0).mean().item()
    )


def test_f1_is_that_of_scikit_learn():
    from sklearn.metrics import f1_score  # here, because it takes a second in every process that collects tests

    logits, targets = torch.randn(40, 4), torch.randint(3, (40,))  # the fourth class never occurs
    task, totals = F1Classification(), Totals(F1Classification())
    for rows in (slice(0, 30), slice(30, 40)):
        totals.add(task.sums(logits[rows], targets[rows]), len(targets[rows]))
    scores = f1_score(targets, logits.argmax(1), labels=[0, 1, 2], average=None)
    expected = {name: value.item() / 40 for name, value in Classification().sums(logits, targets).items()}
    assert totals.metrics() == pytest.approx(expected | {"f1": scores.mean()}, rel=1e-6)
    by_class = task.by_class(totals.sums)
    assert [by_class[label]["f1"] for label in range(3)] == pytest.approx(scores.tolist()) and 3 not in by_class


def test_one_target_per_text_means_the_last_character():
    logits, targets = torch.randn(5, LENGTH, 7), torch.randint(7, (5,))
    assert torch.equal(F1Classification().loss(logits, targets), Classification().loss(logits[:, -1], targets))
    assert torch.equal(
        F1Classification().sums(logits, targets)["hits"], F1Classification().sums(logits[:, -1], targets)["hits"]
    )


def test_an_lstm_learns_a_periodic_text():
    result = fedflat.run("fedavg", dataset=alphabet(), rounds=12, local_epochs=4, lr=1.0, evaluation__every=12, **SMALL)
    first, last = (record["test"]["server"] for record in (result.history[0], result.history[-1]))
    assert first["loss"] == pytest.approx(math.log(3), abs=0.3)
    assert last["accuracy"] == 1 and last["loss"] < 0.1


OTHERS = {
    "lanes": LaneEngine,
    "compiled": partial(LaneEngine, step=partial(compiled_step, backend="eager", strict=True)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_engines_agree_on_text(other: str) -> None:
    """Tokens are neither normalised nor augmented, whichever engine draws the batches."""
    config = parse_config(
        {"algorithm": "scaffold+sam", "engine": {"precision": "float64", "device": "cpu", "workers": 1}} | settings()
    )
    # An LSTM traces slowly; the transformer takes keyword arguments, and its texts are padded.
    data, model = (language(), Tiny(dropout=0)) if other == "compiled" else (alphabet(), None)
    if model:
        config = config.changed(data={"partition": "iid", "clients": 4})
    weights = []
    for make in (partial(LoopEngine, workers=1), OTHERS[other]):
        run = Run(config, data=data, model=model)
        assert run.problem.task == TokenPrediction()
        run.engine = make(run.problem)
        run.execute()
        weights.append(run.server.model.weights)
    assert (weights[0] - weights[1]).abs().max() < 1e-12


def settings() -> dict[str, object]:
    return {
        "model": "char-lstm(hidden=4,layers=1)",
        "data": {"dataset": "custom:alphabet", "partition": "natural"},
        "federation": {"clients_per_round": 3},
        "training": {"rounds": 2, "local_steps": 2, "batch_size": 6},
    }


def test_texts_of_one_label_can_be_classified():
    """A user's own model gives one row of logits per text."""
    train, test = repeating(24, 0), repeating(9, 1)
    data = Dataset(
        "beginnings",
        Examples(train.inputs, train.inputs[:, 0].clone()),
        Examples(test.inputs, test.inputs[:, 0].clone()),
        tuple(CHARACTERS),
        kind="text",
    )
    model = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 3))
    more = {"clients": 4, "clients_per_round": 4, "batch_size": 4, "workers": 1, "device": "cpu", "partition": "iid"}
    result = fedflat.run("fedavg", dataset=data, model=model, rounds=8, local_epochs=3, lr=0.5, **more)
    assert result.summary().last == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mlp", "mlp.*alphabet.*int64"),
        ("lenet5", "char-lstm"),
    ],
)
def test_a_model_for_another_task_is_rejected(model: str, message: str):
    with pytest.raises(fedflat.UserError, match=message):
        fedflat.run("fedavg", dataset=alphabet(), rounds=1, **(SMALL | {"model": model}))


@pytest.mark.parametrize("token", [-1, len(CHARACTERS)])
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_token_unknown_to_the_model_is_rejected_before_training(part: str, token: int) -> None:
    data = alphabet()
    getattr(data, part).inputs[-1, -1] = token
    with pytest.raises(
        fedflat.UserError,
        match=rf"alphabet.*{token}.*char-lstm.*0 to 2",
    ):
        fedflat.run("fedavg", dataset=data, rounds=1, **SMALL)


class Several(nn.Module):
    """Gives its logits in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.logits(inputs)}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"model": nn.Linear}, "class Linear.*torch.nn.Module"),
        ({"model": torch.relu}, "builtin_function_or_method.*torch.nn.Module"),
        ({"model": Several()}, "dict.*tensor"),
        ({"loss": "cross-entropy"}, "cross-entropy.*function"),
        (
            {"loss": partial(F.cross_entropy, reduction="none")},
            r"shape \(40,\).*scalar",
        ),
        ({"loss": lambda output, target: 1.0}, "float.*scalar"),
        ({"loss": lambda output, target: output.mean().detach()}, r"no gradient.*detach\(\)"),
        ({"loss": F.mse_loss}, r"\(40, 2\) and \(40,\)"),
    ],
)
def test_user_models_and_losses_that_cannot_be_trained(own: dict[str, Any], message: str) -> None:
    clients = [(torch.randn(20, 4) + label, torch.full((20,), label)) for label in (0, 1)]
    with pytest.raises(fedflat.UserError, match=message):
        list(
            fedflat.rounds(
                "fedavg", own.get("model", nn.Linear(4, 2)), clients, loss=own.get("loss"), rounds=1, workers=1
            )
        )
