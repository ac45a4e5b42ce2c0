"""The studies at small scale: end to end on digits, drawn again from saved numbers, and judged on made-up numbers."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedflat.algorithms import algorithm, canonical
from fedflat.errors import UserError
from fedflat.experiment.make_config import make_config

STUDIES = Path(__file__).parents[1] / "studies"
pytestmark = pytest.mark.usefixtures("few_steps")


def words(text: str) -> list[str]:
    """A command line without quoting."""
    return text.split()


SMALL = words("--dataset digits --model mlp(hidden=2) --rounds 2 --device cpu --examples 10")


def study(name: str) -> ModuleType:
    """A study as a module; studies import shared modules from their own directory."""
    sys.path.insert(0, str(STUDIES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(STUDIES))


@pytest.mark.slow
def test_eccv_claims_are_measured_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eccv_claims = study("eccv_claims")
    arguments = [*SMALL, "--moments", "1", "--out", str(tmp_path)]
    eccv_claims.main(arguments)
    numbers = (tmp_path / "numbers.json").read_text()
    partitions = json.loads(numbers)["measured"]
    assert list(partitions) == ["one class per client", "mild"]
    for methods in partitions.values():
        assert list(methods) == ["FedAvg", "FedSAM", "FedASAM"]
        for by_round in methods.values():
            (moment,) = by_round.values()
            assert len(moment["eigenvalues"]) == 5
            assert len(moment["clients"]) == 5
    assert (tmp_path / "table.md").read_text().count("\n| ") == 6
    assert (tmp_path / "eccv_claims.png").exists()

    capsys.readouterr()
    monkeypatch.setattr(eccv_claims, "draw", lambda path: "drawn already")
    eccv_claims.main(arguments)
    assert "training" not in capsys.readouterr().err
    assert (tmp_path / "numbers.json").read_text() == numbers
    with pytest.raises(UserError, match="other settings"):
        eccv_claims.main([*arguments, "--seed", "1"])


@pytest.mark.slow
def test_vit_curves_are_trained_once_and_drawn_from_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit_curves = study("vit_curves")
    tiny = words("--dataset digits --model vit-tiny(depth=1,patch=4) --rounds 1 --local-steps 1 --batch-size 4")
    arguments = [str(tmp_path), *tiny, "--device", "cpu", "--precision", "float32"]
    vit_curves.main(arguments)
    numbers = (tmp_path / "numbers.json").read_text()
    vit_curves.main(arguments)
    assert capsys.readouterr().err.count("training fedmoswa: ") == 1
    assert (tmp_path / "numbers.json").read_text() == numbers
    vit_curves.main([str(tmp_path), "--draw", str(tmp_path / "figure.png")])
    assert "fedmoswa" in capsys.readouterr().out
    assert (tmp_path / "figure.png").exists()


@pytest.mark.parametrize("name", ["flat_minima", "eccv_claims"])
def test_drawing_requires_numbers(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"numbers\.json.* without --draw-only"):
        study(name).main(["--out", str(tmp_path), "--draw-only"])


def moment(top: float, client: float, average: float) -> dict[str, Any]:
    return {
        "eigenvalues": [top, 1, 1, 1, 1],
        "clients": {"0": client, "1": client},
        "average": average,
        "accuracy": 0.5,
        "train_loss": 1.0,
    }


def made_up(fedavg: float, fedsam: float, fedasam: float, client: float) -> dict[str, Any]:
    tops = {"FedAvg": fedavg, "FedSAM": fedsam, "FedASAM": fedasam}
    hard = {name: {"5": moment(top, client, top)} for name, top in tops.items()}
    mild = {name: {"1": moment(2 * top, 4, top), "5": moment(top, 4, top)} for name, top in tops.items()}
    return {"measured": {"one class per client": hard, "mild": mild}}


def test_claims_hold_on_the_published_numbers_and_not_on_their_opposite() -> None:
    """Table 1 of Caldarola et al. at alpha 0: 93.46, 70.29, 30.11, and clients at or below 14."""
    figure = study("eccv_claims_figure")
    published = made_up(93.46, 70.29, 30.11, 3.0)
    verdicts = figure.verdicts(published)
    assert "does not hold" not in verdicts
    assert verdicts.count("- holds") == 10
    opposite = figure.verdicts(made_up(30.11, 70.29, 93.46, 500.0)).splitlines()
    failed = [line for line in opposite if line.startswith("- does not hold")]
    assert any("from FedAvg over FedSAM to FedASAM, one class per client" in line for line in failed)
    assert any("one class each" in line and "(500 vs. 4)" in line for line in failed)
    assert "| one class per client | FedAvg | 5 | 50.00 | 93.5 | 93.5 | 3 | 93.5 |" in figure.table(published)


def test_an_interrupted_study_is_drawn_as_far_as_it_was_measured() -> None:
    figure = study("eccv_claims_figure")
    numbers = made_up(3, 2, 1, 0.5)
    numbers["measured"]["mild"] = {"FedAvg": {}}
    assert len(figure.eccv_claims_figure(numbers).axes) == 3
    assert "mild" not in figure.table(numbers)
    assert "mild" not in figure.verdicts(numbers)


def test_numbers_are_complete_on_disk_after_every_addition(tmp_path: Path) -> None:
    shared, path = study("study"), tmp_path / "new" / "numbers.json"
    numbers = shared.Numbers(path, rounds=3)
    numbers.part("methods", "FedAvg")["loss"] = float("nan")
    numbers.save()
    assert json.loads(path.read_text()) == {"about": {"rounds": 3}, "methods": {"FedAvg": {"loss": None}}}
    assert shared.Numbers(path, rounds=3).part("methods", "FedAvg") == {"loss": None}
    with pytest.raises(UserError, match="other settings"):
        shared.Numbers(path, rounds=4)


@pytest.mark.parametrize("dataset", ["cifar10", "fashion_mnist", "digits"])
@pytest.mark.parametrize("name", ["flat_minima", "eccv_claims"])
def test_settings_form_valid_configs_on_every_dataset(name: str, dataset: str) -> None:
    """A wrong setting must not surface after minutes on a GPU."""
    module, shared = study(name), study("study")
    options = ["--dataset", dataset.replace("_", "-"), "--precision", "tf32"]
    arguments = shared.common_arguments("", 100, "out").parse_args(options)
    config = make_config(settings={**module.SETTINGS[dataset], **shared.common_settings(arguments)})
    assert (config.data.dataset, config.training.rounds, config.engine.precision) == (dataset, 100, "tf32")
    assert config.model == ("mlp" if dataset == "digits" else "cnn")


def test_the_methods_of_flat_minima_are_canonical() -> None:
    methods = study("flat_minima").algorithms(100, 0.1)
    assert [canonical(algorithm(text)) for text in methods.values()] == list(methods.values())
    assert algorithm(methods["FedASAM + SWA"]).lr_schedule.cycle == 5


def test_saved_figures_can_be_drawn_again() -> None:
    """The numbers in studies/results have the keys that the scripts read."""
    numbers = json.loads((STUDIES / "results" / "flat_minima_fashion_mnist.json").read_text())
    assert len(study("flat_minima_figure").flat_minima_figure(numbers).axes) == 2 * 4 + 1
    numbers = json.loads((STUDIES / "results" / "eccv_claims_cifar10.json").read_text())
    assert len(study("eccv_claims_figure").eccv_claims_figure(numbers).axes) == 6
    numbers = json.loads((STUDIES / "results" / "camvid.json").read_text())
    assert "learning rate 0.02" in study("camvid").section(numbers, "camvid.png")


TINY = words("--dataset digits --model mlp(hidden=8) --device cpu --precision float32 --rounds 4 --eval-every 2")


@pytest.mark.slow
def test_virtual_time_from_training_to_the_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual_time = study("virtual_time")
    monkeypatch.setattr(virtual_time, "ALGORITHMS", {"SCAFFOLD": "scaffold", "FedSAM": "fedsam"})
    options = words("--rounds 3 --clients 6 --clients-per-round 2 --local-steps 2 --seeds 2 --out")
    with monkeypatch.context() as training_only:
        training_only.setattr(virtual_time, "draw", lambda path: None)
        virtual_time.main([*SMALL, *options, str(tmp_path)])
    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert list(runs) == ["SCAFFOLD", "FedSAM"]
    for policies in runs.values():
        assert list(policies) == ["synchronous", "deadline", "FedBuff"]
        ends = [values["seconds"][-1] for (values, _) in policies.values()]
        assert ends[0] == max(ends) and min(ends) > 0
    virtual_time.main([*SMALL, *options, str(tmp_path), "--draw-only"])
    assert (tmp_path / "virtual_time.png").exists()
    assert (tmp_path / "summary.txt").read_text() in capsys.readouterr().out


@pytest.mark.slow
def test_privacy_from_training_to_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    privacy = study("privacy")
    options = words("--clients 6 --clients-per-round 2 --local-steps 1 --seeds 1 --out")
    privacy.main([*SMALL, *options, str(tmp_path)])
    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert list(runs) == ["FedAvg", "FedSAM"]
    for budgets in runs.values():
        epsilons = {name: values["epsilon"] for name, (values,) in budgets.items()}
        assert epsilons.pop("none") is None
        assert (
            all(value == pytest.approx(float(name), rel=0.01) for name, value in epsilons.items())
            and len(epsilons) == 4
        )
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n|") == 6 and table in capsys.readouterr().out
    privacy.main([*SMALL, *options, str(tmp_path), "--draw-only"])


def measured_models(flatness_study: ModuleType, invariant: Sequence[str]) -> list[dict[str, Any]]:
    """Made-up models: the trace determines the gap, and lambda_max follows the training loss, which the gap ignores."""
    rng, models = np.random.default_rng(0), []
    columns = ("lambda_max", "trace", *invariant)
    for family, algorithms in flatness_study.FAMILIES.items():
        for name in algorithms:
            for seed in range(3):
                loss, trace = rng.uniform(size=2)
                measures = {column: rng.uniform() for column in columns} | {"lambda_max": loss**2, "trace": trace}
                outcomes = {"gap": trace + 0.05 * rng.normal(), "accuracy_gap": loss, "test_error": rng.uniform(0, 0.5)}
                labels = {"dataset": "digits", "alpha": 0.1, "algorithm": name, "seed": seed, "family": family}
                labels |= {"comparison": "equal rounds", "excluded": ""}
                models.append({**labels, "train_loss": loss, "measures": measures, **outcomes})
    return models


def test_the_flatness_study_finds_the_measure_that_predicts(tmp_path: Path) -> None:
    flatness_study = study("flatness_study")
    analysis = study("flatness_analysis")
    models = measured_models(flatness_study, analysis.INVARIANT)
    diverged = {**models[0], "excluded": "diverged"}
    untrained, incomplete = {**models[0], "test_error": 0.9}, {**models[0], "gap": None}
    models += [diverged, untrained, incomplete]
    (tmp_path / "models.jsonl").write_text("".join(json.dumps(model) + "\n" for model in models))
    document = analysis.analyse(tmp_path, resamples=100)
    assert document["models"] == len(models) and len(document["excluded"]) == 3
    (cell,) = document["cells"].values()
    assert (cell["models"], cell["algorithms"]) == (84, 28)
    for kind in ("across", "partial", "within"):
        trace, noise = (cell[kind]["gap"][name] for name in ("trace", "asam"))
        assert trace["value"] > 0.9 and trace["low"] > 0.85 and trace["holm"] < 0.2 < noise["holm"]
        assert noise["low"] < 0 < noise["high"]
    # lambda_max orders the accuracy gap only through the training loss.
    assert cell["across"]["accuracy_gap"]["lambda_max"]["value"] == pytest.approx(1)
    assert cell["partial"]["accuracy_gap"]["lambda_max"]["value"] is None
    assert "holm" not in cell["across"]["gap"]["train_loss"]
    panels = study("flatness_study_figure").correlation_figure(document["cells"], "equal rounds").axes
    assert [label.get_text() for label in panels[0].get_yticklabels()][-1] == "train loss" and len(panels) == 3
    assert cell["gain_over_lambda_max"].keys() == set(analysis.INVARIANT)
    assert "| trace | +0.9" in (tmp_path / "analysis.md").read_text() and cell["counted"]
    models[:63] = [{**model, "excluded": "diverged"} for model in models[:63]]  # 21 algorithms, more than a third
    (tmp_path / "models.jsonl").write_text("".join(json.dumps(model) + "\n" for model in models))
    (cell,) = analysis.analyse(tmp_path, resamples=2)["cells"].values()
    assert cell["models"] == 21 and not cell["counted"]
    assert "not counted: more than a third excluded" in (tmp_path / "analysis.md").read_text()
    assert analysis.is_included({**models[70], "train_loss": 0.0})
    assert not analysis.is_included({**models[70], "train_loss": None})


def test_statements_are_judged_by_the_sign_in_every_seed() -> None:
    analysis, models = study("flatness_analysis"), []
    for name, errors in {
        "fedsam": (0.1, 0.2, 0.2),
        "fedavg": (0.3, 0.3, 0.3),
        "fedasam": (0.4, 0.4, 0.5),
        "fedavg+swa": (0.2, 0.2, 0.4),
        "fedavg+wima": (0.2, 0.2),
    }.items():
        for seed, error in enumerate(errors):
            labels = {"dataset": "digits", "comparison": "equal loss", "alpha": 1.0, "algorithm": name, "seed": seed}
            models.append({**labels, "test_error": error, "measures": {"lambda_max": 1.0}})
    verdicts = {row["statement"]: row["verdict"] for row in analysis.statements(models)}
    assert [verdicts[f"{name} has a lower test_error than fedavg"] for name in ("fedsam", "fedasam", "fedavg+swa")] == [
        *("supported", "contradicted", "mixed")
    ]
    assert verdicts["fedsam has a lower lambda_max than fedavg"] == "mixed"  # equal
    assert verdicts["fedavg+wima has a lower test_error than fedavg"] == "incomplete"
    assert verdicts["fedsam+swa has a lower test_error than fedsam"] == "not measured"
    assert "fedswa has a lower test_error than fedsam" not in verdicts  # stated for alpha 0.1 only


def test_conclusions_count_cells_with_both_signs() -> None:
    analysis = study("flatness_analysis")
    supported, reversed_, undecided = (
        {"value": value, "holm": p} for value, p in ((0.5, 0.01), (-0.5, 0.01), (0.5, 0.2))
    )
    rows = {  # correlations in the four cells; the same when controlling for training loss, except for "confounded"
        "good": [supported] * 4,
        "half": [supported, supported, undecided, undecided],
        "mixed": [supported, supported, supported, reversed_],
        "confounded": [supported] * 4,
    }
    cells = []
    for number in range(5):  # the last is a check that is not counted
        across = {name: values[min(number, 3)] for name, values in rows.items()} | {"train_loss": supported}
        tables = {kind: {"gap": across} for kind in ("across", "within")}
        tables["partial"] = {"gap": across | {"confounded": undecided}}
        dataset = ("digits", "digits", "fashion_mnist", "fashion_mnist", "cifar10")[number]
        cells.append({**tables, "dataset": dataset, "comparison": "equal rounds", "counted": True})
    result = analysis.conclusions(cells)
    assert {name: row["verdict"] for name, row in result.items()} == {
        "good": "predicts",
        "half": "predicts in part",
        "mixed": "does not predict",
        "confounded": "does not predict",
    }
    counts = [result["confounded"][key] for key in ("H1", "H2", "H4", "both", "reversed", "cells")]
    assert counts == [4, 0, 4, 0, 0, 4] and result["mixed"]["reversed"] == 1
    assert analysis.conclusions([{**cell, "counted": False} for cell in cells]) == {}


def test_the_round_at_equal_loss_is_the_first_that_reaches_it() -> None:
    losses = {0: 0.1, 5: None, 10: 0.4, 15: 0.3, 20: 0.0}
    rows = {number: {"train_loss": loss} for number, loss in losses.items()}
    flatness_study = study("flatness_study")
    assert [flatness_study.round_at_loss(rows, target) for target in (0.4, 0.35, 0.1, -1.0)] == [10, 15, 20, None]
    assert flatness_study.target_loss({"excluded": "", "train_loss": 2.0}) == pytest.approx(2.2)
    assert math.isnan(flatness_study.target_loss({"excluded": "diverged", "train_loss": 2.0}))


@pytest.mark.slow
def test_the_flatness_study_is_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flatness_study = study("flatness_study")
    measures, first = flatness_study.measures_of, {}

    def measures_of_first(*model: Any, **options: Any) -> dict[str, float]:  # measuring takes seconds
        first.update(first or measures(*model, **options))
        return first

    monkeypatch.setattr(flatness_study, "measures_of", measures_of_first)
    options = words("--seeds 0 --alphas 1 --algorithms fedsam fedavg+ema --resamples 5 --out")
    flatness_study.main([*SMALL, *options, str(tmp_path)])
    models = [json.loads(line) for line in (tmp_path / "models.jsonl").read_text().splitlines()]
    assert len(models) == 6 and models[0]["family"] == "server optimiser"
    assert models[0]["round"] == 2 and models[0]["measures"]["lambda_max"] > 0
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.setattr(flatness_study, "correlation_figure", lambda cells, comparison: Figure())
    flatness_study.main([*SMALL, *options, str(tmp_path)])
    assert not (tmp_path / "runs").exists()  # measured models need no run
