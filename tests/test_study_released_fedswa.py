"""The driver of the FedSWA paper's released code, on a script with the same imports and calls."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedflat.data import Dataset, Examples
from fedflat.errors import UserError
from fedflat.papers.ledger import Ledger
from fedflat.papers.results import read_results

STUDIES = Path(__file__).parents[1] / "studies"
SCRIPT = """
import argparse
import matplotlib.pyplot as plt
import numpy as np
import ray
import torch
from datasets import load_dataset
from peft import LoraConfig
from tensorboardX import SummaryWriter
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import SubsetRandomSampler
from torchvision import datasets, transforms
from torchvision.models import vgg11

parser = argparse.ArgumentParser()
parser.add_argument("--alg")
parser.add_argument("--E", type=int)
args = parser.parse_args()

class Net(VisionTransformer):
    pass

plt.figure().gca(projection="3d").scatter(1, 2)
transform = transforms.Compose([
    transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
    transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
])
train = datasets.cifar.CIFAR100("./data", train=True, download=True, transform=transform)
test = datasets.CIFAR100("./data", train=False, transform=transform)

@ray.remote(num_gpus=1)
class Worker(object):
    def __init__(self, indices):
        self.indices = indices
    def update(self, weights, factor=1):
        loader = torch.utils.data.DataLoader(train, batch_size=4, sampler=SubsetRandomSampler(self.indices))
        assert len(loader) == 2
        shapes = [tuple(images.shape) for images, labels in loader]
        assert shapes == [(4, 3, 32, 32), (2, 3, 32, 32)], shapes
        weights["w"] += factor
        return weights

if __name__ == "__main__":
    labels = [train[i][1] for i in range(len(train))]
    assert labels == [0, 1, 2, 3, 4, 5]
    ray.init(num_gpus=1)
    worker = Worker.remote(range(6))
    weights = {"w": torch.zeros(1)}
    writer = SummaryWriter(comment=args.alg)
    for epoch in range(0, 11, 10):
        new = ray.get([worker.update.remote(weights, factor=2)])[0]
        assert weights["w"] == 0 and new["w"] == 2
        loader = torch.utils.data.DataLoader(torch.utils.data.Subset(test, range(3)), batch_size=2, num_workers=4)
        seen = torch.cat([labels for images, labels in loader]).tolist()
        assert seen == [5, 4, 3]
        writer.add_scalar("accuracy", 10.0 + epoch, epoch * args.E)
        writer.add_scalar("loss median", 1.0, epoch * args.E)
    open("./log/done", "w").close()
    ray.shutdown()
"""


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    sys.path.insert(0, str(STUDIES))
    try:
        return importlib.import_module("released_fedswa")
    finally:
        sys.path.remove(str(STUDIES))


def test_runs_a_script_with_stand_ins(driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.zeros(6, 3, 32, 32, dtype=torch.uint8)
    numbers = torch.arange(6)
    names = tuple("abcdef")
    dataset = Dataset(
        "cifar100", Examples(images, numbers), Examples(images, numbers.flip(0)), names, (0.5,) * 3, (0.5,) * 3
    )
    monkeypatch.setattr(driver, "load", lambda name, data_dir: dataset)
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    modules, loader, directory = set(sys.modules), torch.utils.data.DataLoader, Path.cwd()
    out = tmp_path / "out" / "run.json"
    stored = ["--cell", "fedswa/table2/fedswa/cifar100-lenet-5-accuracy", "--results", str(tmp_path / "results")]
    words = [str(script), "--data-dir", str(tmp_path), "--out", str(out), *stored, "--", "--alg", "FedSWA", "--E", "5"]
    assert driver.main(words).startswith("FedSWA: 20.0 % after 11 rounds")
    result = json.loads(out.read_text())
    assert result["curve"] == [[1, 10.0], [11, 20.0]]
    assert result["finished"]
    assert result["arguments"] == "--alg FedSWA --E 5"
    (entry,) = Ledger(read_results(tmp_path / "results")).entries
    assert (entry.released, entry.outcome.verdict) == ((20.0,), "not run")
    assert entry.notes == ("released: 11 of 1,000 rounds",)
    assert "ray" not in set(sys.modules) - modules
    assert torch.utils.data.DataLoader is loader
    assert Path.cwd() == directory


def test_mistakes_are_reported_before_the_run(driver: ModuleType, tmp_path: Path) -> None:
    words = ["main.py", "--data-dir", str(tmp_path), "--out", str(tmp_path / "run.json"), "--", "--alg", "SCAFFOLD"]
    with pytest.raises(UserError, match="SCAFFOLD needs separate processes"):
        driver.main(words)
    with pytest.raises(UserError, match="give --alg with a value"):
        driver.main(words[:-1])
    words[-1] = "FedSWA"
    with pytest.raises(UserError, match=r"no script .*main\.py"):
        driver.main(words)
    (tmp_path / "main.py").touch()
    with pytest.raises(UserError, match="fedswa/table2 has no cell 'fedswa/acuracy'"):
        driver.main(["--cell", "fedswa/table2/fedswa/acuracy", str(tmp_path / "main.py"), *words[1:]])


def test_crop_cuts_a_window_of_the_padded_image(driver: ModuleType) -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (200, 3, 6, 6), dtype=torch.uint8)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    corners = set()
    for image, crop in zip(padded, driver.RandomCrop(6, padding=2)(images), strict=True):
        places = [(i, j) for i in range(5) for j in range(5) if torch.equal(image[:, i : i + 6, j : j + 6], crop)]
        assert len(places) == 1
        corners.add(places[0])
    assert len(corners) == 25


def test_flip_mirrors_half_of_the_images(driver: ModuleType) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (1000, 3, 4, 4), dtype=torch.uint8)
    flipped = driver.RandomHorizontalFlip()(images)
    mirrored = [torch.equal(new, old.flip(-1)) for new, old in zip(flipped, images, strict=True)]
    assert all(torch.equal(new, old) for new, old, m in zip(flipped, images, mirrored, strict=True) if not m)
    assert 400 < sum(mirrored) < 600
