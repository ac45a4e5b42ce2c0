"""fedflat flatness clients, gap, bounds, stability: from the command line to tables, JSON and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .conftest import call

TINY = (
    *("--rounds", "4", "--local-steps", "2", "--workers", "1", "--device", "cpu", "--quiet"),
    *("--clients", "8", "--clients-per-round", "3", "--model", "mlp(hidden=8)"),
)
LITTLE = ("--examples", "40", "--clients", "2")


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with saved models, logged cohorts and clients that never train."""
    folder = tmp_path_factory.mktemp("looked-at") / "run"
    partition = "dirichlet(alpha=0.1)+held-out"
    result = call(
        "run",
        "fedsam+wima",
        *TINY,
        "--partition",
        partition,
        "--save-every",
        2,
        "--flatness",
        "every=2,what=drift",
        "--out",
        folder,
    )
    assert result.exit_code == 0
    return folder


@pytest.fixture(scope="module")
def with_variates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variates") / "run"
    assert call("run", "scaffold", *TINY, "--save-every", 2, "--out", folder).exit_code == 0
    return folder


def drawn(path: Path) -> bool:
    """Whether a figure has several shades, also in grey."""
    return len(np.unique(np.asarray(Image.open(path).convert("L")))) > 20


def document(*arguments: object) -> dict:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_client_named_twice_counts_once(looked_at: Path, tmp_path: Path) -> None:
    flags = ("--client", 3, "--client", 3, "--client", 1, "--no-curvature", *LITTLE, "--out", tmp_path)
    assert document("flatness", "clients", looked_at, *flags)["rounds"][0]["clients"] == [3, 1]


def test_clients_over_rounds(looked_at: Path) -> None:
    found = document("flatness", "clients", looked_at, *LITTLE)
    rounds = [(one["round"], one["source"]) for one in found["rounds"]]
    assert rounds == [(1, "replayed"), (2, "logged"), (3, "replayed"), (4, "logged"), (5, "replayed")]
    again = found["rounds"][2]
    assert len(again["local"]["lambda_max"]) == len(again["clients"]) == 3
    assert all(value > 0 for value in again["local"]["lambda_max"].values())
    assert [one["round"] for one in found["models"]] == [0, 2, 4]
    assert len(found["forgetting"]) == 10
    assert not found["not_trained_again"]
    assert drawn(looked_at / "flatness" / "clients" / "clients.png")


def test_clients_as_tables(with_variates: Path) -> None:
    result = call(
        "flatness", "clients", with_variates, "--client", 5, "--client", 1, "--variates", "--no-curvature", *LITTLE
    )
    assert result.exit_code == 0
    assert "Clients of round 5" in result.stdout
    assert "norm of drift.c" in result.stdout
    assert any("ounds after 2" in line and "scaffold" in line for line in result.stdout.splitlines())
    lines = [line.split()[0] for line in result.stdout.partition("Clients of round 5")[2].splitlines() if line.strip()]
    assert lines[2:4] == ["5", "1"]


def test_averages_can_be_measured(looked_at: Path) -> None:
    found = document("flatness", "bounds", looked_at, "--average", "wima", *LITTLE)
    assert [one["round"] for one in found["rounds"]] == [2, 4]
    seen = document("flatness", "clients", looked_at, "--average", "wima", "--no-curvature", *LITTLE)["models"]
    record = json.loads((looked_at / "metrics.jsonl").read_text().splitlines()[-1])
    accuracies = np.array(list(seen[-1]["accuracy"]["classes"].values()))
    assert np.average(accuracies, weights=class_sizes()) == pytest.approx(record["test"]["wima"]["accuracy"])


def class_sizes() -> np.ndarray:
    from fedflat.data import load

    return np.bincount(np.asarray(load("digits").test.targets))


