"""MkDocs hooks: ``folder/*`` entries in the navigation, project files outside docs/ as pages, unbreakable ``±``.

``folder/*`` expands to all pages of a folder that the navigation does not list elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PROJECT_FILES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files in the root of the repository."""


def on_config(config: Any) -> Any:
    """Expand ``folder/*`` entries of the navigation; MkDocs calls this before it builds the site."""
    config["nav"] = _expand(config["nav"], Path(config["docs_dir"]), set(_listed_pages(config["nav"])))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the project files as pages, with links into docs/ adjusted; MkDocs calls this with the files of the site."""
    for page, name in PROJECT_FILES.items():
        text = (Path(config["docs_dir"]).parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **more: Any) -> str:
    """Keep a mean and its deviation on one line; MkDocs calls this with the Markdown of each page."""
    return markdown.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _listed_pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from _listed_pages(child)


def _expand(entry: Any, docs: Path, listed: set[str]) -> Any:
    if isinstance(entry, list):
        return [_expand(child, docs, listed) for child in entry]
    if isinstance(entry, dict):
        return {title: _expand(child, docs, listed) for title, child in entry.items()}
    if entry.endswith("/*"):
        pages = (str(page.relative_to(docs)) for page in sorted((docs / entry).parent.glob("*.md")))
        return [page for page in pages if page not in listed]
    return entry
