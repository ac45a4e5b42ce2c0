"""fedflat flatness landscape, plane and path: files, tables, JSON and user errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from shutil import copytree

import pytest
import torch
from torch import nn

from fedflat.cli.flatness import landscape as flatness_landscape
from fedflat.cli.flatness.models import ModelFlags, open_models, short_names
from fedflat.errors import UserError
from fedflat.experiment.analysis.run_model import open_model_or_client
from fedflat.flatness import checks

from .conftest import Fedflat

FAST = ("--points", "3", "--examples", "40", "--device", "cpu")


def runs_of(compared: Path) -> list[Path]:
    return sorted(path.parent for path in compared.rglob("config.yaml"))


def test_several_runs_are_drawn_on_one_scale(
    fedflat: Fedflat, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (run for run in runs_of(compared) if run.name == "seed-0")
    monkeypatch.setattr(checks, "MAX_LOSS_RATIO", 1.0)
    result = fedflat("flatness", "landscape", one, other, *FAST, "--out", tmp_path / "drawn")
    assert result.exit_code == 0
    assert "fedavg" in result.stdout
    assert "fedsam" in result.stdout
    assert "maximum over the grid, up to 1 filter norm along each direction" in " ".join(result.stdout.split())
    assert "40 train examples, 40 test examples" in result.stdout and "a factor of" in result.stdout
    files = {path.name for path in (tmp_path / "drawn").iterdir()}
    drawn = {f"{name}.{ending}" for name in ("contours", "surfaces") for ending in ("png", "pdf")}
    assert files == {"landscape.json", "settings.json", "landscape.html", *drawn}


def test_one_dimension_as_json(fedflat: Fedflat, finished: Path, tmp_path: Path) -> None:
    result = fedflat(
        "flatness", "landscape", finished, *FAST, "--dimensions", "1", "--out", tmp_path / "drawn", "--json"
    )
    found = json.loads(result.stdout)
    (model,) = found["models"].values()
    assert model["made"]["radius"] == 1.0
    assert model["not_finite"]["train_loss"] == 0
    assert Path(found["files"]["lines (png)"]).exists()
    saved = json.loads(Path(found["files"]["numbers"]).read_text())["landscapes"]
    assert next(iter(saved.values()))["marks"][0]["values"]["train_loss"] == model["at_model"]["train_loss"]


def test_landscapes_that_mislead_are_reported(fedflat: Fedflat, finished: Path, tmp_path: Path) -> None:
    def warnings_of(model: Path | str, *flags: str) -> str:
        small = ("--points", "3", "--dimensions", "1", "--device", "cpu", "--quiet", "--out", str(tmp_path / "drawn"))
        result = fedflat("flatness", "landscape", model, *small, *flags)
        return " ".join(result.stderr.split())

    assert warnings_of(finished) == ""
    assert "training loss is over 1,000 times that of the model" in warnings_of(finished, "--radius", "1e4")
    run = shutil.copytree(finished, tmp_path / "copy")
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'"loss": ?[\d.]+', '"loss": 12.5', metrics))
    assert "but the run recorded 12.5; check that its dataset" in warnings_of(run)
    assert warnings_of(run, "--examples", "40") == ""  # another loss is expected
    Path("net.py").write_text("from torch import nn\nmake = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n")
    bias = torch.tensor([3e38] + 9 * [-3e38])  # finite, but not the loss
    torch.save({"1.weight": torch.zeros(10, 64), "1.bias": bias}, "diverged.pt")
    diverged = warnings_of("diverged.pt", "--module", "net.py:make", "--dataset", "digits")
    assert "the loss of the model itself is not finite (training loss, test loss)" in diverged


def test_a_plane_through_the_models_of_one_run(fedflat: Fedflat, finished: Path) -> None:
    result = fedflat("flatness", "plane", finished, f"{finished}:server", f"{finished}:client3", *FAST)
    assert result.exit_code == 0
    assert "The plane through wima, server, client3" in result.stdout
    assert (finished / "flatness" / "plane" / "plane.png").exists()


def test_a_path_and_its_barrier_as_json(fedflat: Fedflat, finished: Path, tmp_path: Path) -> None:
    result = fedflat("flatness", "path", finished, f"{finished}:server", *FAST, "--json", "--out", tmp_path / "drawn")
    found = json.loads(result.stdout)
    assert found["distance"] > 0
    assert found["barriers"]["train_loss"]["height"] >= 0
    assert (tmp_path / "drawn" / "path.pdf").exists()
    shown = fedflat("flatness", "path", finished, f"{finished}:server", *FAST, "--quiet").stdout
    heights = {name: found["barriers"][name]["height"] for name in ("train_loss", "test_error")}
    assert heights["train_loss"] == 0 < heights["test_error"]
    assert re.search(r"^training loss .* no barrier +\S$", shown, re.MULTILINE), shown
    assert re.search(rf"^test error %.* {100 * heights['test_error']:.2f} ", shown, re.MULTILINE), shown
    assert "barrier: maximum over 3 points, a lower bound" in shown and "BatchNorm" not in shown


def test_the_statistics_of_batchnorm_are_stated(fedflat: Fedflat, tmp_path: Path) -> None:
    Path("net.py").write_text(
        "from torch import nn\n"
        "def make_model(): return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))\n"
    )
    for file in ("a.pt", "b.pt"):
        network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
        torch.save(network.state_dict(), file)
    flags = ("--module", "net.py:make_model", "--dataset", "digits", *FAST, "--out", tmp_path / "drawn")
    shown = fedflat("flatness", "path", "a.pt", "b.pt", *flags).stdout
    assert re.search("BatchNorm statistics interpolated$", shown, re.MULTILINE), shown
    shown = fedflat("flatness", "path", "a.pt", "b.pt", *flags, "--statistics", "estimated").stdout
    assert "BatchNorm statistics estimated at every point, also at the models" in " ".join(shown.split())


def test_a_curve_between_aligned_models(fedflat: Fedflat, finished: Path, tmp_path: Path) -> None:
    models = (f"{finished}:server", f"{finished}:client3")
    flags = (*FAST, "--quiet", "--out", tmp_path, "--curve", "--curve-steps", "5", "--align")
    result = fedflat("flatness", "path", *models, *flags)
    assert result.exit_code == 0, result.stderr
    assert "From server to client3 on a trained curve after alignment, distance" in result.stdout
    (landscape,) = json.loads((tmp_path / "landscape.json").read_text())["landscapes"].values()
    made = landscape["made"]
    assert made["curved"] and made["aligned"] and made["curve_steps"] == 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("landscape", "RUN", "--radius", "0"), "radius=0"),
        (("landscape", "RUN", "--one-dimensional", "kept"), "expected one of scaled, zero"),
        (("landscape", "RUN", "--value", "loss"), "'loss'"),
        (("landscape", "RUN", "RUN"), "is listed twice"),
        (("landscape", "RUN:vima"), "'vima'; did you mean wima?"),
        (("plane", "RUN", "RUN:server"), "got 2"),
        (("plane", "RUN", "RUN:server", "RUN:client999"), "client 999 ... 50 clients"),
        (("path", "RUN", "RUN:client3@1"), "server ... round 1 ... --save-every"),
        (("path", "RUN", "RUN:server", "--statistics", "mean"), "expected one of estimated, interpolated"),
    ],
)
def test_user_errors_are_one_line(fedflat: Fedflat, finished: Path, arguments: tuple[str, ...], sentence: str) -> None:
    words = [str(word).replace("RUN", str(finished)) for word in arguments]
    result = fedflat("flatness", *words, *FAST)
    assert result.exit_code == 2
    assert all(part in result.stderr for part in sentence.split(" ... ")), result.stderr
    assert result.stderr.startswith("fedflat: ")
    assert result.stderr.count("\n") == 1


def test_short_names_are_distinct(finished: Path, compared: Path, tmp_path: Path) -> None:
    def names(*texts: object) -> list[str]:
        return short_names([open_model_or_client(str(text), device="cpu") for text in texts])

    one, two, *others = runs_of(compared)
    with pytest.raises(UserError, match=r"pass one of them, or several: \S+/runs/\*/seed-\*$"):
        open_models([str(compared)], True, ModelFlags("cpu", None, None, None, None))
    assert names(one, next(run for run in others if run.parent != one.parent)) == ["fedavg", "fedsam"]
    assert names(one, two) == ["fedavg (seed 0)", "fedavg (seed 1)"]
    assert names(finished, f"{finished}:server") == ["wima", "server"]
    assert names(finished, one, f"{one}:client2") == ["fedmoswa+wima", "fedavg", "fedavg (client2)"]
    assert names(f"{finished}:server", one) == ["fedmoswa", "fedavg"]  # as in comparisons
    copies = [Path(copytree(one, tmp_path / alpha / "seed-0")) for alpha in ("alpha-0", "alpha-1k")]
    assert names(*copies) == ["alpha-0/seed-0:server", "alpha-1k/seed-0:server"]


def test_progress_lines_when_piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 2.0, 10.0, 11.0, 40.0])
    monkeypatch.setattr(flatness_landscape.time, "monotonic", lambda: next(clock))
    with flatness_landscape._progress(silent=False) as progress:
        for done in (5, 20, 22, 80):
            progress(done, 80)
    assert capsys.readouterr().err == "evaluated 20 of 80 points, about 30.0 s left\n"
    with flatness_landscape._progress(silent=True) as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["landscape", "plane", "path"])
def test_help_has_an_example(fedflat: Fedflat, command: str) -> None:
    assert f"fedflat flatness {command} runs/" in fedflat("flatness", command, "--help").stdout