def test_the_gap_of_every_saved_model(looked_at: Path) -> None:
    found = document("flatness", "gap", looked_at)["models"]
    assert {name: [entry["round"] for entry in looks] for name, looks in found.items()} == {
        "server": [0, 2, 4],
        "wima": [2, 4],
    }
    last = found["server"][-1]
    assert last["gap"] == pytest.approx(last["test_loss"] - last["train_loss"])
    assert last["participation_gap"] == pytest.approx(last["unseen_loss"] - last["train_loss"])
    record = json.loads((looked_at / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_loss"] == pytest.approx(record["test"]["server"]["loss"])
    assert drawn(looked_at / "flatness" / "gap" / "gap.png")
    shown = call("flatness", "gap", looked_at).stdout
    assert "participation gap" in shown
    assert f"{last['gap']:.3g}" in shown


def test_bounds_state_their_premises(looked_at: Path) -> None:
    found = document("flatness", "bounds", looked_at, *LITTLE)
    seen = [entry["constants"] for entry in found["rounds"]]
    assert found["constants"] == {name: max(entry[name] for entry in seen) for name in seen[0]}
    assert set(found["as_printed"]) == {"fedsam", "fedswa", "fedmoswa"}
    assert found["as_printed"]["fedmoswa"]["log10"] <= found["as_printed"]["fedswa"]["log10"]
    assert found["largest_rate"] == pytest.approx(1 / (found["constants"]["smoothness"] * 2 * 4))
    assert [entry["met"] for entry in found["conditions"]] == [True, False, False, True]
    assert drawn(looked_at / "flatness" / "bounds" / "bounds.png")
    shown = call("flatness", "bounds", looked_at, *LITTLE).stdout
    assert "not met: 3 of" in shown
    assert "random guessing" in shown
    assert "tightened (ours)" in shown and "void)" in shown and "not of every example" in shown
    assert "L: a lower bound" in shown and "sigma, sigma_g: estimates" in shown


def test_stability(tmp_path: Path) -> None:
    arguments = (
        "flatness",
        "stability",
        "fedmoswa",
        "--rounds",
        3,
        "--local-steps",
        2,
        "--device",
        "cpu",
        "--twins",
        2,
        "--examples",
        30,
        "--clip",
        "null",
    )
    found = document(*arguments, "--out", tmp_path / "s")
    assert json.loads((tmp_path / "s" / "settings.json").read_text())["clip"] == "null"  # the same in every process
    assert [look["round"] for look in found["rounds"]] == [1, 2, 3]
    assert all(distance > 0 for distance in found["rounds"][0]["distance"])
    assert [swap["first_round"] for swap in found["swaps"]] == [1, 1]
    assert json.loads((tmp_path / "s" / "stability.json").read_text())["rounds"] == found["rounds"]
    assert drawn(tmp_path / "s" / "stability.png")
    again = call(*arguments, "--eval-every", 2, "--out", tmp_path / "again").stdout
    assert f"{np.mean(found['rounds'][-1]['distance']):.3g}" in again
    assert "bound" not in again  # the largest difference of one seed is not a bound on epsilon


def test_the_log_command_shows_several_runs(looked_at: Path, with_variates: Path, tmp_path: Path) -> None:
    little = (
        "--flatness",
        "every=8,what=lambda_max+sharpness+gap+drift+clients+classes+features+noise",
        "--set",
        "flatness.examples=20",
        "--set",
        "flatness.clients=2",
    )
    call("run", "fedcm", *TINY, *little, "--seed", 1, "--out", tmp_path / "cm")
    runs = (looked_at, tmp_path / "cm", looked_at, looked_at)  # repetitions are ignored
    found = document("flatness", "log", *runs, "--out", tmp_path)["runs"]
    assert list(found) == ["fedsam+wima, seed 0", "fedcm, seed 1"]
    assert found["fedsam+wima, seed 0"]["log"].keys() == {"cosine", "diversity"}
    history = [json.loads(line) for line in (tmp_path / "cm" / "metrics.jsonl").read_text().splitlines()]
    log = found["fedcm, seed 1"]["log"]
    assert log["lambda_max"] == [
        [one["round"], one["flatness"]["models"]["server"]["lambda_max"]] for one in history if "flatness" in one
    ]
    assert {
        "sharpness",
        "gap",
        "momentum",
        "local lambda_max",
        "worst class",
        "features",
        "L",
        "sigma",
        "sigma_g",
    } <= log.keys()
    assert json.loads((tmp_path / "log.json").read_text())["runs"] == found
    shown = call("flatness", "log", looked_at).stdout
    assert "2 measurements took" in shown and f"on at most {found['fedsam+wima, seed 0']['examples']} training" in shown
    assert drawn(looked_at / "flatness" / "log" / "log.png")
    refused = call("flatness", "log", with_variates)
    assert refused.exit_code == 2 and str(with_variates) in refused.stderr and "--flatness every=N" in refused.stderr


def test_a_run_reports_the_time_of_flatness_measurements(looked_at: Path, with_variates: Path) -> None:
    assert "for flatness" in call("show", looked_at).stdout
    assert "for flatness" not in call("show", with_variates).stdout
    assert document("show", looked_at)["flatness_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("clients", "{run}", "--client", 99), "client 99 ... 6 clients ... 0 to 5"),
        (("clients", "{run}", "--variates"), "fedsam+wima ... control variate"),
        (("gap", "nowhere"), "there is no run in nowhere"),
        (("bounds", "{run}", "--average", "wimma"), "'wimma'; did you mean wima?"),
        (("stability", "fedavg", "--client", 70), "client 70 ... 50 clients"),
        (("stability", "fedavgg"), "'fedavgg'"),
    ],
)
def test_user_errors_are_one_line(looked_at: Path, tmp_path: Path, monkeypatch, arguments, sentence) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("flatness", *(str(argument).format(run=looked_at) for argument in arguments))
    assert result.exit_code != 0
    said = " ".join(result.stderr.split())
    assert all(part in said for part in sentence.split(" ... ")), said
    assert "Traceback" not in result.stderr


def test_a_run_without_saved_models(tmp_path: Path) -> None:
    call("run", "fedavg", *TINY, "--out", tmp_path / "a")
    for part in ("checkpoint/state.safetensors", "model.safetensors"):
        (tmp_path / "a" / part).unlink()
    result = call("flatness", "clients", tmp_path / "a")
    assert result.exit_code == 2
    for word in (str(tmp_path / "a"), "no checkpoint", "--save-every N", "--flatness every=N"):
        assert word in result.stderr


def test_similarity_of_clients_and_server(fedflat, looked_at, tmp_path):
    flags = ("--eigenvectors", 2, "--examples", 30, "--out", tmp_path)
    result = fedflat("flatness", "similarity", f"{looked_at}:server@2", *flags)
    assert result.exit_code == 0, result.stderr
    assert (
        "overlap at the client's model" in result.stdout
        and "CKA of features" in result.stdout
        and "server@2" in result.stdout
    )
    clients = json.loads((tmp_path / "similarity.json").read_text())["clients"]
    assert len(clients) == 3 and all(0 <= row[name] <= 1.001 for row in clients for name in row if name != "client")
    assert all(row["overlap"] != row["overlap_at_server"] and 0.2 < row["cka"] < 0.9999 for row in clients)
    low_rank = ("--eigenvectors", 100, "--examples", 1, "--out", tmp_path)
    result = fedflat("flatness", "similarity", f"{looked_at}:server@2", "--client", 0, *low_rank)
    (client,) = json.loads((tmp_path / "similarity.json").read_text())["clients"]
    assert client["overlap_at_server"] < 0.3 and "request at most 1" in result.stderr  # random subspaces: 0.16
    result = fedflat("flatness", "similarity", f"{looked_at}:wima", *flags)
    assert result.exit_code == 2 and "clients train from the server model" in result.stderr
