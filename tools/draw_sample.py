"""Print 20 random functions of src/ and 20 random paragraphs of the documentation, for a reader new to the project.

Usage: python tools/draw_sample.py SEED

Each sample comes with what a reader of the file would have seen before it: the docstrings of the module and the class
of a function, and the preceding text of a paragraph's section.
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
    """The source of each function of at least ``MIN_LINES`` lines, with the docstrings of its module and class."""
    source = path.read_text()
    tree = ast.parse(source)
    class_of = {id(child): node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 >= MIN_LINES:
            owner = class_of.get(id(node))
            heading = f"=== {path.relative_to(ROOT)}:{node.lineno}\n'''{ast.get_docstring(tree)}'''\n..."
            if owner is not None:
                heading += f"\nclass {owner.name}:\n    '''{ast.get_docstring(owner)}'''\n..."
            yield f"{heading}\n{ast.get_source_segment(source, node)}\n"


def paragraphs(path: Path) -> Iterator[str]:
    """The paragraphs of at least ``MIN_WORDS`` words, each after the preceding text of its section."""
    section: list[str] = []
    in_code = False
    for block in re.split(r"\n\s*\n", path.read_text()):
        text = block.strip()
        if text.startswith("#") and not in_code:
            section = []
        is_prose = not in_code and "```" not in text and not text.startswith(("#", "|", "![", "<"))
        in_code ^= text.count("```") % 2 == 1  # a code block may contain blank lines
        if is_prose and len(text.split()) >= MIN_WORDS:
            before = "\n\n".join(section)
            yield f"=== {path.relative_to(ROOT)}\n{before}\n\n>>> the paragraph:\n{text}\n"
        section.append(text)


def main() -> None:
    """Print the samples for the seed on the command line."""
    rng = random.Random(int(sys.argv[1]))
    modules = sorted((ROOT / "src").rglob("*.py"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for items in ([s for path in modules for s in functions(path)], [s for path in pages for s in paragraphs(path)]):
        print("\n".join(rng.sample(items, SAMPLES)))


if __name__ == "__main__":
    main()
