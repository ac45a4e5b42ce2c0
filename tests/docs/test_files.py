"""Check the sweep files, TOML snippets and source paths that the documentation shows."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from fedflat.experiment.campaign.sweep_file import combinations, read_sweep
from tests.docs.blocks import PAGES, ROOT, blocks, name

SWEEPS_PAGE = ROOT / "docs" / "sweeps.md"
SWEEPS = blocks(SWEEPS_PAGE, "yaml")
TOML = [pytest.param(block.code, id=f"{name(page)}:{block.line}") for page in PAGES for block in blocks(page, "toml")]


@pytest.mark.parametrize("block", SWEEPS, ids=lambda block: f"line {block.line}")
def test_sweep_files_are_valid(block, tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(block.code, encoding="utf-8")
    sweep = read_sweep(file)
    assert sweep.tune is not None or combinations(sweep)


def test_number_of_runs_shown_for_the_first_sweep() -> None:
    count = len(combinations(read_sweep(yaml.safe_load(SWEEPS[0].code))))
    assert f"{count} runs" in SWEEPS_PAGE.read_text(encoding="utf-8")


def test_the_space_on_the_page_is_the_example() -> None:
    (block,) = blocks(ROOT / "docs" / "discover.md", "yaml")
    assert yaml.safe_load(block.code) == yaml.safe_load((ROOT / "examples" / "discover-digits.yaml").read_text("utf-8"))


@pytest.mark.parametrize("code", TOML)
def test_toml_is_valid(code: str) -> None:
    assert tomllib.loads(code)


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PATHS = sorted(set(re.findall(r"`([a-z_]+(?:/\w+)*\.(?:py|yml|md)|[a-z_]+/(?:\w+/)*)`", ARCHITECTURE)))
TREE = [f"/{path.relative_to(ROOT)}" for top in ("src", "tests", "docs", "studies") for path in (ROOT / top).rglob("*")]


def test_architecture_page_names_every_package() -> None:
    entries = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "src" / "fedflat").iterdir()
        if not path.name.startswith(("_", "py.typed"))
    }
    mentioned = set(re.findall(r"`(?:src/fedflat/)?([\w.]+/?)", ARCHITECTURE))
    assert entries - mentioned == set()


@pytest.mark.parametrize("path", PATHS)
def test_path_on_architecture_page_exists(path: str) -> None:
    assert (ROOT / path).exists() or any(file.endswith(f"/{path.rstrip('/')}") for file in TREE)


SCRIPTS = [path for top in ("studies", "tools", "examples") for path in sorted((ROOT / top).rglob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_import_only_names_that_exist(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedflat"):
            module = importlib.import_module(str(node.module))
            for imported in node.names:
                if not hasattr(module, imported.name):
                    importlib.import_module(f"{node.module}.{imported.name}")
