"""The project's own tools, and what they wrote."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["lock", "mutate"])
def test_their_examples_hold(name: str) -> None:
    found = doctest.testmod(tool(name))
    assert found.attempted and not found.failed


def test_the_lock_is_whole_and_names_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    locked = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {re.sub(r"[-_.]+", "-", re.split(r"[<>=\[ ]", one)[0]).lower() for one in wanted} <= locked
    assert "torch==2.13.0" in lines


def test_every_change_is_one_that_python_reads() -> None:
    mutate = tool("mutate")
    path = Path("src/fedflat/algorithms/drift/wmsam.py")
    text = (ROOT / path).read_text()
    found = list(mutate.mutations(path, text))
    assert len(found) > 5
    for change in found:
        changed = text.encode()[: change.start] + change.new.encode() + text.encode()[change.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), str(change)


def test_the_same_seed_chooses_the_same_lines() -> None:
    mutate = tool("mutate")
    chosen = mutate.draw_mutations(3, 20)
    assert chosen == mutate.draw_mutations(3, 20) and len({(change.file, change.line) for change in chosen}) == 20
    assert {change.file.parts[2] for change in mutate.draw_mutations(0, 200)} == {
        "algorithms",
        "averaging",
        "engines",
        "flatness",
    }
