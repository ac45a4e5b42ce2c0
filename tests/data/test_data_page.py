"""The page on datasets says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedflat.data import AUGMENTATIONS, DATASETS, OWN, canonical_dataset, load

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_data_set_has_a_row_in_order(page: str) -> None:
    table = page.split("## Available datasets")[1].split("###")[0]
    assert re.findall(r"^\| `(\w+)` ", table, re.MULTILINE) == list(DATASETS)


def test_every_kind_of_own_data_and_every_augmentation_is_there(page: str) -> None:
    own, more = page.split("## Your own data")[1].split("## Larger"), page.split("## Augmentation")[1]
    assert all(f"`{name}(path=" in own[0] for name in OWN) and all(
        re.search(rf"`{name}[(`]", more) for name in AUGMENTATIONS
    )


def test_every_text_on_the_page_can_be_read(page: str) -> None:
    names = "|".join((*DATASETS, *OWN))
    texts = set(re.findall(rf"\b((?:{names})\([a-z_]+=[^()\"]*\))", page))
    assert len(texts) > 10
    for text in texts:
        canonical_dataset(text)


def test_addresses_are_those_of_the_sources(page: str) -> None:
    for source in DATASETS.values():
        for word in re.findall(r"https://\S+?(?=[ ,)]|$)", source.instructions):
            assert word in page or source.name in ("pacs", "office_home"), word
        if source.name in ("pacs", "office_home"):
            assert re.findall(r"uc\?id=\w+", source.instructions)[0] in page


def test_sizes_of_the_built_in_set() -> None:
    digits = load("digits")
    assert (len(digits.train), len(digits.test)) == (1442, 355)
