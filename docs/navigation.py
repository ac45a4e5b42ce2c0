"""Lets mkdocs.yml name a folder of pages in its navigation as ``folder/*``: all of them, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Called by MkDocs before it builds."""
    config["nav"] = _expanded(config["nav"], Path(config["docs_dir"]))
    return config


def _expanded(entry: Any, folder: Path) -> Any:
    if isinstance(entry, list):
        return [_expanded(one, folder) for one in entry]
    if isinstance(entry, dict):
        return {title: _expanded(inside, folder) for title, inside in entry.items()}
    if entry.endswith("/*"):
        return [str(page.relative_to(folder)) for page in sorted((folder / entry).parent.glob("*.md"))]
    return entry
