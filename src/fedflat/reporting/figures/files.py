"""Writing figures to files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from fedflat.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the file's extension."""
    from fedflat.experiment.store.files import create_folder, write_atomically

    check_figure(path)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lower().lstrip("."), dpi=150)
    create_folder(path.parent)
    write_atomically(path, content.getvalue())


def check_figure(path: Path) -> None:
    """Raise a ``UserError`` if the extension of a file is not a supported figure format."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"cannot write a figure to {path.name}; use an extension out of {', '.join(FORMATS)}")
