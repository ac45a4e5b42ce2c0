"""The studies, from end to end on digits; drawn again from their numbers alone; and what they say of made-up numbers."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedflat.algorithms import algorithm, canonical
from fedflat.api import make_config
from fedflat.errors import UserError

STUDIES = Path(__file__).parents[1] / "studies"
SMALL = ("--dataset", "digits", "--model", "mlp(hidden=8)", "--rounds", "5", "--device", "cpu", "--examples", "60")


def study(name: str) -> ModuleType:
    """A study's module; scripts find what they share beside them."""
    sys.path.insert(0, str(STUDIES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(STUDIES))


@pytest.mark.slow
def test_flat_minima_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat_minima = study("flat_minima")
    flat_minima.main([*SMALL, "--points", "5", "--out", str(tmp_path)])
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert list(numbers["methods"]) == ["FedAvg", "FedSAM", "FedASAM + SWA", "FedMoSWA"] == list(numbers["landscapes"])
    for figures in numbers["methods"].values():
        assert figures["eigenvalues"] == sorted(figures["eigenvalues"], reverse=True)
        assert 0 <= figures["accuracy"] <= 1
    assert numbers["methods"]["FedASAM + SWA"]["model"] == "swa"
    first = capsys.readouterr()
    assert "flattest by lambda_max" in first.out
    assert (tmp_path / "summary.txt").read_text() in first.out
    assert "training FedAvg: " in first.err

    for picture in tmp_path.glob("*.p*"):
        picture.unlink()
    flat_minima.main([*SMALL, "--out", str(tmp_path), "--draw-only"])
    assert {path.name for path in tmp_path.glob("*.p*")} == {
        "flat_minima.png",
        "flat_minima.pdf",
        "plane.png",
        "plane.pdf",
    }
    assert "training" not in capsys.readouterr().err


@pytest.mark.slow
def test_eccv_claims_from_end_to_end_and_again_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eccv_claims = study("eccv_claims")
    arguments = [*SMALL, "--moments", "1", "--out", str(tmp_path)]
    eccv_claims.main(arguments)
    before = (tmp_path / "numbers.json").read_text()
    found = json.loads(before)["measured"]
    assert list(found) == ["one class per client", "mild"]
    assert all(list(methods) == ["FedAvg", "FedSAM", "FedASAM"] for methods in found.values())
    for methods in found.values():
        for moments in methods.values():
            (moment,) = moments.values()
            assert len(moment["eigenvalues"]) == 5
            assert len(moment["clients"]) == 5
    assert (tmp_path / "table.md").read_text().count("\n| ") == 6
    assert (tmp_path / "eccv_claims.png").exists()

    capsys.readouterr()
    eccv_claims.main(arguments)
    again = capsys.readouterr()
    assert "finished after" not in again.err
    assert (tmp_path / "numbers.json").read_text() == before
    with pytest.raises(UserError, match="a study with other settings"):
        eccv_claims.main([*arguments, "--seed", "1"])


@pytest.mark.slow
def test_vit_curves_are_trained_once_and_drawn_from_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit_curves = study("vit_curves")
    small = [
        "--dataset",
        "digits",
        "--model",
        "vit-tiny(depth=1,patch=4)",
        "--rounds",
        "1",
        "--local-steps",
        "1",
        "--batch-size",
        "4",
    ]
    arguments = [str(tmp_path), *small, "--device", "cpu", "--precision", "float32"]
    vit_curves.main(arguments)
    before = (tmp_path / "numbers.json").read_text()
    vit_curves.main(arguments)
    assert (
        capsys.readouterr().err.count("training fedmoswa: ") == 1 and (tmp_path / "numbers.json").read_text() == before
    )
    vit_curves.main([str(tmp_path), "--draw", str(tmp_path / "picture.png")])
    assert "fedmoswa" in capsys.readouterr().out and (tmp_path / "picture.png").exists()


@pytest.mark.parametrize("name", ["flat_minima", "eccv_claims"])
def test_there_must_be_numbers_to_draw_from(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run the study without --draw-only first"):
        study(name).main(["--out", str(tmp_path), "--draw-only"])


# --- verdicts --------------------------------------------------------------------------------------------------------------------


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


def test_claims_hold_on_the_papers_numbers_and_not_on_their_opposite() -> None:
    """Table 1 of Caldarola et al. at alpha 0: 93.46, 70.29, 30.11, and clients at or below 14."""
    shown = study("eccv_claims_picture")
    as_published = shown.verdicts(made_up(93.46, 70.29, 30.11, 3.0))
    assert "does not hold" not in as_published
    assert as_published.count("- holds") == 10
    opposite = shown.verdicts(made_up(30.11, 70.29, 93.46, 500.0))
    assert "- does not hold: lambda_max falls from FedAvg over FedSAM to FedASAM, one class per client" in opposite
    assert (
        "- does not hold: FedAvg's clients are flatter with one class each than with the mild partition (500 against 4)"
        in opposite
    )
    assert "| one class per client | FedAvg | 5 | 50.00 | 93.5 | 93.5 | 3 | 93.5 |" in shown.table(
        made_up(93.46, 70.29, 30.11, 3.0)
    )


def test_a_study_that_was_cut_off_is_drawn_as_far_as_it_went() -> None:
    shown = study("eccv_claims_picture")
    numbers = made_up(3, 2, 1, 0.5)
    numbers["measured"]["mild"] = {"FedAvg": {}}
    assert len(shown.picture(numbers).axes) == 3
    assert "mild" not in shown.table(numbers)
    assert "mild" not in shown.verdicts(numbers)


def test_numbers_are_whole_after_every_addition(tmp_path: Path) -> None:
    shared = study("study")
    numbers = shared.Numbers(tmp_path / "new" / "numbers.json", rounds=3)
    numbers.part("methods", "FedAvg")["loss"] = float("nan")
    numbers.save()
    assert json.loads((tmp_path / "new" / "numbers.json").read_text()) == {
        "about": {"rounds": 3},
        "methods": {"FedAvg": {"loss": None}},
    }
    assert shared.Numbers(tmp_path / "new" / "numbers.json", rounds=3).part("methods", "FedAvg") == {"loss": None}
    with pytest.raises(UserError, match="other settings"):
        shared.Numbers(tmp_path / "new" / "numbers.json", rounds=4)


@pytest.mark.parametrize("data", ["cifar10", "fashion_mnist", "digits"])
@pytest.mark.parametrize("name", ["flat_minima", "eccv_claims"])
def test_settings_make_whole_configs_for_every_data_set(name: str, data: str) -> None:
    """What is run on a GPU for minutes should not end in a wrong setting."""
    module, shared = study(name), study("study")
    arguments = shared.common_arguments("", 100, "out").parse_args(
        ["--dataset", data.replace("_", "-"), "--precision", "tf32"]
    )
    found = make_config(settings={**module.SETTINGS[data], **shared.common_settings(arguments)})
    assert (found.data.name, found.training.rounds, found.engine.precision) == (data, 100, "tf32")
    assert found.model == ("mlp" if data == "digits" else "cnn")


def test_the_methods_of_the_picture_are_what_they_are_called() -> None:
    found = study("flat_minima").algorithms(100, 0.1)
    assert [canonical(algorithm(text)) for text in found.values()] == list(found.values())
    assert algorithm(found["FedASAM + SWA"]).lr_schedule.cycle == 5


# --- a column of a table -----------------------------------------------------------------------------------------------------------

TINY = (
    "--dataset",
    "digits",
    "--model",
    "mlp(hidden=8)",
    "--device",
    "cpu",
    "--precision",
    "float32",
    "--rounds",
    "4",
    "--eval-every",
    "2",
)


@pytest.mark.slow
def test_the_column_of_fedswa_table_2_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two parts of stage 1 as two processes would do them, then the rest; a second start trains nothing."""
    column = study("fedswa_table2")
    arguments = [str(tmp_path), *TINY, "--tune-rounds", "2", "--grid", "0.1", "0.5"]
    column.main([*arguments, "--only-stage", "1", "--only", "fedavg", "fedsam"])
    with pytest.raises(
        UserError, match="not known without scaffold, fedswa, fedmoswa; run stage 1, or name two with --tune"
    ):
        column.main([*arguments, "--only-stage", "2"])
    table = column.main([*arguments, "--draw", str(tmp_path / "curves.png")])

    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    first = {
        name.split("-")[1]: one["test"] for name, one in runs.items() if name.startswith("full") and one["lr"] == 0.1
    }
    short = sorted(first, key=lambda name: 100 * first[name] - column.published(name))[:2]
    searched = {one["algorithm"]: one for one in runs.values() if one["kind"] == "tune"}
    assert set(searched) == set(short)
    assert all("test" not in one for one in searched.values())
    assert {one["lr"] for one in runs.values() if one["kind"] == "full"} == {0.1, 0.5}
    assert len(runs) == 5 + 4 + 2
    assert table == (tmp_path / "table.md").read_text()
    assert (
        f"| `fedavg` | 0.1 | 79.6±0.2 | {100 * first['fedavg']:.1f} | {100 * first['fedavg'] - 79.6:+.1f} | 574 | 4+ |"
        in table
    )
    assert f"Rate of `{short[0]}`: 0.5, by accuracy on 10 % of the training data after 2 rounds (0.1: " in table
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    capsys.readouterr()
    assert column.main(arguments) == table
    assert "..." not in capsys.readouterr().out
    with pytest.raises(UserError, match="a study with other settings"):
        column.main([str(tmp_path), *TINY, "--tune-rounds", "3"])


def test_the_rate_is_chosen_by_validation_and_never_among_runs_that_diverged(tmp_path: Path) -> None:
    column = study("fedswa_table2")
    found = column.Study(column.arguments([str(tmp_path), "--grid", "0.03", "0.1", "0.3"]))
    scores: dict[float, float | None] = {0.03: 0.7, 0.1: 0.6}
    for lr, score in {**scores, 0.3: None}.items():
        assert column.chosen_rate(found, "fedswa") is None
        one = {
            "about": found.about,
            "kind": "tune",
            "algorithm": "fedswa",
            "lr": lr,
            "seed": 0,
            "validation": score,
        }
        (tmp_path / "numbers" / f"tune-fedswa-{lr:g}-0.json").write_text(json.dumps(one))
    assert column.chosen_rate(found, "fedswa") == 0.03


def test_the_column_is_run_as_the_protocol_says(tmp_path: Path) -> None:
    """What is run on a GPU for minutes should not end in a wrong setting."""
    column = study("fedswa_table2")
    found = column.Study(column.arguments([str(tmp_path), "--device", "cuda", "--precision", "bf16"]))
    settings = found.settings("tune", 0.3, 1)
    made = make_config(column.cell("fedmoswa").configs[0], settings)
    assert (made.model, made.data.name, made.data.partition, made.data.validation) == (
        "cnn",
        "cifar10",
        "dirichlet-reuse(alpha=0.6)",
        0.1,
    )
    assert (made.training.rounds, made.training.lr, made.evaluation.every, made.engine.precision) == (
        200,
        0.3,
        10,
        "bf16",
    )
    full = make_config(column.cell("scaffold").configs[0], found.settings("full", 0.1, 0))
    assert (full.training.rounds, full.data.validation, full.data.augmentation, full.training.weight_decay) == (
        1000,
        0.0,
        "crop-flip",
        0.001,
    )
