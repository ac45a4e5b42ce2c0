"""PACS, Office-Home and a user's own domains, small but in the original layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedflat.data import Dataset, describe, load, make_partition, registry, verify
from fedflat.data.batches import channel_statistics
from fedflat.data.sources.domains import OFFICE_HOME, PACS
from fedflat.errors import UserError

DrawPicture = Callable[..., np.ndarray]
LoadTwice = Callable[[str, Path], Dataset]


CLASSES = ("dog", "elephant")


@pytest.fixture
def pacs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: DrawPicture) -> Path:
    """4 domains of 2 classes, 5 pictures of one and 10 of the other."""
    for domain_number, domain in enumerate(PACS.sizes):
        for label, name in enumerate(CLASSES):
            for index in range(5 * (label + 1)):
                picture(
                    tmp_path / f"PACS/{domain}/{name}/pic_{index:03d}.png",
                    1000 * domain_number + 100 * label + index,
                    (16, 16),
                )
    small = dataclasses.replace(PACS, sizes=dict.fromkeys(PACS.sizes, 15), num_classes=2)
    monkeypatch.setitem(registry.DATASETS._components, "pacs", small)
    return tmp_path


def test_without_a_held_out_domain_a_fifth_of_each_class_and_domain_is_for_testing(
    pacs: Path, picture: DrawPicture, decoded_once: LoadTwice
) -> None:
    dataset = decoded_once("pacs(size=16)", pacs)
    assert dataset.classes == CLASSES and dataset.group_names == tuple(PACS.sizes)
    counts = torch.stack(
        [torch.bincount(dataset.test.targets[dataset.test.groups == domain], minlength=2) for domain in range(4)]
    )
    assert counts.tolist() == [[1, 2]] * 4 and len(dataset.train) == 48
    pixels = picture(pacs / "again.png", 2100 + 4, (16, 16))
    photo = (dataset.test.groups == 2) & (dataset.test.targets == 1)
    assert np.array_equal(dataset.test.inputs[photo][0].numpy(), pixels), "the fifth picture of photo/elephant"


@pytest.mark.parametrize("domain", tuple(PACS.sizes))
def test_one_domain_can_be_held_out(pacs: Path, domain: str, left_in_cache: Callable[[Path], list[str]]) -> None:
    dataset = load(f"pacs(size=16,test_domain={domain})", pacs)
    number = dataset.group_names.index(domain)
    assert dataset.train.groups is not None and dataset.test.groups is not None
    assert set(dataset.test.groups.tolist()) == {number} and len(dataset.test) == 15
    assert set(dataset.train.groups.tolist()) == {0, 1, 2, 3} - {number} and len(dataset.train) == 45
    assert (dataset.mean, dataset.std) == channel_statistics(dataset.train.inputs), "of what is trained on"
    assert len(make_partition("natural", dataset.train.targets, 2, None, 0, groups=dataset.train.groups).clients) == 3
    assert len(left_in_cache(pacs)) == 1 and describe(dataset)["groups"] == 3


def test_pictures_are_decoded_once_for_all_held_out_domains(pacs: Path, decoded_once: LoadTwice) -> None:
    parts = [load(f"pacs(size=16,test_domain={domain})", pacs).test.inputs for domain in PACS.sizes]
    every = decoded_once("pacs(size=16)", pacs)
    first = torch.cat([every.train.inputs, every.test.inputs]).flatten(1).double().sum(1).sort().values
    assert torch.equal(first, torch.cat(list(parts)).flatten(1).double().sum(1).sort().values)
    assert registry.canonical_dataset("pacs( test_domain=sketch,size=64 )") == "pacs(test_domain=sketch)"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "photo/dog").rename(root / "photo/cat"), "art_painting .*folder cat"),
        (lambda root: (root / "photo/dog/pic_000.png").unlink(), "photo .* 14 images.* 15"),
        (lambda root: [(root / d / "dog").rename(root / d / "elephant/more") for d in PACS.sizes], " 10 images.* 15"),
    ],
)
def test_incomplete_domains_are_rejected(
    pacs: Path, damage: Callable[[Path], object], message: str, left_in_cache: Callable[[Path], list[str]]
) -> None:
    damage(pacs / "PACS")
    with pytest.raises(UserError, match=message):
        load("pacs", pacs)
    assert left_in_cache(pacs) == []


def test_unknown_and_missing_domains(pacs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pacs .*'sketches'.*sketch"):
        load("pacs(test_domain=sketches)", pacs)
    with pytest.raises(UserError, match=r"pacs .*PACS/art_painting.*https://drive.google.com/\S+ .*kfold to PACS"):
        load("pacs", tmp_path / "nothing")
    with pytest.raises(UserError, match="pacs has no parameter 'domain'"):
        load("pacs(domain=photo)", pacs)
    assert [report.file for report in verify("pacs", pacs)] == [f"PACS/{domain}" for domain in PACS.sizes]


def test_office_home_s_domains_have_spaces_and_capitals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: DrawPicture
) -> None:
    for number, domain in enumerate(OFFICE_HOME.sizes):
        for label, name in enumerate(("Alarm_Clock", "TV")):
            picture(tmp_path / f"OfficeHomeDataset_10072016/{domain}/{name}/00001.jpg", 10 * number + label, (40, 20))
    (tmp_path / "OfficeHomeDataset_10072016/ImageInfo.csv").write_text("")
    small = dataclasses.replace(OFFICE_HOME, sizes=dict.fromkeys(OFFICE_HOME.sizes, 2), num_classes=2)
    monkeypatch.setitem(registry.DATASETS._components, "office_home", small)
    for text in ("office_home(test_domain=real_world)", "office_home(test_domain=Real World)"):
        dataset = load(text, tmp_path)
        assert dataset.group_names == ("Art", "Clipart", "Product", "Real World") and dataset.classes == (
            "Alarm_Clock",
            "TV",
        )
        assert (
            dataset.test.groups is not None
            and dataset.test.groups.tolist() == [3, 3]
            and dataset.input_shape == (3, 64, 64)
        )
    assert sum(OFFICE_HOME.sizes.values()) == 15_588 and sum(PACS.sizes.values()) == 9_991


def test_user_domains(pacs: Path) -> None:
    own = load(f"domains(path={pacs / 'PACS'},size=16,test_domain=cartoon)", pacs)
    assert own.content == load("pacs(size=16,test_domain=cartoon)", pacs).content and own.group_names == tuple(
        PACS.sizes
    )
    with pytest.raises(UserError, match=r"domains\(path="):
        load("domains", pacs)
    with pytest.raises(UserError, match=r"0 domains.*<domain>/<class>"):
        load(f"domains(path={pacs / 'PACS/photo'})", pacs)
