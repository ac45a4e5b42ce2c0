"""Write the pages of the documentation that are made from the code: algorithms, datasets, partitions, models, reference.

python docs/generate.py          write them
python docs/generate.py --check  fail if they are not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

from making import algorithms, command_line, datasets, models, partitions, python_api

HERE = Path(__file__).parent
FOLDERS = ("algorithms", "data", "partitions", "models", "reference", "images/curves", "images/partitions")
"""Folders in which every file is made here."""


def pages() -> dict[str, str]:
    """Every page and drawing, by its path below docs/."""
    return {
        path: text for module in (algorithms, datasets, partitions, models, python_api, command_line) for path, text in module.pages().items()
    }


def left_over(made: dict[str, str]) -> list[Path]:
    """Files of pages that are made no longer."""
    return [file for folder in FOLDERS for file in sorted((HERE / folder).glob("*")) if str(file.relative_to(HERE)) not in made]


def main() -> None:
    """Write the pages, or compare them with what is there."""
    made = pages()
    if "--check" in sys.argv:
        old = [path for path, text in made.items() if not (HERE / path).exists() or (HERE / path).read_text(encoding="utf-8") != text]
        old += [str(file.relative_to(HERE)) for file in left_over(made)]
        if old:
            sys.exit(f"docs/{old[0]} is not what the code says ({len(old)} such pages); run: python docs/generate.py")
        return
    for file in left_over(made):
        file.unlink()
    for path, text in made.items():
        (HERE / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
