"""Leave one domain out, on small pictures in the layout of PACS."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import fedflat
from fedflat.data import load
from fedflat.errors import UserError
from tests.test_studies import study as load_study

DOMAINS = ("art", "photo", "sketch")
TINY = [
    "--model",
    "mlp(hidden=8)",
    "--size",
    "8",
    "--rounds",
    "4",
    "--local-steps",
    "2",
    "--batch-size",
    "4",
    "--eval-every",
    "1",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_study("pacs")


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    """Three domains of two classes that differ in brightness, ten JPEG files each."""
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "pictures" / domain / name
            folder.mkdir(parents=True)
            for number in range(5):
                pixels = np.clip(60 + 130 * label + rng.normal(0, 20, (12, 12, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return f"domains(path={tmp_path / 'pictures'})"


def test_every_fold_algorithm_and_seed(
    study: ModuleType, pictures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "out"), "--dataset", pictures, "--data-dir", str(tmp_path), "--seeds", "0", "1", *TINY]
    text = study.main(given)
    document = json.loads((tmp_path / "out" / "numbers.json").read_text())
    runs = document["runs"]
    assert len(runs) == 3 * 3 * 2 and {run["domain"] for run in runs} == set(DOMAINS)
    assert all(run["accuracy"] == pytest.approx(run["curve"][-1][1]) for run in runs), (
        "the last of four rounds is the last quarter"
    )
    assert (tmp_path / "out" / "table.md").read_text() == text
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == ["`fedavg`", "`fedsam`", "`fedmoswa`"]
    of_photo = [100 * run["accuracy"] for run in runs if run["domain"] == "photo" and run["algorithm"] == "fedavg"]
    assert text.splitlines()[2].split("|")[3].strip() == f"{np.mean(of_photo):.1f} ± {np.std(of_photo, ddof=1):.1f}"
    assert len(capsys.readouterr().out.splitlines()) == 18
    assert study.main(given) == text and not capsys.readouterr().out, "nothing is run twice"


def test_an_interrupted_study_is_resumed(study: ModuleType, pictures: str, tmp_path: Path) -> None:
    given = ["--dataset", pictures, "--data-dir", str(tmp_path), "--seeds", "0", "--algorithms", "fedavg", *TINY]
    whole = study.main([str(tmp_path / "whole"), *given])
    document = json.loads((tmp_path / "whole" / "numbers.json").read_text())
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "numbers.json").write_text(json.dumps(document | {"runs": document["runs"][:1]}))
    assert study.main([str(tmp_path / "cut"), *given]) == whole
    with pytest.raises(UserError, match="other settings"):
        study.main([str(tmp_path / "cut"), *given, "--lr", "0.1"])


def test_an_unknown_domain_is_rejected(study: ModuleType, pictures: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'sketches'.*did you mean.*sketch"):
        study.main(
            [str(tmp_path / "out"), "--dataset", pictures, "--data-dir", str(tmp_path), "--domains", "sketches", *TINY]
        )


def test_domains_as_clients_and_by_domain(pictures: str, tmp_path: Path) -> None:
    """If no domain is held out, each domain is a client, and the evaluation has an entry per domain."""
    settings = {
        "dataset": f"{pictures[:-1]},size=8)",
        "partition": "natural",
        "clients_per_round": 3,
        "rounds": 2,
        "local_steps": 2,
        "batch_size": 4,
    }
    result = fedflat.run("fedavg", data_dir=str(tmp_path), model="mlp(hidden=8)", workers=1, device="cpu", **settings)
    found = result.evaluate(on=("domains", "clients"))
    assert set(found["domains"]["each"]) == set(found["clients"]["each"]) == set(DOMAINS)
    assert found["clients"]["count"] == 3 and {scores["examples"] for scores in found["clients"]["each"].values()} == {
        8
    }


def test_no_client_trains_on_the_held_out_domain(study: ModuleType, pictures: str, tmp_path: Path) -> None:
    options = study.parse_arguments([str(tmp_path), "--dataset", pictures, "--size", "8"])
    data = load(study.dataset_without(options, "photo"), tmp_path)
    number = data.group_names.index("photo")
    assert data.train.groups is not None and data.test.groups is not None
    assert not torch.any(data.train.groups == number) and bool((data.test.groups == number).all())
