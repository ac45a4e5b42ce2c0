"""The study on CamVid, on a few small frames: numbers that grow run by run, a table, and a picture from what was saved."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[1] / "studies" / "camvid.py"


@pytest.fixture
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("camvid_study", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 6)):
        for index in range(count):
            mask = np.kron(rng.permutation(12).reshape(3, 4), np.ones((12, 12), int)).astype(np.uint8)
            for kind, array in (("", np.repeat((20 * mask)[..., None], 3, -1)), ("annot", mask)):
                path = tmp_path / f"data/CamVid/{part}{kind}/{index:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array.astype(np.uint8)).save(path)
    return tmp_path


def test_it_runs_what_is_missing_and_draws_what_was_saved(
    study: ModuleType, frames: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = frames / "out", frames / "docs/camvid.png"
    flags = [
        "--out",
        str(out),
        "--data-dir",
        str(frames / "data"),
        "--device",
        "cpu",
        "--workers",
        "1",
        "--rounds",
        "4",
        "--width",
        "0.1",
    ]
    flags += [
        "--clients",
        "2",
        "--clients-per-round",
        "2",
        "--local-epochs",
        "1",
        "--batch-size",
        "2",
        "--evaluation-batch",
        "6",
    ]
    study.main([*flags, "--only", "FedAvg"])
    first = json.loads((out / "numbers.json").read_text())
    assert list(first["runs"]) == ["FedAvg"] and first["runs"]["FedAvg"]["status"] == "finished"
    study.main(flags)
    numbers = json.loads((out / "numbers.json").read_text())
    assert list(numbers["runs"]) == ["FedAvg", "FedASAM", "FedAvg + SWA", "SiLoBN"]
    assert numbers["runs"]["FedAvg"] == first["runs"]["FedAvg"], "what was there is not run again"
    assert (
        numbers["runs"]["FedAvg + SWA"]["model"].startswith("swa(") and len(numbers["runs"]["SiLoBN"]["classes"]) == 11
    )
    for one in numbers["runs"].values():
        assert one["test"]["miou"] == pytest.approx(np.mean(list(one["classes"].values())))
    table = (out / "table.md").read_text().splitlines()
    assert len(table) == 6 and table[0].count("|") == 14 and table[3].startswith("| FedASAM | **")
    truth, seen = np.load(out / "truth.npy"), np.load(out / "silobn.npy")
    assert truth.shape == seen.shape == (4, 36, 48) and seen.max() < 11
    page = frames / "docs/page.md"
    page.parent.mkdir()
    page.write_text(f"# Page\n\n{study.BEGIN}\nold\n{study.END}\nrest\n")
    study.main(["--out", str(out), "--draw", str(picture), "--page", str(page)])
    text = page.read_text()
    assert (
        "old" not in text
        and "| FedASAM | **" in text
        and "(camvid.png)" in text
        and text.endswith(f"{study.END}\nrest\n")
    )
    assert study.BEGIN in (SCRIPT.parents[1] / "docs/segmentation.md").read_text() and study.END in text
    assert Image.open(picture).size[0] > 1000
    assert "FedASAM        mIoU" in capsys.readouterr().out
