"""Run the Python blocks of every page, in order, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, Block, blocks, name, run_python

BLOCKS = {page: blocks(page, "python", "bash", "console") for page in PAGES}


def _runnable(page: Path) -> list[Block]:
    return [block for block in BLOCKS[page] if block.language == "python" and not block.skipped]


@pytest.mark.parametrize("page", list(filter(_runnable, PAGES)), ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any("from transformers" in block.code for block in _runnable(page)):
        pytest.importorskip("peft")  # and therefore transformers
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_python(_runnable(page), page)


def test_markers_are_known() -> None:
    for page, page_blocks in BLOCKS.items():
        for block in page_blocks:
            is_file = block.language == "python" and block.marker.startswith("file: ")
            assert block.marker in ("", "runs", "fails") or is_file or block.skipped, (
                f"{name(page)}:{block.line}: unknown marker '{block.marker}'; "
                "expected 'runs', 'fails', 'file: NAME' or 'not run: REASON'"
            )
