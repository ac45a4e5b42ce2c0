"""MkDocs hooks: ``folder/*`` entries in the navigation, files outside docs/ and notebooks as pages, equations.

``folder/*`` expands to all pages of a folder that the navigation does not list elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from making import notebooks
from making.equations import render_equations
from mkdocs.structure.files import File

PROJECT_FILES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files in the root of the repository."""
FOUND_FIRST = ("faq.md", "how-to/gpu.md", "partitions/dirichlet.md", "reference/settings.md")
"""Pages that the search ranks above others with the same words in their headings."""


def on_config(config: Any) -> Any:
    """Expand ``folder/*`` entries of the navigation; MkDocs calls this before it builds the site."""
    config["nav"] = _expand(config["nav"], Path(config["docs_dir"]), set(_listed_pages(config["nav"])))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add notebooks and project files, with adjusted links, as pages; MkDocs calls this with the files of the site."""
    root = Path(config["docs_dir"]).parent
    for page, name in PROJECT_FILES.items():
        text = (root / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    for path, content in notebooks.pages(root / "notebooks").items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Rank the page, render its equations, keep ± on its line; MkDocs calls this with the Markdown of each page."""
    if page.file.src_uri in FOUND_FIRST:
        page.meta["search"] = {"boost": 3}
    # GitHub needs \| for a pipe in the code of a table; Python-Markdown would show the backslash.
    markdown = re.sub(r"(?m)^ *\|.*", lambda row: re.sub(r"`[^`]+`", _plain_pipes, row[0]), markdown)
    return render_equations(markdown).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _plain_pipes(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


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
