"""Notebooks as pages: text, code and the stored outputs."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from making.markdown import block

_ESCAPE_CODES = re.compile(r"\x1b\[[0-9;]*m")
_STYLE = re.compile(r"<style.*?</style>\s*", re.DOTALL)


def pages(folder: Path) -> dict[str, str | bytes]:
    """The page of every notebook in a folder, and its pictures, by their path in the site."""
    files: dict[str, str | bytes] = {}
    for path in sorted(folder.glob("*.ipynb")):
        lines: list[str] = []
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            source = "".join(cell["source"])
            lines += [_linked(source), ""] if cell["cell_type"] == "markdown" else block([source], "python")
            for output in cell.get("outputs", ()):
                picture = output.get("data", {}).get("image/png")
                if picture:
                    name = f"{path.stem}-{number}.png"
                    files[f"notebooks/{name}"] = base64.b64decode("".join(picture))
                    lines += [f"![Output of the cell above]({name})", ""]
                else:
                    lines += _shown(output)
        files[f"notebooks/{path.stem}.md"] = "\n".join(lines)
    return files


def _shown(output: dict[str, Any]) -> Iterator[str]:
    """The lines of an output without a picture: HTML where there is some, else text."""
    data = output.get("data", {})
    if "text/html" in data:
        yield from (f'<div class="output">{_STYLE.sub("", "".join(data["text/html"]))}</div>', "")
    else:
        text = "".join(output.get("text") or data.get("text/plain", ""))
        yield from block(_ESCAPE_CODES.sub("", text).rstrip().splitlines(), "text")


def _linked(markdown: str) -> str:
    """Text of a notebook with its links to pages and other notebooks as the site has them.

    >>> _linked("[a](../docs/cli.md), [b](flatness.ipynb)")
    '[a](../cli.md), [b](flatness.md)'
    """
    return re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", markdown.replace("](../docs/", "](../"))
