"""Print 20 random functions of src/ and 20 random paragraphs of the documentation, for a reader new to the project.

Usage: python tools/draw_sample.py SEED

A method is shown with the docstring of its class, since a reader of the file would have seen it.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAMPLES, MIN_LINES, MIN_WORDS = 20, 4, 15


def functions(path: Path) -> Iterator[str]:
    """The source of each function of at least ``MIN_LINES`` lines, with its class's docstring."""
    source = path.read_text()
    tree = ast.parse(source)
    class_of = {id(child): node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 >= MIN_LINES:
            owner = class_of.get(id(node))
            heading = f"=== {path.relative_to(ROOT)}:{node.lineno}"
            if owner is not None:
                heading += f"\nclass {owner.name}:\n    '''{ast.get_docstring(owner)}'''\n..."
            yield f"{heading}\n{ast.get_source_segment(source, node)}\n"


def paragraphs(path: Path) -> Iterator[str]:
    """The paragraphs of at least ``MIN_WORDS`` words, under their page and last heading, without code and tables."""
    heading = ""
    for block in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        text = block.strip()
        if text.startswith("#"):
            heading = text.splitlines()[0]
        elif len(text.split()) >= MIN_WORDS and not text.startswith(("|", "![", "<")):
            yield f"=== {path.relative_to(ROOT)} ({heading})\n{text}\n"


def main() -> None:
    """Print the samples for the seed on the command line."""
    rng = random.Random(int(sys.argv[1]))
    modules = sorted((ROOT / "src").rglob("*.py"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for items in ([s for path in modules for s in functions(path)], [s for path in pages for s in paragraphs(path)]):
        print("\n".join(rng.sample(items, SAMPLES)))


if __name__ == "__main__":
    main()
