"""Models saved during training: which, when, bit-identical after a kill; and references to them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedflat
from fedflat.errors import UserError
from fedflat.experiment.analysis.reopen import Reference, parse_reference
from fedflat.experiment.analysis.run_model import open_model
from fedflat.experiment.callback import Callback
from fedflat.experiment.store.run_folder import saved_rounds

SETTINGS = {
    "rounds": 7,
    "clients": 10,
    "clients_per_round": 3,
    "local_steps": 2,
    "workers": 1,
    "model": "mlp(hidden=4)",
    "save_every": 2,
    "engine__checkpoint_every": 3,
    "eval_every": 3,
    "device": "cpu",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "models").iterdir()}


class KillAfter(Callback):
    """Kills the process after a round without a signal that could be handled."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_done(self, run) -> None:
        if run.server.rounds == self.rounds:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots") / "run"
    fedflat.run("fedavg+wima(window=3)+swa(start=0.5)", out=folder, **SETTINGS)
    return folder


def test_every_model_is_saved_once_it_exists(undisturbed: Path) -> None:
    assert saved_rounds(undisturbed) == [0, 2, 4, 6]
    assert saved_rounds(undisturbed, "wima(window=3)") == [2, 4, 6]
    assert saved_rounds(undisturbed, "swa(start=0.5)") == [4, 6]
    first = load_file(undisturbed / "models/round-000000.safetensors")
    last = load_file(undisturbed / "models/round-000006.safetensors")
    assert first.keys() == last.keys() == load_file(undisturbed / "model.safetensors").keys()
    assert any(not first[name].equal(last[name]) for name in first)


@pytest.mark.parametrize("killed_after", [1, 2, 5, 7])
def test_a_killed_run_ends_with_the_same_files(undisturbed: Path, tmp_path: Path, killed_after: int) -> None:
    folder = tmp_path / "run"
    child = os.fork()
    if child == 0:
        fedflat.run("fedavg+wima(window=3)+swa(start=0.5)", out=folder, callbacks=[KillAfter(killed_after)], **SETTINGS)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    if killed_after == 5:  # later than the checkpoint to which the resumed run returns
        (folder / "models/round-000006.safetensors.part").write_bytes(b"half")
        (folder / "models/round-000099.safetensors").write_bytes(b"of another time")
    fedflat.resume(folder)
    assert contents(folder) == contents(undisturbed)


def test_models_are_saved_only_on_request(tmp_path: Path) -> None:
    fedflat.run("fedavg", out=tmp_path / "run", **{**SETTINGS, "save_every": None, "rounds": 2})
    assert not (tmp_path / "run/models").exists() and saved_rounds(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/a", Reference(Path("runs/a"))),
        ("runs/a:wima", Reference(Path("runs/a"), "wima")),
        ("runs/a:server@50", Reference(Path("runs/a"), "server", 50)),
        ("runs/a@0", Reference(Path("runs/a"), None, 0)),
        ("runs/a:swa(start=0.5,every=2)@7", Reference(Path("runs/a"), "swa(start=0.5,every=2)", 7)),
        ("runs/me@home", Reference(Path("runs/me@home"))),
    ],
)
def test_model_references_are_parsed(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected
    assert str(expected) == text


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "a:wima@3").mkdir()
    assert parse_reference(str(tmp_path / "a:wima@3")) == Reference(tmp_path / "a:wima@3")


def test_a_reference_opens_the_saved_weights(undisturbed: Path) -> None:
    files = {":server": "model", ":server@4": "models/round-000004", "": "model.swa-start-0-5"}
    for text, file in files.items():
        found = open_model(f"{undisturbed}{text}", device="cpu")
        tensors = load_file(undisturbed / f"{file}.safetensors")
        assert found.state.weights.equal(found.problem.layout.flatten(tensors))
        assert found.objective().weights.equal(found.state.weights)
    assert found.label == f"{undisturbed}:swa(start=0.5)"
    sibling = found.sibling("server", 2)
    assert sibling.label == f"{undisturbed}:server@2" and sibling.problem is found.problem


def test_objectives_of_one_client_and_of_all_clients(undisturbed: Path) -> None:
    found = open_model(undisturbed, device="cpu", precision="float64")
    whole, clients = found.objective(batch_size=50), [found.objective(client=i) for i in range(10)]
    assert whole.examples == sum(objective.examples for objective in clients) and whole.dtype == torch.float64
    mean = sum(objective.examples * objective.loss() for objective in clients) / whole.examples
    torch.testing.assert_close(mean, whole.loss())
    scored = fedflat.load(undisturbed).evaluate("swa(start=0.5)", on=("test",))["test"]
    test = found.objective("test").metrics()
    assert test["accuracy"] == pytest.approx(scored["accuracy"]) and test["loss"] == pytest.approx(
        scored["loss"], rel=1e-5
    )


def test_a_saved_model_is_measured_in_python(undisturbed: Path) -> None:
    result = fedflat.load(undisturbed)
    found = result.flatness("server", rounds=2, device="cpu")
    spectrum = found.spectrum(3, examples=100, seed=1, trace_draws=0)
    assert len(spectrum.eigenvalues) == 3 and spectrum.examples == 100
    assert spectrum.eigenvalues == found.spectrum(3, examples=100, seed=1, trace_draws=0).eigenvalues
    assert found.sharpness("asam", rho=0.5, client=0).value > 0
    landscape = found.landscape(points=3, examples=50)
    assert landscape.values["train_loss"].shape == (3, 3) and landscape.plot().axes
    in_memory = fedflat.run("fedavg", **{**SETTINGS, "save_every": None, "rounds": 1})
    assert in_memory.flatness().objective().loss().isfinite()
    with pytest.raises(UserError, match="no folder"):
        in_memory.flatness(rounds=1)


def test_tensors_have_the_order_of_the_model_wherever_they_come_from(tmp_path: Path) -> None:
    settings = {"rounds": 1, "clients": 4, "clients_per_round": 2, "local_steps": 1, "workers": 1, "device": "cpu"}
    saved = fedflat.run("fedavg", model="mlp(hidden=4)", out=tmp_path / "run", **settings)
    for result in (saved, fedflat.load(tmp_path / "run")):
        assert (
            list(result.state_dict())
            == list(saved.model().state_dict())
            == ["1.weight", "1.bias", "3.weight", "3.bias"]
        )


def test_an_address_of_a_cluster_that_is_not_used_is_reported() -> None:
    settings = {"rounds": 1, "clients": 4, "local_steps": 1, "clients_per_round": 2, "model": "mlp(hidden=4)"}
    with pytest.warns(UserWarning, match=r"engine\.ray_address=127\.0\.0\.1:1 has no effect with engine\.name=loop"):
        fedflat.run("fedavg", ray_address="127.0.0.1:1", engine="loop", workers=1, device="cpu", **settings)
