"""Display in Jupyter notebooks: HTML tables, figures, and whether the code runs in one."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Mapping
from typing import Any


def notebook_shell() -> Any | None:
    """Return the IPython shell of the running notebook, or None outside notebooks."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()  # IPython in a terminal has a shell, too, but no kernel
    return shell if shell is not None and hasattr(shell, "kernel") else None


def show_figures() -> None:
    """Let the running notebook show matplotlib figures as images, as ``%matplotlib inline`` does."""
    shell = notebook_shell()
    if shell is not None:
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})


def html_table(title: str, columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with a title as HTML.

    >>> html_table("Runs", ["algorithm"], [["fedavg"]])
    '<p><b>Runs</b></p><table><tr><th>algorithm</th></tr><tr><td>fedavg</td></tr></table>'
    """
    header = "".join(f"<th>{_escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_escape(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<p><b>{_escape(title)}</b></p><table>{f'<tr>{header}</tr>' if header else ''}{body}</table>"


def html_values(title: str, values: Mapping[str, object]) -> str:
    """Return names and values as an HTML table with a title; values that are None are left out."""
    return html_table(title, (), ((name, value) for name, value in values.items() if value is not None))


def _escape(value: object) -> str:
    return html.escape("–" if value is None else str(value))
