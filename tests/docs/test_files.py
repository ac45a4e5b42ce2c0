"""Files that the documentation shows, sweeps, searches and TOML, are read by what reads them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

from fedflat.experiment.sweep_file import combinations, read_sweep
from tests.docs.blocks import PAGES, ROOT, blocks, name

SWEEPS = blocks(ROOT / "docs" / "sweeps.md", "yaml")


@pytest.mark.parametrize("number", range(len(SWEEPS)))
def test_sweeps_can_be_read(number: int, tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(SWEEPS[number].code, encoding="utf-8")
    found = read_sweep(tmp_path / "shown.yaml")
    assert found.tune is not None or combinations(found)


def test_the_sweep_shown_first_has_as_many_runs_as_the_page_says() -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text("utf-8")
    assert f"runs    {len(combinations(read_sweep(yaml.safe_load(SWEEPS[0].code))))}, of which" in page


TOML = [pytest.param(block.code, id=f"{name(page)}:{block.line}") for page in PAGES for block in blocks(page, "toml")]


@pytest.mark.parametrize("code", TOML)
def test_toml_can_be_read(code: str) -> None:
    assert tomllib.loads(code)
