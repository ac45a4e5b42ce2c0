"""Lets mkdocs.yml name a folder of pages in its navigation as ``folder/*``: all of them that it does not name elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Called by MkDocs before it builds."""
    named = set(_named(config["nav"]))
    config["nav"] = _expanded(config["nav"], Path(config["docs_dir"]), named)
    return config


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
