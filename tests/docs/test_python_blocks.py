"""Run the Python blocks of every page, in order, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, Block, blocks, name

BLOCKS = {page: blocks(page, "python", "bash", "console") for page in PAGES}


def _runnable(page: Path) -> list[Block]:
    return [block for block in BLOCKS[page] if block.language == "python" and not block.skipped]


@pytest.mark.parametrize("page", filter(_runnable, PAGES), ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in _runnable(page):
        padding = "\n" * (block.line - 1)  # so that tracebacks show the line of the page
        exec(compile(padding + block.code, str(page), "exec"), namespace)


def test_markers_are_known() -> None:
    for page, page_blocks in BLOCKS.items():
        for block in page_blocks:
            assert block.marker in ("", "runs", "fails") or block.skipped, (
                f"{name(page)}:{block.line}: unknown marker '{block.marker}'; "
                "expected 'runs', 'fails' or 'not run: REASON'"
            )
