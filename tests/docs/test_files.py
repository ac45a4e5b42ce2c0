"""Files that the documentation shows, sweeps, searches and TOML, are read by what reads them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from fedflat.experiment.campaign.sweep_file import combinations, read_sweep
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


# --- the map of the code ---------------------------------------------------------------------------------------------------------

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
TREE = [f"/{path.relative_to(ROOT)}" for top in ("src", "tests", "docs", "studies") for path in (ROOT / top).rglob("*")]


def test_the_map_names_every_folder_and_nothing_else() -> None:
    table = ARCHITECTURE.split("## The map")[1].split("Beside `src/`")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    said = {piece for cell in first for piece in re.findall(r"`([\w./]+)`", cell)}
    package = ROOT / "src" / "fedflat"
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in package.iterdir()
        if not path.name.startswith(("_", "py.typed"))
    }
    assert said == there


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`([a-z_]+(?:/[\w]+)*\.(?:py|yml|md)|[a-z_]+/(?:[\w]+/)*)`", ARCHITECTURE)))
)
def test_files_on_the_map_are_there(path: str) -> None:
    assert any(file.endswith(f"/{path.rstrip('/')}") for file in TREE) or (ROOT / path).exists()
