"""What mkdocs.yml asks for beyond MkDocs: ``folder/*`` in the navigation, pages of the project that lie beside docs/, figures in one piece.

``folder/*`` stands for all pages of a folder that the navigation does not name elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

BESIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site, and the files of the project that they are."""


def on_config(config: Any) -> Any:
    """Called by MkDocs before it builds."""
    named = set(_named(config["nav"]))
    config["nav"] = _expanded(config["nav"], Path(config["docs_dir"]), named)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with the pages it found; links into docs/ are those of the site."""
    for page, name in BESIDE.items():
        text = (Path(config["docs_dir"]).parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **more: Any) -> str:
    """Called by MkDocs with the text of a page; a mean and its deviation are not parted at the end of a line."""
    return markdown.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _named(entry: Any) -> Iterator[str]:
    inside = entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ()
    if isinstance(entry, str):
        yield entry
    for one in inside:
        yield from _named(one)


def _expanded(entry: Any, folder: Path, named: set[str]) -> Any:
    if isinstance(entry, list):
        return [_expanded(one, folder, named) for one in entry]
    if isinstance(entry, dict):
        return {title: _expanded(inside, folder, named) for title, inside in entry.items()}
    if entry.endswith("/*"):
        pages = (str(page.relative_to(folder)) for page in sorted((folder / entry).parent.glob("*.md")))
        return [page for page in pages if page not in named]
    return entry
