"""Replayed rounds are bit-identical and leave the run folder unchanged."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fedflat
from fedflat.algorithms import algorithm
from fedflat.errors import UserError
from fedflat.experiment.analysis.post_hoc import post_hoc
from fedflat.experiment.analysis.replay import Replay, missing_state
from fedflat.experiment.analysis.run_model import open_model_or_client
from fedflat.experiment.make_config import make_config
from fedflat.experiment.setup.problem import build_problem
from fedflat.experiment.store.run_folder import load_record

SETTINGS = {
    "clients": 12,
    "clients_per_round": 4,
    "local_steps": 2,
    "workers": 1,
    "device": "cpu",
    "model": "mlp(hidden=8)",
}


def run(folder: Path, text: str, rounds: int = 3, **more):
    return fedflat.run(text, out=folder, rounds=rounds, **SETTINGS, **more)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("text", ["scaffold", "fedwmsam", "fedadam", "feddyn+sam", "fedavg"])
def test_a_replay_from_a_checkpoint_equals_the_next_round_of_a_longer_run(tmp_path: Path, text: str) -> None:
    run(tmp_path / "short", text, 3)
    longer = run(tmp_path / "long", text, 5)
    before = contents(tmp_path / "short")
    look = post_hoc(load_record(tmp_path / "short"))
    moments, why = look.moments()
    assert [moment.rounds for moment in moments] == [0, 3]
    assert not why
    for moment in moments:
        replay = Replay(look.config, look.problem, look.partition, moment, workers=1)
        while replay.moment.rounds < 5:
            replay.advance()
        assert torch.equal(replay.moment.model.weights, longer.record.models["server"].weights)
    assert contents(tmp_path / "short") == before


def test_rounds_are_not_replayed_without_the_client_rows(tmp_path: Path) -> None:
    run(tmp_path / "a", "scaffold")
    look = post_hoc(load_record(tmp_path / "a"))
    shutil.rmtree(tmp_path / "a" / "state" / "clients")
    moments, why = look.moments()
    assert [moment.rounds for moment in moments] == [0] and "lost rows: it has 0" in why


def test_training_does_not_change_the_replay_until_it_advances(tmp_path: Path) -> None:
    run(tmp_path / "a", "scaffold")
    look = post_hoc(load_record(tmp_path / "a"))
    replay = Replay(look.config, look.problem, look.partition, look.moments()[0][-1], workers=1)
    members = replay.clients()
    first, second = replay.train(members), replay.train(members)
    assert torch.equal(first.cohort_means.displacement, second.cohort_means.displacement)
    assert replay.moment.rounds == 3


def test_stateless_algorithms_are_replayed_from_every_saved_model(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedsam", 4, save_every=2, flatness="every=1,what=drift")
    look = post_hoc(load_record(tmp_path / "a"))
    again, why = look.clients(curvature=False)
    assert [entry["round"] for entry in again] == [1, 3, 5]
    assert not why
    logged = {entry["round"]: entry for entry in look.logged()}
    for entry in again[:2]:
        assert entry["cosine"] == logged[entry["round"]]["cosine"]
        assert entry["clients"] == logged[entry["round"]]["clients"]
        assert entry["disagreement"] == logged[entry["round"]]["disagreement"]


def test_missing_state_is_reported(tmp_path: Path) -> None:
    run(tmp_path / "a", "scaffold", 4, save_every=2)
    again, why = post_hoc(load_record(tmp_path / "a")).clients(curvature=False)
    assert [entry["round"] for entry in again] == [1, 5]
    assert why == (
        "rounds after 2 cannot be replayed: scaffold needs its client state, which only the last checkpoint has"
    )


def test_rows_written_after_a_checkpoint_are_ignored(tmp_path: Path) -> None:
    """After a stop between checkpoints, files also contain later client vectors; a replay uses the checkpoint's."""
    run(tmp_path / "short", "scaffold", 4)
    seen = []

    class Killed(Exception):
        pass

    class Kill(fedflat.Callback):
        def round_done(self, run) -> None:
            run._clients._rows.flush()
            if run.server.rounds == 6:
                raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "killed", "scaffold", 8, engine__checkpoint_every=4, callbacks=[Kill()])
    for name in ("short", "killed"):
        look = post_hoc(load_record(tmp_path / name))
        replay = Replay(look.config, look.problem, look.partition, look.moments()[0][-1], workers=1)
        assert replay.moment.rounds == 4
        seen.append([replay.clients([client])[0].state["drift"]["c"] for client in range(12)])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("statistics", ["averaged", "own"])
