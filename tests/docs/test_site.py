"""The site builds without a warning, every link and anchor leads somewhere, and a reader fetches nothing from elsewhere."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT

CONFIG = ROOT / "mkdocs.yml"
SECTIONS = [
    *("Start here", "Concepts", "How-to", "Algorithms", "Data and partitions", "Models"),
    *("Flatness", "Papers", "Deployment", "Reference", "Project"),
]


class Heard(logging.Handler):
    """Keeps every warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def built(folder: Path) -> list[str]:
    """Build the site into a folder; what was warned of on the way."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    heard, logger = Heard(), logging.getLogger("mkdocs")
    logger.addHandler(heard)
    try:
        build(load_config(str(CONFIG), site_dir=str(folder), strict=False))
    finally:
        logger.removeHandler(heard)
    return heard.said


def test_dead_links_and_anchors_would_be_warned_of() -> None:
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    assert config["strict"] is True
    assert set(config["validation"]["links"].values()) == set(config["validation"]["nav"].values()) == {"warn"}
    assert [next(iter(section)) for section in config["nav"]] == SECTIONS


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "examples").rglob("*.md")), ids=lambda page: page.name
)
def test_links_of_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s#]+)", page.read_text("utf-8")):
        assert link.startswith(("https://", "http://", "mailto:")) or (page.parent / link).exists(), (
            f"{page.name} links to {link}"
        )


def test_it_builds_without_a_warning_shows_its_pictures_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    assert built(tmp_path) == []
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        for source in re.findall(
            r'<(?:img|script|link rel="stylesheet")[^>]*? (?:src|href)="([^"]+)"', page.read_text("utf-8")
        ):
            assert not source.startswith(("http:", "https:", "//")), f"{page} fetches {source}"
            if page.name != "404.html":
                assert (page.parent / source.partition("?")[0]).exists(), f"{page} shows {source}, which is not there"
