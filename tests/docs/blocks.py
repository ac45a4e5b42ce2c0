"""Tables and code blocks of Markdown pages; a code block comes with the comment above it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>.+?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def tables(page: str) -> list[list[list[str]]]:
    """Each table of a page of docs as rows of cells, without its heading."""
    found, rows = [], []
    for line in [*(ROOT / "docs" / page).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip(" `") for cell in line.strip("|").split("|")])
        elif rows:
            found.append(rows[2:])
            rows = []
    return found


@dataclass(frozen=True)
class Block:
    """A code block.

    Args:
        language: The language after the opening fence.
        code: The text between the fences.
        line: The line of the page, from 1, on which the code starts.
        marker: The HTML comment directly above the block: ``runs``, ``fails``, ``file: NAME`` or
            ``not run: REASON``.
    """

    language: str
    code: str
    line: int
    marker: str = ""

    @property
    def skipped(self) -> bool:
        """Whether the block is marked as not run, with a reason."""
        return self.marker.startswith("not run: ") and len(self.marker) > len("not run: ") + 3

    def commands(self) -> Iterator[list[str]]:
        """Arguments of every fedflat call in a shell block; of a console block, only lines after ``$`` count."""
        for line in self.code.replace("\\\n", " ").splitlines():
            if self.language != "console":
                yield from calls(line)
            elif line.startswith("$ "):
                yield from calls(line.removeprefix("$ "))


def calls(line: str) -> Iterator[list[str]]:
    """Arguments of every fedflat call in a line of shell.

    >>> list(calls("fedflat run 'fedavg+sam(rho=0.1)' --rounds 3 && fedflat show runs  # comment"))
    [['run', 'fedavg+sam(rho=0.1)', '--rounds', '3'], ['show', 'runs']]
    """
    call: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word in ("&&", ";", "|"):
            if call[:1] == ["fedflat"]:
                yield call[1:]
            call = []
        else:
            call.append(word)


def run_python(page_blocks: list[Block], page: Path) -> None:
    """Run Python blocks in one namespace, in the current folder; those marked ``file: NAME`` are written to that file.

    Args:
        page_blocks: The blocks, in order.
        page: Their page, which tracebacks name.
    """
    namespace = {"__name__": "__main__"}
    for block in page_blocks:
        if block.marker.startswith("file: "):
            Path(block.marker.removeprefix("file: ")).write_text(block.code, encoding="utf-8")
            continue
        padding = "\n" * (block.line - 1)  # so that tracebacks show the line of the page
        exec(compile(padding + block.code, str(page), "exec"), namespace)


def blocks(page: Path, *languages: str) -> list[Block]:
    """All blocks of a page in the given languages, in order."""
    text = page.read_text(encoding="utf-8")
    matches = (match for match in _BLOCK.finditer(text) if match["language"] in languages)
    return [
        Block(match["language"], match["code"], text.count("\n", 0, match.start("code")) + 1, match["marker"] or "")
        for match in matches
    ]


def name(page: Path) -> str:
    """The path of a page below the repository root, used as a test id."""
    return str(page.relative_to(ROOT))
