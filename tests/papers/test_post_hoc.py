"""Statistics measured on the models of finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedflat
from fedflat.data import Examples, load
from fedflat.experiment.analysis.observer import FixedSample
from fedflat.experiment.analysis.run_model import open_model
from fedflat.experiment.store.run_folder import Record, load_record
from fedflat.flatness import Operator
from fedflat.papers import post_hoc
from fedflat.papers.numbers import (
    ClientEigenvalue,
    Corrupted,
    DomainMetric,
    Eigenvalue,
    Features,
    OnClients,
    parse_statistic,
)
from fedflat.papers.post_hoc import FILE, ModelQuery, measure
from fedflat.papers.small import EXAMPLES, corrupted

SETTINGS = {
    "model": "mlp(hidden=2)",
    "rounds": 3,
    "local_steps": 4,
    "clients": 12,
    "clients_per_round": 3,
    "workers": 1,
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A small run on digits with a server model and an average."""
    out = tmp_path_factory.mktemp("runs") / "run"
    fedflat.run("fedavg+ema", out=out, **SETTINGS)
    return load_record(out)


def of(record: Record, statistic, model: str = "server", small: bool = False) -> float | str:
    return measure(record, [ModelQuery(statistic, model)], small)[ModelQuery(statistic, model)]


def test_eigenvalues_are_those_of_the_whole_hessian(record):
    """Compare with numpy's eigenvalues of the full Hessian with 160 columns."""
    objective = open_model(record, name="ema").objective()
    hessian = Operator.of_hessian(objective)
    columns = hessian(torch.eye(objective.size)).double().numpy()
    exact = np.linalg.eigvalsh((columns + columns.T) / 2)[::-1]
    assert of(record, Eigenvalue(), "ema") == pytest.approx(exact[0], rel=1e-4)
    assert of(record, Eigenvalue(over=5), "ema") == pytest.approx(exact[0] / exact[4], rel=1e-2)
    assert of(record, Eigenvalue(), "server") != of(record, Eigenvalue(), "ema")


def test_measurements_are_stored_and_extended_on_request(record, monkeypatch):
    first = of(record, Eigenvalue(over=5))
    known = json.loads((record.folder.path / FILE).read_text())["spectrum, server"]
    assert len(known["eigenvalues"]) == 5
    monkeypatch.setattr(post_hoc, "spectrum_of", lambda *_, **__: pytest.fail("measured again"))
    assert of(load_record(record.folder.path), Eigenvalue(over=5)) == first
    assert of(record, Eigenvalue()) == known["eigenvalues"][0]
    monkeypatch.undo()
    assert of(record, Eigenvalue(count=9)) == pytest.approx(known["eigenvalues"][0], rel=1e-3)
    assert len(json.loads((record.folder.path / FILE).read_text())["spectrum, server"]["eigenvalues"]) == 9


def test_queries_for_most_eigenvalues_come_first(tmp_path: Path, monkeypatch):
    fedflat.run("fedavg", out=tmp_path / "run", **SETTINGS)
    asked, real = [], post_hoc.spectrum_of
    monkeypatch.setattr(
        post_hoc, "spectrum_of", lambda of, count, **more: asked.append(count) or real(of, count, **more)
    )
    found = measure(
        load_record(tmp_path / "run"), [ModelQuery(Eigenvalue(), "server"), ModelQuery(Eigenvalue(over=5), "server")]
    )
    assert asked == [5] and len(found) == 2


def test_the_highest_eigenvalue_of_clients_on_their_own_data(record):
    highest = of(record, ClientEigenvalue())
    each = json.loads((record.folder.path / FILE).read_text())["curvature of clients"]["lambda_max"]
    assert len(each) == 3
    assert highest == max(each.values()) > 0


def test_accuracy_and_output_norm_on_client_data(record):
    found = open_model(record, name="server")
    weights, buffers = found.state.weights, {}
    accuracies, norms = [], []
    for indices in found.partition.clients:
        own = found.problem.data.train.take(indices)
        logits = found.problem.predict(weights, buffers, own.inputs)
        accuracies.append(float((logits.argmax(1) == own.targets).float().mean()))
        norms.append(float(logits.norm(dim=1).mean()))
    assert of(record, OnClients()) == pytest.approx(np.mean(accuracies))
    assert of(record, Features()) == pytest.approx(np.mean(norms), rel=1e-5)


