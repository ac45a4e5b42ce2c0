"""Build the site: no warning, no dead link or anchor, and no resource from another host."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT

CONFIG = ROOT / "mkdocs.yml"
RESOURCE = re.compile(r'<(?:img|script|link rel="stylesheet")[^>]*? (?:src|href)="([^"]+)"')


class WarningCollector(logging.Handler):
    """Collects the messages of all warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def build_site(folder: Path) -> list[str]:
    """Build the site into a folder and return the warnings."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    collector, logger = WarningCollector(), logging.getLogger("mkdocs")
    logger.addHandler(collector)
    try:
        build(load_config(str(CONFIG), site_dir=str(folder), strict=False))
    finally:
        logger.removeHandler(collector)
    return collector.messages


def test_config_warns_of_dead_links_and_anchors() -> None:
    from mkdocs.utils.yaml import yaml_load

    config: dict[str, Any] = yaml_load(CONFIG.read_text())
    assert config["strict"] is True
    assert set(config["validation"]["links"].values()) == set(config["validation"]["nav"].values()) == {"warn"}


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "examples").rglob("*.md")), ids=lambda page: page.name
)
def test_links_of_pages_outside_the_site(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s#]+)", page.read_text("utf-8")):
        assert link.startswith(("https://", "http://", "mailto:")) or (page.parent / link).exists(), (
            f"{page.name} links to {link}"
        )


FIRST_PAGES = {
    "learning rate": "reference/settings/",
    "Dirichlet": "partitions/dirichlet/",
    "checkpoint": "faq/",
    "GPU": "how-to/gpu/",
}
"""The page that the search must list first, by query."""


def test_site_builds_without_warnings_and_is_self_contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPO_URL", "https://github.com/someone/fedflat")
    assert build_site(tmp_path) == []
    check_pages(tmp_path)
    assert '<a href="https://github.com/someone/fedflat"' in (tmp_path / "index.html").read_text("utf-8")
    assert "<math" in (tmp_path / "algorithms" / "fedmoswa" / "index.html").read_text("utf-8")
    assert "<code>str | None</code>" in (tmp_path / "reference" / "results" / "index.html").read_text("utf-8")
    assert "-13.png" in (tmp_path / "notebooks" / "first_landscape" / "index.html").read_text("utf-8")
    if shutil.which("node"):
        command = ["node", str(Path(__file__).with_name("search.js")), str(tmp_path), *FIRST_PAGES]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert dict(zip(FIRST_PAGES, found, strict=True)) == FIRST_PAGES


def check_pages(site: Path) -> None:
    """Check that pages load nothing from other hosts and refer only to files that exist."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text("utf-8")
        assert 'data-md-component="source"' not in text, "Material would fetch figures of the repository"
        for source in RESOURCE.findall(text):
            assert not source.startswith(("http:", "https:", "//")), f"{page} loads {source}"
            if page.name != "404.html":
                assert (page.parent / source.partition("?")[0]).exists(), f"{page} refers to a missing file: {source}"
