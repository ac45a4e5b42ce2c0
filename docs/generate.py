"""Generate the documentation pages that are derived from the code and from measured results.

python docs/generate.py          write the pages, and the names for shell completion
python docs/generate.py --check  fail if a generated page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from making import algorithms, command_line, completion, datasets, ledger, models, partitions, python_api

HERE = Path(__file__).parent
GENERATORS = (algorithms, datasets, partitions, models, ledger, python_api, command_line, completion)
FOLDERS = ("algorithms", "data", "partitions", "models", "reference", "images/curves", "images/partitions")
"""Folders that contain only generated files."""


def pages() -> dict[str, str]:
    """Every page, drawing and file by its path relative to docs/."""
    return {path: text for generator in GENERATORS for path, text in generator.pages().items()}


def stale_files(generated: dict[str, str]) -> list[Path]:
    """Files in generated folders that are no longer generated."""
    files = (file for folder in FOLDERS for file in sorted((HERE / folder).glob("*")))
    return [file for file in files if str(file.relative_to(HERE)) not in generated]


def main() -> None:
    """Write the pages, or with --check compare them with the files."""
    generated = pages()
    stale = stale_files(generated)
    if "--check" in sys.argv:
        outdated = [str(file.relative_to(HERE)) for file in stale]
        for path, text in generated.items():
            if not (HERE / path).exists() or (HERE / path).read_text(encoding="utf-8") != text:
                outdated.append(path)
        if outdated:
            sys.exit(f"{len(outdated)} generated pages are out of date, e.g. docs/{outdated[0]}; run docs/generate.py")
        return
    for file in stale:
        file.unlink()
    for path, text in generated.items():
        (HERE / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
