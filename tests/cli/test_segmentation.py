"""Segmentation from the command line, on small files in IDDA's layout: output of a run, mIoU per class and domain."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .conftest import SMALL, call

DOMAINS = ("T01_CN_A", "T02_CS_B", "T07_CN_A")
IDS = (7, 8, 1, 10)  # road, sidewalk, building, vehicle


@pytest.fixture(scope="module")
def idda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write ten images in each of two seen domains and an unseen one; the brightness of a quarter is its class id."""
    folder = tmp_path_factory.mktemp("idda")
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        for index in range(10):
            numbers = np.kron(rng.choice(IDS, (2, 2)), np.ones((16, 24), int)).astype(np.uint8)
            pixels = np.repeat((25 * numbers)[..., None], 3, -1).astype(np.uint8)
            for kind, suffix, array in (("RGB", "jpg", pixels), ("Semantic", "png", numbers)):
                path = folder / f"IDDAsmall/{domain}/{kind}/{index}_{domain}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)
    return folder


FLAGS = (
    *(
        "--dataset",
        "idda(size=32)",
        "--model",
        "bisenetv2(width=0.1)",
        "--partition",
        "natural",
        "--clients-per-round",
        "2",
        "--batch-size",
        "4",
    ),
    *("--augmentation", "scale-crop(high=2.0)+flip", "--set", "training.momentum=0.9", "--lr", "0.05"),
)


@pytest.fixture(scope="module")
def silo(idda: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of SiLoBN with ASAM and SWA."""
    folder = tmp_path_factory.mktemp("silo") / "run"
    text = "fedasam+cyclic(low=0.0005,length=2,start=0.3)+swa(start=0.3)"
    result = call("run", text, *SMALL, *FLAGS, "--data-dir", idda, "--set", "training.statistics=own", "--out", folder)
    assert result.exit_code == 0 and "miou" in result.stdout
    return folder


def test_iou_per_class_and_domain(silo: Path) -> None:
    shown = call("evaluate", silo, "--on", "test,classes,domains,clients").stdout
    for word in (
        "miou %",
        "seen domains",
        "2 domains together, 4 examples",
        "unseen domains",
        "1 domain together, 10 examples",
    ):
        assert word in shown
    for word in ("sidewalk", "building", " iou %", *DOMAINS):
        assert word in shown
    document = json.loads(
        call("evaluate", silo, "--average", "swa(start=0.3)", "--on", "classes,domains", "--json").stdout
    )
    assert document["metric"] == "miou" and set(document["on"]["classes"]["each"]) == {
        "road",
        "sidewalk",
        "building",
        "car",
    }
    assert (
        set(document["on"]["domains"]["each"]) == set(DOMAINS) and document["on"]["domains"]["unseen"]["examples"] == 10
    )


def test_a_segmentation_dataset_is_described(idda: Path) -> None:
    shown = call("data", "describe", "idda(size=32,unseen=none)", "--data-dir", idda, "--partition", "natural").stdout
    assert (
        "24 for training, 6 for testing" in shown and "3x32x48 (segmentation)" in shown and "natural clients" in shown
    )
    told = call(
        "run", "fedavg", *SMALL, *FLAGS, "--data-dir", idda, "--partition", "dirichlet(alpha=0.1)", "--clients", "2"
    )
    assert told.exit_code != 0 and "needs one label per example" in told.output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--augmentation", "mixup"), "crop-flip, scale-crop, flip"),
        (("--model", "lenet5"), "(bisenetv2)"),
        (("--dataset", "idda(unseen=snow)"), "'snow'"),
    ],
)
def test_user_errors_are_one_line(idda: Path, flags: tuple[str, ...], sentence: str) -> None:
    result = call("run", "fedavg", *SMALL, *FLAGS, *flags, "--data-dir", idda)
    assert result.exit_code != 0 and sentence in " ".join(result.output.split()) and "Traceback" not in result.output
