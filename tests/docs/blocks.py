"""The code blocks of a page of Markdown, with what a comment above one says of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_BLOCK = re.compile(
    r"(?:^<!-- (?P<said>.+?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its text, the line where it begins, and the comment above it."""

    language: str
    code: str
    line: int
    said: str = ""

    @property
    def skipped(self) -> bool:
        """Whether it is not to be executed; the comment says why."""
        return self.said.startswith("not run: ") and len(self.said) > len("not run: ") + 3

    def commands(self) -> Iterator[list[str]]:
        """The arguments of every call of fedflat in a block of shell commands."""
        for line in self.code.replace("\\\n", " ").splitlines():
            shown = line.removeprefix("$ ") if self.language == "console" else line
            if self.language == "console" and not line.startswith("$ "):
                continue
            yield from calls(shown)


def calls(line: str) -> Iterator[list[str]]:
    """The arguments of every call of fedflat in a line of shell.

    >>> list(calls("fedflat run 'fedavg+sam(rho=0.1)' --rounds 3 && fedflat show runs  # a look"))
    [['run', 'fedavg+sam(rho=0.1)', '--rounds', '3'], ['show', 'runs']]
    """
    words = shlex.split(line, comments=True)
    part: list[str] = []
    for word in [*words, "&&"]:
        if word in ("&&", ";", "|"):
            if part[:1] == ["fedflat"]:
                yield part[1:]
            part = []
        else:
            part.append(word)


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in some languages, in order."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(match["language"], match["code"], text.count("\n", 0, match.start("code")) + 1, match["said"] or "")
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language in languages]


def name(page: Path) -> str:
    """A page as tests call it."""
    return str(page.relative_to(ROOT))
