"""Every Python block of the documentation runs, page by page, in order, in an empty folder; one that cannot says why above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, Block, blocks, name

SAID = {page: blocks(page, "python", "bash", "console") for page in PAGES}
WITH_PYTHON = [
    page for page, found in SAID.items() if any(block.language == "python" and not block.skipped for block in found)
]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in SAID[page]:
        if block.language == "python" and not block.skipped:
            exec(compile(_placed(block), str(page), "exec"), namespace)


def _placed(block: Block) -> str:
    """The code with as many empty lines above it as the page has, so that errors name the page's own line."""
    return "\n" * (block.line - 1) + block.code


def test_every_comment_above_a_block_is_understood() -> None:
    for page, found in SAID.items():
        for block in found:
            known = not block.said or block.said in ("runs", "fails") or block.skipped
            assert known, (
                f"{name(page)}:{block.line}: '{block.said}' above a block; expected runs, fails, or 'not run: REASON'"
            )