def test_few_clients_and_examples_at_small_scale(record, monkeypatch):
    monkeypatch.setattr(post_hoc, "SMALL_SAMPLE", {"clients": 2, "examples": 5})
    sizes, real = [], FixedSample.objective
    monkeypatch.setattr(
        FixedSample, "objective", lambda self, model, at: sizes.append(len(at)) or real(self, model, at)
    )
    (record.folder.path / FILE).unlink(missing_ok=True)
    assert of(record, ClientEigenvalue(), small=True) > 0 and of(record, Features(), small=True) > 0
    assert set(sizes) == {5}
    stored = json.loads((record.folder.path / FILE).read_text())
    assert len(stored["features, server"]) == 2
    (record.folder.path / FILE).unlink()


def test_generated_corruptions_grow_with_severity(record):
    images = load("digits").test
    mild, severe = corrupted(images, 1), corrupted(images, 5)
    for name in mild:
        away = [float((one[name].inputs.float() - images.inputs.float()).abs().mean()) for one in (mild, severe)]
        assert 0 < 2 * away[0] < away[1], name
        assert torch.equal(severe[name].targets, images.targets)
    assert 0 <= of(record, Corrupted(), small=True) <= 1
    kept = json.loads((record.folder.path / FILE).read_text())["severity 5, server"]
    assert set(kept["each"]) == {"gaussian_noise", "brightness", "contrast"}
    assert kept["mean"] == pytest.approx(np.mean([one["severity 5"] for one in kept["each"].values()]))


def test_the_mean_covers_corruptions_outside_the_benchmark(tmp_path: Path, monkeypatch):
    """``saturate`` is one of four corruptions outside the benchmark, and here the only one that changes the images."""
    fedflat.run("fedavg", out=tmp_path / "run", **SETTINGS)
    record = load_record(tmp_path / "run")
    made = {"fog": lambda inputs: inputs, "saturate": torch.zeros_like}

    def changed(images: Examples, severity: int) -> dict[str, Examples]:
        return {name: Examples(change(images.inputs), images.targets) for name, change in made.items()}

    monkeypatch.setattr(post_hoc, "corrupted", changed)
    found, images = open_model(record), load("digits").test.take(torch.arange(EXAMPLES))
    given = [
        found.problem.predict(found.state.weights, {}, change(images.inputs)).argmax(1) for change in made.values()
    ]
    clean, black = (float((labels == images.targets).float().mean()) for labels in given)
    assert clean > black + 0.1
    assert of(record, Corrupted(), small=True) == pytest.approx((clean + black) / 2)


def test_seen_and_unseen_domains_are_evaluated_separately(tmp_path: Path, record: Record):
    data = {
        "model": "bisenetv2(width=0.1,auxiliary=false)",
        "partition": "natural",
        "clients": None,
        "clients_per_round": 2,
        "workers": 1,
    }
    fedflat.run(
        "fedavg", dataset="digit_masks(unseen=fog)", out=tmp_path / "run", rounds=1, local_steps=1, batch_size=4, **data
    )
    dense = load_record(tmp_path / "run")
    seen, unseen = of(dense, DomainMetric()), of(dense, DomainMetric(part="unseen"))
    assert isinstance(seen, float) and isinstance(unseen, float)
    each = json.loads((tmp_path / "run" / FILE).read_text())["domains, server"]["each"]
    assert unseen == each["fog"]["miou"]
    assert set(each) == {"clear", "dusk", "fog", "snow", "night"}
    assert "domain" in of(record, DomainMetric())


def test_statistics_are_parsed_and_shown():
    for text in (
        "eigenvalue",
        "eigenvalue(over=5)",
        "client-eigenvalue",
        "corrupted(severity=3)",
        "on-clients",
        "domains(part=unseen)",
    ):
        assert parse_statistic(text).text == text
    assert (Eigenvalue(over=5).needed, Eigenvalue(count=50).needed, Eigenvalue().needed) == (5, 50, 1)
    with pytest.raises(fedflat.UserError, match="seen, unseen"):
        parse_statistic("domains(part=half)")
