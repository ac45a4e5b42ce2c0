"""Post-hoc measurements: which models are available, and that the values equal those logged during the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.analysis.post_hoc import post_hoc
from fedflat.experiment.store.run_folder import load_record

SETTINGS = {
    "rounds": 4,
    "clients": 8,
    "clients_per_round": 3,
    "local_steps": 2,
    "workers": 1,
    "device": "cpu",
    "model": "mlp(hidden=8)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("afterwards") / "run"
    fedflat.run(
        "fedavg+wima",
        out=path,
        save_every=2,
        flatness="every=1,what=gap+noise+classes+features",
        flatness__clients=3,
        **SETTINGS,
    )
    return path


def test_models_are_available_at_the_start_at_saved_rounds_and_at_the_end(folder: Path) -> None:
    result = fedflat.load(folder)
    look = result.post_hoc()
    assert look.model_rounds() == [0, 2, 4]
    assert look.model_rounds("wima") == [2, 4]
    end = result.state_dict("wima")
    views = look.problem.layout.views(look.model(4, "wima").weights)
    assert all(torch.equal(end[name], view) for name, view in views.items())
    assert not torch.equal(look.model(2).weights, look.model(4).weights)
    assert torch.equal(look.model(0).weights, look.initial_model.weights)


def test_post_hoc_measurements_equal_the_logged_ones(folder: Path) -> None:
    look = fedflat.load(folder).post_hoc(clients=3)
    logged = {record["round"]: record["flatness"] for record in look.record.history}
    for name, looks in look.gaps().items():
        for entry in looks:
            then = logged[entry.pop("round")]["models"][name]
            assert entry == pytest.approx(then, rel=1e-5, abs=1e-7)
    for entry in look.accuracies():
        assert entry["accuracy"] == logged[entry["round"]]["accuracy"]
        assert entry["features"] == pytest.approx(logged[entry["round"]]["features"], rel=1e-5)
    for entry in look.constants():
        assert entry["constants"] == pytest.approx(logged[entry["round"]]["constants"], rel=1e-3)
    assert [entry["round"] for entry in look.logged_constants()] == [1, 3]


def test_the_gap_equals_that_of_an_evaluation(folder: Path) -> None:
    result = fedflat.load(folder)
    found = result.post_hoc().gaps()["server"][-1]
    evaluated = result.evaluate(on=("test", "clients"))
    each = evaluated["clients"]["each"].values()
    train = np.average([entry["loss"] for entry in each], weights=[entry["examples"] for entry in each])
    assert found["gap"] == pytest.approx(evaluated["test"]["loss"] - train, abs=2e-6)


def test_theory_uses_the_largest_constants_of_the_run(folder: Path) -> None:
    look = fedflat.load(folder).post_hoc(clients=3)
    seen = [*look.constants(), *look.logged_constants()]
    found = look.theory(seen)
    assert found.constants.lipschitz == max(entry["constants"]["lipschitz"] for entry in seen)
    assert found.setting.rounds == 4
    assert found.setting.steps == 2


def test_a_run_with_initial_weights_is_reopened_with_them(folder: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "rounds": 2}
    first = fedflat.run("scaffold", out=tmp_path / "b", init=folder / "model.safetensors", **settings)
    look = post_hoc(load_record(tmp_path / "b"))
    assert torch.equal(look.initial_model.weights, fedflat.load(folder).post_hoc().model(4).weights)
    from fedflat.experiment.analysis.replay import Replay

    replay = Replay(look.config, look.problem, look.partition, look.moments()[0][0], workers=1)
    replay.advance(), replay.advance()
    assert torch.equal(replay.moment.model.weights, first.record.models["server"].weights)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_the_first_round_of_a_branched_run_is_replayed_once(algorithm: str, folder: Path, tmp_path: Path) -> None:
    start = {"init": folder / "model.safetensors", "init_rounds": 4}
    fedflat.run(algorithm, out=tmp_path / "branch", **{**SETTINGS, "rounds": 5}, **start)
    moments, reason = fedflat.load(tmp_path / "branch").post_hoc().moments()
    assert [moment.rounds for moment in moments] == [4, 5]
    assert not reason


def test_a_run_in_memory_with_a_user_supplied_model() -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = fedflat.run("fedsam", **{**SETTINGS, "model": own})
    look = result.post_hoc(clients=2)
    assert look.model_rounds() == [0, 4]
    rounds, why = look.clients(curvature=False)
    assert [entry["round"] for entry in rounds] == [1, 5]
    assert not why


def test_a_user_supplied_model_must_be_passed_again(tmp_path: Path) -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fedflat.run("fedavg", out=tmp_path / "a", **{**SETTINGS, "model": own, "rounds": 1})
    with pytest.raises(UserError, match=r"custom:Sequential.*post_hoc\(network="):
        fedflat.load(tmp_path / "a").post_hoc()
    assert fedflat.load(tmp_path / "a").post_hoc(network=own).model_rounds() == [0, 1]


def test_an_unknown_average_is_rejected(folder: Path) -> None:
    with pytest.raises(UserError, match="'swa'"):
        fedflat.load(folder).post_hoc().accuracies("swa")
