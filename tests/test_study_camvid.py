"""The CamVid study on a few small frames: it trains what is missing and draws from saved numbers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[1] / "studies" / "camvid.py"
TINY = {
    "device": "cpu",
    "workers": "1",
    "rounds": "2",
    "width": "0.1",
    "clients": "2",
    "clients-per-round": "2",
    "local-epochs": "1",
    "batch-size": "2",
    "eval-batch-size": "6",
}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("camvid_study", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """Frames of 36 x 48 pixels in CamVid's layout, each with all twelve labels."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 6)):
        for index in range(count):
            mask = np.kron(rng.permutation(12).reshape(3, 4), np.ones((12, 12), int)).astype(np.uint8)
            for kind, array in (("", np.repeat((20 * mask)[..., None], 3, -1)), ("annot", mask)):
                path = tmp_path / f"data/CamVid/{part}{kind}/{index:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array.astype(np.uint8)).save(path)
    return tmp_path


def test_trains_missing_runs_and_draws_from_saved_numbers(
    study: ModuleType, frames: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = frames / "out"
    words = [
        "--out",
        str(out),
        "--data-dir",
        str(frames / "data"),
        *(f"--{name}={value}" for name, value in TINY.items()),
    ]
    study.main([*words, "--only", "FedAvg"])
    first = json.loads((out / "numbers.json").read_text())["runs"]
    assert list(first) == ["FedAvg"]
    assert first["FedAvg"]["status"] == "finished"

    study.main(words)
    runs = json.loads((out / "numbers.json").read_text())["runs"]
    assert list(runs) == ["FedAvg", "FedASAM", "FedAvg + SWA", "SiLoBN"]
    assert runs["FedAvg"] == first["FedAvg"], "a finished run was repeated"
    assert runs["FedAvg + SWA"]["model"].startswith("swa(")
    assert len(runs["SiLoBN"]["classes"]) == 11
    for run in runs.values():
        assert run["test"]["miou"] == pytest.approx(np.mean(list(run["classes"].values())))
    table = (out / "table.md").read_text().splitlines()
    assert len(table) == 6
    assert table[0].count("|") == 14
    assert table[3].startswith("| FedASAM | **")
    truth, predicted = np.load(out / "truth.npy"), np.load(out / "silobn.npy")
    assert truth.shape == predicted.shape == (4, 36, 48)
    assert predicted.max() < 11
    assert "FedASAM        mIoU" in capsys.readouterr().out

    figure, page = frames / "docs/camvid.png", frames / "docs/page.md"
    page.parent.mkdir()
    page.write_text(f"# Page\n\n{study.BEGIN}\nold\n{study.END}\nrest\n")
    study.main(["--out", str(out), "--draw", str(figure), "--page", str(page)])
    text = page.read_text()
    assert "old" not in text
    assert "| FedASAM | **" in text
    assert "(camvid.png)" in text
    assert text.endswith(f"{study.END}\nrest\n")
    assert Image.open(figure).size[0] > 1000


def test_the_documentation_has_a_place_for_the_table(study: ModuleType) -> None:
    text = (SCRIPT.parents[1] / "docs/segmentation.md").read_text()
    assert text.index(study.BEGIN) < text.index(study.END)
