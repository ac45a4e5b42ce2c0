"""Datasets of the Hugging Face hub."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedflat.data import MappedTensor, load
from fedflat.errors import UserError

from .test_own_data import EXPECTED, IMAGES, LABELS, Pictures


def feature(kind: str, **attributes: object) -> object:
    return type(kind, (), attributes)()


class Partition(list[dict[str, Any]]):
    features: Any


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for flwr_datasets with one dataset; counts how often it is asked."""
    calls = []

    class FederatedDataset:
        def __init__(
            self, *, dataset: str, subset: str | None, partitioners: dict[str, int], shuffle: bool, revision: str | None
        ) -> None:
            assert revision == "c0ffee", "the commit that HfApi names is loaded"
            calls.append((dataset, subset, shuffle))
            self.name = dataset

        def load_split(self, name: str) -> Partition:
            if self.name not in ("us/pets", "us/untested"):
                raise FileNotFoundError("no such\nrepository")
            if name not in ("train", "test") or (name, self.name) == ("test", "us/untested"):
                raise ValueError(f"The given partition: '{name}' is not present")
            rows = range(15) if name == "train" else range(15, 20)
            partition = Partition(
                {"picture": Pictures()[row][0], "kind": int(LABELS[row]), "owner": f"o{row % 3}", "text": "a"}
                for row in rows
            )
            for row, example in zip(rows, partition, strict=True):
                example["mixed"] = example["picture"] if row else example["picture"].convert("L")
            names = feature("ClassLabel", names=["cat", "dog"])
            partition.features = {
                "text": feature("Value"),
                "picture": feature("Image"),
                "kind": names,
                "owner": feature("Value"),
                "mixed": feature("Image"),
            }
            return partition

    module = ModuleType("flwr_datasets")
    module.FederatedDataset = FederatedDataset  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("flwr_datasets", None)
    monkeypatch.setitem(sys.modules, "flwr_datasets", module)
    api = SimpleNamespace(dataset_info=lambda path, **options: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: api))
    return SimpleNamespace(calls=calls)


def test_a_hub_dataset_is_downloaded_once(hub: SimpleNamespace, tmp_path: Path) -> None:
    for _ in range(2):
        dataset = load("hub(path=us/pets,size=4)", tmp_path)
        assert (
            dataset.content == EXPECTED
            and dataset.classes == ("cat", "dog")
            and isinstance(dataset.train.inputs, MappedTensor)
        )
    assert hub.calls == [("us/pets", None, False)], "the second time nobody is asked"
    assert '"revision": "c0ffee"' in next(tmp_path.rglob("about.json")).read_text()
    grouped = load("hub(path=us/pets,size=4,group=owner,subset=all)", tmp_path)
    assert grouped.group_names == ("o0", "o1", "o2") and hub.calls[1:] == [("us/pets", "all", False)]


def test_a_hub_dataset_without_a_test_split(hub: SimpleNamespace, tmp_path: Path) -> None:
    for text in ("hub(path=us/pets,size=4,test=none)", "hub(path=us/untested,size=4)"):
        dataset = load(text, tmp_path)
        assert len(dataset.train) == 13 and torch.equal(dataset.test.inputs, torch.from_numpy(IMAGES[[8, 9]]))


def test_grey_pictures_among_coloured_ones_have_three_channels(hub: SimpleNamespace, tmp_path: Path) -> None:
    dataset = load("hub(path=us/pets,size=4,inputs=mixed)", str(tmp_path))
    grey = Image.fromarray(IMAGES[0].transpose(1, 2, 0)).convert("L")
    assert torch.equal(dataset.train.inputs[0], torch.from_numpy(np.array(grey)).expand(3, 4, 4))
    assert torch.equal(dataset.train.inputs[1], torch.from_numpy(IMAGES[1]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hub", r"hub\(path="),
        ("hub(path=us/none)", r"us/none .*\(no such repository\)"),
        (
            "hub(path=us/pets,inputs=image)",
            "us/pets has no column image for inputs=; its columns are text, picture, kind, owner, mixed",
        ),
        ("hub(path=us/pets,group=user)", "has no column user for group="),
        ("hub(path=us/pets,inputs=text)", "item 0 of the train split of us/pets is text"),
        ("hub(path=us/pets,test=validation)", "us/pets .*split validation .*test=none"),
        ("hub(path=us/pets,train=all)", "us/pets .*partition: 'all' is not present"),
    ],
)
def test_invalid_hub_requests_are_rejected(hub: SimpleNamespace, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load(text, tmp_path)
    assert "\n" not in str(raised.value) and not list(
        (tmp_path / "decoded").glob("*") if (tmp_path / "decoded").exists() else []
    )


def test_the_hub_without_flwr_datasets_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"flwr-datasets.*pip install 'fedflat\[hub\]'"):
        load("hub(path=ylecun/mnist)", tmp_path)


def test_the_hub_through_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From parquet files on this machine, which the library reads as it would those of the hub."""
    pytest.importorskip("flwr_datasets")
    pytest.importorskip("pyarrow")
    import pandas

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "pets").mkdir()
    for part, rows in (("train", range(15)), ("test", range(15, 20))):
        table = pandas.DataFrame(
            {"values": [IMAGES[row].ravel()[:5].astype(float) for row in rows], "kind": LABELS[rows]}
        )
        table.to_parquet(tmp_path / "pets" / f"{part}.parquet")
        for row in rows:
            folder = tmp_path / "pictures" / part / Pictures.classes[LABELS[row]]
            folder.mkdir(parents=True, exist_ok=True)
            Pictures()[row][0].save(folder / f"{row:02d}.png")
    values = load(f"hub(path={tmp_path / 'pets'},inputs=values,target=kind)", tmp_path)
    assert values.kind == "vector" and np.array_equal(values.test.inputs.numpy(), IMAGES[15:].reshape(5, -1)[:, :5])
    pictures = load(f"hub(path={tmp_path / 'pictures'},size=4)", tmp_path)
    assert pictures.classes == ("cat", "dog") and len(pictures.train) == 15
    assert torch.equal(pictures.test.inputs[pictures.test.targets == 0], torch.from_numpy(IMAGES[[16, 18]]))
