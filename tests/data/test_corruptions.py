"""CIFAR-10-C and CIFAR-100-C from small files in the published layout."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedflat.data import (
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    SEVERITIES,
    MappedTensor,
    load,
    load_corruptions,
    normalise,
    registry,
    verify,
)
from fedflat.data.sources.corruptions import CIFAR10_C, CIFAR100_C
from fedflat.errors import UserError

EACH = 4


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CIFAR-10-C with 4 images per severity."""
    rng = np.random.default_rng(0)
    written = {
        name: rng.integers(0, 256, (5 * EACH, 32, 32, 3), dtype=np.uint8) for name in CORRUPTIONS + EXTRA_CORRUPTIONS
    }
    written["labels"] = np.tile(rng.integers(0, 10, EACH, dtype=np.uint8), 5)
    (tmp_path / "CIFAR-10-C").mkdir()
    for name, array in written.items():
        np.save(tmp_path / "CIFAR-10-C" / f"{name}.npy", array)
    source = dataclasses.replace(CIFAR10_C, per_severity=EACH, file_md5s={})
    monkeypatch.setitem(registry.DATASETS._components, "cifar10_c", source)
    return SimpleNamespace(source=source, folder=tmp_path, written=written)


@pytest.mark.parametrize("name", ["cifar10", "cifar10_c"])
def test_every_corruption_and_severity_has_its_images(small: SimpleNamespace, name: str) -> None:
    found = load_corruptions(name, small.folder)
    assert tuple(found) == CORRUPTIONS + EXTRA_CORRUPTIONS and len(found) == 19
    for corruption, by_severity in found.items():
        assert tuple(by_severity) == SEVERITIES
        for severity, examples in by_severity.items():
            rows = slice((severity - 1) * EACH, severity * EACH)
            assert np.array_equal(examples.inputs.numpy(), small.written[corruption][rows].transpose(0, 3, 1, 2))
            assert (
                examples.targets.tolist() == small.written["labels"][rows].tolist()
                and examples.targets.dtype == torch.int64
            )


def test_images_are_mapped_and_can_be_used_as_any_others(small: SimpleNamespace) -> None:
    fog = load_corruptions("cifar10", small.folder)["fog"][3]
    assert isinstance(fog.inputs, MappedTensor) and fog.inputs.shape == (EACH, 3, 32, 32)
    batch = fog.take(np.array([2, 0]))
    assert normalise(batch.inputs, (0.5,) * 3, (0.5,) * 3).shape == (2, 3, 32, 32)


def test_corruptions_are_for_evaluation_only(small: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"cifar10_c .*cifar10 .*load_corruptions\('cifar10'\)"):
        load("cifar10_c", small.folder)
    with pytest.raises(UserError, match=r"'mnist'.*cifar10"):
        load_corruptions("mnist", small.folder)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("fog", np.zeros((5 * EACH - 1, 32, 32, 3), np.uint8), r"fog\.npy .*uint8 .*\(19, 32, 32, 3\)"),
        ("fog", np.zeros((5 * EACH, 32, 32, 3), np.float32), r"fog\.npy .*float32"),
        ("labels", np.full(5 * EACH, 10, np.uint8), r"labels\.npy .*label 10.* 0 to 9"),
        ("labels", np.zeros(3, np.uint8), r"labels\.npy .*\(3,\)"),
    ],
)
def test_invalid_arrays_are_rejected(small: SimpleNamespace, name: str, array: np.ndarray, message: str) -> None:
    np.save(small.folder / "CIFAR-10-C" / f"{name}.npy", array)
    with pytest.raises(UserError, match=message):
        load_corruptions("cifar10", small.folder)


def test_verifying_compares_with_the_published_checksums(
    small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [report.as_published for report in verify("cifar10_c", small.folder)] == [None] * 20
    md5s = {file: hashlib.md5((small.folder / file).read_bytes()).hexdigest() for file in small.source.files}
    monkeypatch.setitem(registry.DATASETS._components, "cifar10_c", dataclasses.replace(small.source, file_md5s=md5s))
    assert [report.as_published for report in verify("cifar10_c", small.folder)] == [True] * 20
    changed = small.written["snow"].copy()
    changed[3, 1, 4, 1] ^= 1
    np.save(small.folder / "CIFAR-10-C/snow.npy", changed)
    with pytest.raises(UserError, match=r"snow\.npy .*md5 \w{32}.*\w{32}.*data get cifar10_c"):
        verify("cifar10_c", small.folder)


def test_a_missing_file_is_named_with_its_address(small: SimpleNamespace) -> None:
    (small.folder / "CIFAR-10-C/frost.npy").unlink()
    with pytest.raises(UserError) as raised:
        load_corruptions("cifar10", small.folder, download=False)
    for part in ("CIFAR-10-C/frost.npy", "https://zenodo.org/records/2535967/files/", "fedflat data get cifar10_c"):
        assert part in str(raised.value)


def test_both_corruption_datasets_have_the_published_files_and_checksums() -> None:
    for source, record in ((CIFAR10_C, "2535967/files/CIFAR-10-C.tar"), (CIFAR100_C, "3555552/files/CIFAR-100-C.tar")):
        assert source.downloads[0].url.endswith(record) and source.downloads[0].is_archive
        assert len(source.files) == len(source.file_md5s) == len(set(source.file_md5s.values())) == 20
    # Two of the publisher's, to see that names and checksums are in step.
    assert CIFAR10_C.file_md5s["CIFAR-10-C/labels.npy"] == "c439b113295ed5254878798ffe28fd54"
    assert CIFAR100_C.file_md5s["CIFAR-100-C/zoom_blur.npy"] == "0204613400c034a81c4830d5df81cb82"
