"""fedflat.rounds: the same results as fedflat.run, pausing, resuming and inspection of rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

import fedflat
from fedflat.data import from_clients
from fedflat.errors import UserError
from fedflat.experiment.config import Config

SMALL = {"rounds": 4, "clients": 12, "clients_per_round": 4, "local_steps": 3, "workers": 1, "model": "mlp(hidden=8)"}


def module(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def clients(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(3, 5, generator=draw)
    labels = [torch.randint(3, (20 + 5 * number,), generator=draw) for number in range(count)]
    return [(centres[some] + torch.randn(len(some), 5, generator=draw), some) for some in labels]


@pytest.mark.parametrize("text", ["fedmoswa+wima(window=2)", "fedwmsam", "scaffold"])
def test_the_loop_gives_the_same_result_as_run(text: str) -> None:
    whole = fedflat.run(text, **SMALL)
    loop = fedflat.rounds(text, **SMALL)
    numbers = [round.number for round in loop]
    assert numbers == [1, 2, 3, 4] and loop.history == whole.history
    for name, state in whole.record.models.items():
        assert torch.equal(loop.result().record.models[name].weights, state.weights)


def test_it_equals_a_plain_training_loop() -> None:
    """One step of FedAvg on whole batches is gradient descent on the mean over clients, weighted by their examples."""
    own, data = module(), clients()
    (round,) = fedflat.rounds("fedavg", own, data, rounds=1, local_steps=1, batch_size=1000, lr=0.3, workers=1)
    by_hand, every = module(), sum(len(targets) for _, targets in data)
    total = sum(
        nn.functional.cross_entropy(by_hand(inputs), targets) * len(targets) / every for inputs, targets in data
    )
    total.backward()
    for ours, theirs in zip(round.model.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(ours, theirs.detach() - 0.3 * theirs.grad, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), module().parameters(), strict=True)), (
        "the user's module is unchanged"
    )


def test_clients_may_have_torch_datasets() -> None:
    options: dict[str, Any] = {"rounds": 2, "local_steps": 2, "workers": 1}
    *_, pairs = fedflat.rounds("fedavg", module(), clients(), **options)
    *_, datasets = fedflat.rounds("fedavg", module(), [TensorDataset(*pair) for pair in clients()], **options)
    assert torch.equal(
        parameters_to_vector(pairs.model.parameters()), parameters_to_vector(datasets.model.parameters())
    )


def test_a_custom_loss_is_trained_and_evaluated() -> None:
    def gentle(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * nn.functional.cross_entropy(output, target)

    settings = {"rounds": 2, "local_steps": 2, "workers": 1}
    halved = list(fedflat.rounds("fedavg", module(), clients(), lr=0.2, loss=gentle, **settings))[-1]
    plain = list(fedflat.rounds("fedavg", module(), clients(), lr=0.1, **settings))[-1]
    assert torch.allclose(halved.state_dict()["0.weight"], plain.state_dict()["0.weight"], atol=1e-6)
    ours, theirs = (one.evaluation["test"]["server"] for one in (halved, plain))
    assert (
        ours["loss"] == pytest.approx(theirs["loss"] / 2, rel=1e-5)
        and ours["accuracy"] == theirs["accuracy"] == halved.accuracy
    )


def test_mean_losses_pass_the_check_for_sums() -> None:
    class Heads(nn.Linear):
        """One output in evaluation, two in training, with BatchNorm and dropout."""

        def __init__(self) -> None:
            super().__init__(5, 3)
            self.norm = nn.BatchNorm1d(5)

        def forward(self, input: torch.Tensor) -> Any:
            output = super().forward(nn.functional.dropout(self.norm(input), training=self.training))
            return (output, -output) if self.training else output

    class AllHeads(fedflat.Classification):
        def loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
            heads = output if isinstance(output, tuple) else (output,)
            return sum(super(AllHeads, self).loss(head, target) for head in heads)

    def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (0 * output.sum(1)).logsumexp(0)  # log(batch size)

    def hardest(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none").topk(8).values.mean()

    weighted, heads = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0])), Heads()
    before = torch.get_rng_state()
    for loss in (weighted, contrastive, hardest):
        fedflat.rounds("fedavg", module(), clients(), rounds=1, workers=1, loss=loss)
    data = from_clients(clients())
    settings: dict[str, Any] = {"dataset": data, "rounds": 1, "local_steps": 2, "workers": 1, "clients_per_round": 4}
    list(fedflat.rounds("fedavg", heads, task=AllHeads(), **settings))
    assert torch.equal(torch.get_rng_state(), before)

    class Summed(fedflat.Classification):
        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(output, target, reduction="sum")

    with pytest.raises(UserError, match="sum over the batch"):
        fedflat.rounds("fedavg", module(), task=Summed(), **settings)


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (lambda output, target: torch.ones(()), "Own.sums returns a Tensor; expected a dictionary"),
        (lambda output, target: {"accuracy": torch.ones(())}, "Own.sums returns no loss"),
        (lambda output, target: {"loss": 1.5}, "Own.sums returns loss as a float; expected a tensor"),
        (lambda output, target: {"loss": torch.ones(2)}, r"loss of shape \(2,\); expected its sum over the batch"),
    ],
)
def test_sums_of_a_task_are_checked_before_training(sums: Any, message: str) -> None:
    class Own(fedflat.Classification):
        def sums(self, output: torch.Tensor, target: torch.Tensor) -> Any:
            return sums(output, target)

    with pytest.raises(fedflat.UserError, match=message):
        fedflat.run("fedavg", task=Own(), rounds=1, workers=1)


def test_an_error_of_a_custom_loss_without_text_is_named() -> None:
    def silent(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError

    with pytest.raises(fedflat.UserError, match=r"the loss fails on outputs .*: ValueError"):
        list(fedflat.rounds("fedavg", module(), clients(), rounds=1, workers=1, loss=silent))


def test_attributes_of_a_round() -> None:
    data = clients(6)
    loop = fedflat.rounds(
        "fedmoswa+ema", module(), data[:-1], data[-1], rounds=3, clients_per_round=2, local_steps=2, workers=1
    )
    seen = []
    for round in loop:
        assert len(round.cohort) == 2 and round.loss > 0 and round.score == round.accuracy
        assert set(round.evaluation["test"]) == {"server", "ema"}
        server, one = round.server_state(), round.client_state(round.cohort[0])
        assert set(server) == {"drift.m"} and set(one) == {"drift.c"} and bool(one["drift.c"].any())
        averaged = round.module("ema")
        right = (averaged(data[-1][0]).argmax(1) == data[-1][1]).float().mean()
        assert float(right) == pytest.approx(round.accuracy, abs=1e-6)
        assert not round.model.training and not averaged.training
        round.state_dict()["0.weight"].zero_()
        assert bool(round.state_dict()["0.weight"].any()), "state_dict() returned a copy"
        seen.append(round)
    first, last = seen[0], seen[-1]
    kept = first.model
    assert not torch.equal(kept[0].weight, last.model[0].weight), "a completed round keeps its model"
    with pytest.raises(UserError, match="since round 1"):
        first.module("ema")
    with pytest.raises(UserError, match="since round 1"):
        first.client_state(0)
    for number in (5, -1):
        with pytest.raises(UserError, match=f"unknown client {number}"):
            last.client_state(number)
    with pytest.raises(UserError, match="did you mean ema"):
        last.module("emma")


def test_leaving_the_loop_pauses_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    whole = fedflat.run("scaffold+wima(window=2)", **SMALL)
    for round in fedflat.rounds("scaffold+wima(window=2)", out=tmp_path / "run", **SMALL):
        if round.number == 2:
            break
    del round
    left = fedflat.load(tmp_path / "run")
    assert left.status == "paused" and left.record.reason == "left after round 2"
    assert set(left.state_dict()) == set(whole.model().state_dict())
    resumed = fedflat.resume(tmp_path / "run")
    assert resumed.status == "finished" and torch.equal(
        resumed.record.models["server"].weights, whole.record.models["server"].weights
    )


def test_an_open_loop_locks_its_folder_until_it_is_closed(tmp_path: Path) -> None:
    loop = fedflat.rounds("fedavg", out=tmp_path / "run", **SMALL)
    next(loop)
    for _ in range(2):
        with pytest.raises(UserError, match=r"this process .*run.*\.close\(\) or \.result\(\)"):
            fedflat.resume(tmp_path / "run")
    loop.close()
    with pytest.raises(UserError, match=r"after 1 of 4 rounds.*fedflat\.resume\('.*run'\)"):
        next(loop)
    assert fedflat.resume(tmp_path / "run").status == "finished"


def test_a_closed_loop_is_not_silently_empty() -> None:
    loop = fedflat.rounds("fedavg", **SMALL)
    next(loop)
    assert loop.result().status == "paused"
    with pytest.raises(UserError, match=r"after 1 of 4 rounds.*no folder"):
        list(loop)

    class Broken(fedflat.Callback):
        def round_done(self, run: object) -> None:
            raise RuntimeError("in the user's callback")

    failed = fedflat.rounds("fedavg", callbacks=Broken(), **SMALL)
    with pytest.raises(RuntimeError, match="callback"):
        next(failed)
    for use in (lambda: list(failed), failed.result):
        with pytest.raises(UserError, match=r"stopped after 1 of 4 rounds.*no folder"):
            use()
    whole = fedflat.rounds("fedavg", **(SMALL | {"rounds": 1}))
    assert len(list(whole)) == 1 and whole.result().status == "finished" and list(whole) == []


def test_a_script_may_end_within_a_loop(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import fedflat\nloop = fedflat.rounds('fedavg', out='run', **{SMALL})\nround = next(loop)\n")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert fedflat.load(tmp_path / "run").record.reason == "left after round 1"


def test_a_second_loop_continues() -> None:
    loop = fedflat.rounds("fedavg", **SMALL)
    assert next(loop).number == 1
    assert [round.number for round in loop] == [2, 3, 4] and loop.result().status == "finished"


def test_a_loop_left_at_its_last_round_has_finished() -> None:
    loop = fedflat.rounds("fedavg", **SMALL)
    for round in loop:
        if round.number == 4:
            break
    assert loop.result().status == "finished"


def test_callbacks_are_called() -> None:
    told: list[str] = []

    class Listening(fedflat.Callback):
        def began(self, run: object) -> None:
            told.append("began")

        def round_done(self, run: object) -> None:
            told.append("round")

        def ended(self, run: object, record: object) -> None:
            told.append("ended")

    loop = fedflat.rounds("fedavg", callbacks=[Listening()], **SMALL)
    next(loop)
    loop.close()
    assert told == ["began", "round", "ended"]


@pytest.mark.parametrize("clients", [1, 2])
def test_cohorts_are_not_larger_than_the_federation(clients: int) -> None:
    data = [(torch.randn(10, 4), torch.arange(10) % 2)] * clients
    with pytest.raises(UserError, match="clients_per_round=5 exceeds"):
        fedflat.rounds("fedavg", nn.Linear(4, 2), data, clients_per_round=5)


def test_clients_keep_their_examples() -> None:
    data = clients(3)
    made = from_clients(data, data[0])
    for number, (inputs, targets) in enumerate(data):
        mine = made.train.groups == number
        assert torch.equal(made.train.inputs[mine], inputs) and torch.equal(made.train.targets[mine], targets)
    assert torch.equal(made.test.inputs, data[0][0])


FEW: dict[str, Any] = {"data": {"clients": 2}, "federation": {"clients_per_round": 2}}


def test_clients_of_a_dataset_keep_their_examples_unless_told_otherwise() -> None:
    made, settings = from_clients(clients(3)), {"model": module(), "rounds": 1, "workers": 1}
    config = fedflat.run("fedavg", dataset=made, **settings).config
    assert (config.data.partition, config.data.clients, config.federation.clients_per_round) == ("natural", 3, 3)
    for same in ({"clients": 3}, {"data__clients": 3}, {"clients": None}):
        assert fedflat.run("fedavg", dataset=made, **same, **settings).config.data.partition == "natural"
    settings["clients_per_round"] = 2
    few = ({"partition": "iid", "clients": 2}, {"data": {"clients": 2}}, {"data__clients": 2}, {"base": Config(**FEW)})
    for given in few:
        changed = fedflat.run("fedavg", dataset=made, **settings, **given).config.data
        assert changed.partition != "natural" and changed.clients == 2


def test_an_explicit_partition_redistributes_the_examples() -> None:
    unseen = fedflat.rounds(
        "fedavg",
        module(),
        clients(4),
        partition="natural+held-out(share=0.5)",
        clients_per_round=2,
        rounds=1,
        workers=1,
    )
    assert len(unseen.run.partition.clients) == len(unseen.run.partition.unseen) == 2
    mixed = fedflat.rounds(
        "fedavg", module(), clients(4), partition="iid", clients=2, clients_per_round=2, rounds=1, workers=1
    )
    assert [len(mine) for mine in mixed.run.partition.clients] == [55, 55]


@pytest.mark.parametrize("cohort", [{"federation": {"clients_per_round": 2}}, {"federation__clients_per_round": 2}])
def test_settings_of_given_clients_may_have_full_names(cohort: dict[str, Any]) -> None:
    loop = fedflat.rounds("fedavg", module(), clients(4), data__partition="iid", data__clients=3, workers=1, **cohort)
    assert len(loop.run.partition.clients) == 3 and loop.run.config.federation.clients_per_round == 2


@pytest.mark.parametrize("kept", [True, False])
def test_a_model_between_two_evaluations_has_its_own_round(kept: bool, tmp_path: Path) -> None:
    loop = fedflat.rounds("fedavg", eval_every=4, out=tmp_path / "run" if kept else None, **SMALL)
    next(loop), next(loop)
    result = loop.result()
    assert result.history[-1]["round"] == 0
    with safe_open(result.export(tmp_path / "model.safetensors"), "pt") as file:
        assert json.loads(file.metadata()["fedflat"])["rounds"] == 2
    assert [one["round"] for one in result.post_hoc(clients=2, examples=50).gaps()["server"]] == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients_data": []}, "there are no clients"),
        ({"clients_data": 5}, "int"),
        ({"clients_data": {"one": 1}}, "dict"),
        ({"clients_data": [torch.zeros(3)]}, "client 0"),
        ({"clients_data": [(torch.zeros(3, 5), torch.zeros(2).long())]}, "client 0 .*lengths"),
        ({"clients_data": [(torch.zeros(3, 5), torch.zeros(3))]}, "1 number, one per target column.*integer targets"),
        ({"clients_data": [(torch.zeros(3, n), torch.zeros(3).long()) for n in (5, 4)]}, r"client 1 have shape \(4,\)"),
        ({"test_data": (torch.zeros(3, 5), torch.zeros(3).long())}, "needs clients_data"),
        ({"clients_data": clients(), "dataset": "digits"}, "clients_data and dataset"),
        ({"clients_data": clients(), "loss": nn.CrossEntropyLoss(), "task": object()}, "loss and task"),
        ({"clients_data": clients(), "loss": nn.CrossEntropyLoss}, r"such as CrossEntropyLoss\(\)"),
        ({"clients_data": clients(), "loss": nn.CrossEntropyLoss(reduction="sum")}, "reduction='mean'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_input_raises_a_clear_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fedflat.rounds("fedavg", module(), **arguments)


def test_metrics_of_a_round_without_evaluation_raise() -> None:
    loop = fedflat.rounds("fedavg", eval_every=2, **SMALL)
    first = next(loop)
    with pytest.raises(UserError, match="round 1 was not evaluated"):
        _ = first.accuracy
    assert not first.model.training, "a model to keep is in evaluation mode, whatever the run did with its own last"
    assert next(loop).accuracy > 0
    with pytest.raises(UserError, match="no round was trained"):
        fedflat.rounds("fedavg", **SMALL).result()
