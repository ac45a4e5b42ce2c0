"""docs/data.md, and the generated page of every dataset, agree with the registry."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fedflat.data import AUGMENTATIONS, DATASETS, canonical_dataset, load, names

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def page() -> str:
    return (DOCS / "data.md").read_text(encoding="utf-8")


def test_every_dataset_and_augmentation_is_on_the_page(page: str) -> None:
    rows = re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)
    assert set(names()) <= set(rows)
    assert all(f"`{name}(path=" in page for name, source in DATASETS.items() if source.example)
    assert all(re.search(rf"`{name}[(`]", page) for name in AUGMENTATIONS)


def test_the_table_agrees_with_the_cards(page: str) -> None:
    for name in names():
        card = DATASETS[name].card
        assert f"| `{name}` |" in page
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        for fact in (card.shape, card.citation, card.size):
            assert fact in row


def test_every_text_on_the_page_can_be_parsed(page: str) -> None:
    texts = set(re.findall(rf"\b((?:{'|'.join(DATASETS)})\([a-z_]+=[^()\"]*\))", page))
    assert len(texts) > 10
    for text in texts:
        canonical_dataset(text)


def test_addresses_are_those_of_the_sources(page: str) -> None:
    for source in DATASETS.values():
        addresses = re.findall(r"https://\S+?(?=[ ,);]|$)", source.instructions)
        assert not addresses or any(address in page for address in addresses), source.name


def test_a_dataset_without_a_card_has_a_page(request: pytest.FixtureRequest) -> None:
    """Documentation facts are optional, so that a new dataset needs no further edits."""
    sys.path.insert(0, str(DOCS))
    request.addfinalizer(lambda: sys.path.remove(str(DOCS)))
    from making.datasets import pages

    plain = type(DATASETS["digits"])("plain", "a dataset without a card")
    DATASETS.register("plain", plain)
    request.addfinalizer(lambda: DATASETS.unregister("plain"))
    assert "# plain" in pages()["data/plain.md"]


def test_sizes_of_the_built_in_dataset() -> None:
    digits = load("digits")
    assert DATASETS["digits"].card.examples == f"{len(digits.train):,} / {len(digits.test):,}"