def test_local_models_have_their_final_statistics(statistics: str) -> None:
    """The server's next BatchNorm statistics are the mean of the clients', unless clients keep their own."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))
    settings = {**SETTINGS, "model": own, "training__statistics": statistics, "federation__weighting": "uniform"}
    look = fedflat.run("fedavg", rounds=1, **settings).post_hoc()
    replay = Replay(look.config, look.problem, look.partition, look.moments()[0][0], workers=1)
    members = replay.clients()
    outcome = replay.train(members)
    models = replay.local_models(members, outcome)
    mean = torch.stack([model.buffers for model in models]).mean(0)
    assert len({model.buffers.sum().item() for model in models}) == len(models)
    assert torch.allclose(mean, outcome.buffers) == (statistics == "averaged")
    weights = torch.stack([model.weights for model in models]).mean(0)
    assert torch.allclose(weights, replay.z + outcome.cohort_means.displacement, atol=1e-6)


def test_clients_replayed_alone_equal_clients_replayed_together(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedspeed", 2)
    look = post_hoc(load_record(tmp_path / "a"))
    replay = Replay(look.config, look.problem, look.partition, look.moments()[0][-1], workers=1)
    together = replay.clients([1, 7])
    models = replay.local_models(together, replay.train(together))
    for number, model in zip((1, 7), models, strict=True):
        alone = replay.clients([number])
        (same,) = replay.local_models(alone, replay.train(alone))
        assert torch.equal(model.weights, same.weights)


def test_a_client_of_a_run_with_a_user_supplied_network_is_replayed(tmp_path: Path) -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    server = fedflat.run("scaffold", out=tmp_path / "a", rounds=1, **{**SETTINGS, "model": own}).record.models["server"]
    client = open_model_or_client(f"{tmp_path / 'a'}:client3", network=own)
    assert client.state.weights.isfinite().all() and not torch.equal(client.state.weights, server.weights)


def test_missing_state_of_each_algorithm() -> None:
    from fedflat.experiment.config import parse_config

    needs = {
        text: missing_state(algorithm(text), parse_config({"algorithm": text}))
        for text in ("fedswa", "fedavgm", "fedcm", "fedacg", "mime")
    }
    assert needs == {
        "fedswa": "",
        "fedavgm": "",
        "fedcm": "its server state",
        "fedacg": "its server state",
        "mime": "",
    }
    kept = parse_config({"training": {"statistics": "own"}})
    assert missing_state(algorithm("fedavg"), kept) == "its clients' BatchNorm statistics"


def test_invalid_input_raises_a_clear_error(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedavg", 1)
    look = post_hoc(load_record(tmp_path / "a"))
    with pytest.raises(UserError, match=r"client 12; .*12 clients"):
        look.clients([12])
    with pytest.raises(UserError, match=r"clients of fedavg .*control variate"):
        look.require_client_vectors()
    run(tmp_path / "mime", "mime", 1)
    with pytest.raises(UserError, match=r"clients of mime .*gradient of their cohort"):
        post_hoc(load_record(tmp_path / "mime")).clients([1])
    for part in ("checkpoint/state.safetensors", "model.safetensors"):
        (tmp_path / "a" / part).unlink()
    with pytest.raises(UserError, match="no checkpoint, no saved models"):
        post_hoc(load_record(tmp_path / "a")).require_saved_rounds()


def test_a_run_on_a_cluster_is_replayed_on_this_machine_without_a_warning() -> None:
    settings = {**SETTINGS, "rounds": 1, "engine": "ray", "ray_address": "10.0.0.1:6379"}
    config = make_config(settings=settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Replay(config, *build_problem(config)).engine.workers == 1
