"""LaTeX tables that fit into a text column or a page of a paper."""

from __future__ import annotations

import re

from fedflat.errors import UserError
from fedflat.reporting.tables.files import TextTable

COLUMN_WIDTH, PAGE_WIDTH = 234.0, 397.0
"""Width in points of a text column in ICML papers, and of the single column of NeurIPS papers."""
MIN_FIRST_COLUMN = 45.0
"""Minimum width in points of a table's first column, whose text is wrapped."""
CHARACTER_WIDTH, SEPARATION = 4.5, 12.0
"""Width of a digit at 9 pt, and distance between two columns of a table, in points."""
SHORT_HEADS = {
    "row": "algorithm",
    "mean_last": "last 10 %",
    "last": "last",
    "best": "best",
    "at_best_validation": "at best val.",
    "backward_passes": "passes",
    "p after Holm": "p (Holm)",
}
"""Short headings; the caption explains them."""
RESULT_COLUMNS = ("mean_last", "last")
DIFFERENCE_COLUMNS = ("difference", "95 % Student", "p after Holm")
"""Columns of the table of results and of the table of differences that fit into one text column of a paper."""
_EMPHASIS = {"best": "textbf", "second": "underline"}
_MATHS = {  # pdflatex has no text characters for Greek letters and mathematical symbols
    character: f"${maths}$"
    for characters, spellings in (
        ("±−<>|×·≤≥≠", r"\pm - < > \mid \times \cdot \leq \geq \neq"),
        ("≈∼∞→√∂∇∈‖", r"\approx \sim \infty \to \surd \partial \nabla \in \|"),
        ("αβγδεζηθικλμν", r"\alpha \beta \gamma \delta \varepsilon \zeta \eta \theta \iota \kappa \lambda \mu \nu"),
        ("ξοπρςστυφχψω", r"\xi o \pi \rho \varsigma \sigma \tau \upsilon \varphi \chi \psi \omega"),
        ("ΓΔΘΛΞΠΣΥΦΨΩ", r"\Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma \Upsilon \Phi \Psi \Omega"),
        ("µϵϕ²³₀₁₂₃₄₅₆₇₈₉", r"\mu \epsilon \phi ^2 ^3 _0 _1 _2 _3 _4 _5 _6 _7 _8 _9"),
    )
    for character, maths in zip(characters, spellings.split(), strict=True)
}
_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    | {"[": "{[}", "*": "{*}"}  # at the start of a row, they would be arguments of the line break before it
    | _MATHS
)


def latex_text(text: str) -> str:
    """Escape text for LaTeX.

    >>> latex_text("fedavg+wima(window=20) 83.1 ± 0.2 %")
    'fedavg+wima(window=20) 83.1 $\\\\pm$ 0.2 \\\\%'
    >>> latex_text("[1] μ ≤ 1")
    '{[}1] $\\\\mu$ $\\\\leq$ 1'
    """
    return text.translate(_ESCAPES)


def latex_table(table: TextTable, label: str) -> str:
    """Write a table in LaTeX, with the best values in bold and the second-best underlined.

    It needs the packages booktabs and tabularx. It spans one text column of the paper or, if it is too wide, the page.

    Args:
        table: the table.
        label: name of the table for ``\\ref``.
    """
    width = _width(table)
    if width > PAGE_WIDTH:
        raise UserError(
            f"the LaTeX table would be {width:.0f} points wide, but a page has {PAGE_WIDTH:.0f}; "
            "select fewer columns (--columns)"
        )
    environment, measure = ("table", "columnwidth") if width <= COLUMN_WIDTH else ("table*", "textwidth")
    columns = r"@{}>{\raggedright\arraybackslash}X" + "r" * (len(table.heads) - 1) + "@{}"
    lines = [
        r"% needs \usepackage{booktabs,tabularx}",
        rf"\begin{{{environment}}}[t]",
        rf"\caption{{{_breakable(_caption(table))}}}",
        rf"\label{{{label}}}",
        r"\vspace{1ex}",  # many classes leave no space below a caption
        r"\centering",
        r"\small",
        rf"\begin{{tabularx}}{{\{measure}}}{{{columns}}}",
        r"\toprule",
        " & ".join(latex_text(head) for head in _heads(table)) + r" \\",
        r"\midrule",
        *(_row(table, number) for number in range(len(table.rows))),
        r"\bottomrule",
        r"\end{tabularx}",
        rf"\end{{{environment}}}",
    ]
    return "\n".join(lines) + "\n"


def first_columns(table: TextTable) -> list[str]:
    """Return the names of the table's columns after the first, as far as they fit on a page together."""
    names = list(table.heads)[1:]
    while len(names) > 1 and _width(table.select(names)) > PAGE_WIDTH:
        names.pop()
    return names


def _heads(table: TextTable) -> list[str]:
    return [SHORT_HEADS.get(name, head) for name, head in table.heads.items()]


def _caption(table: TextTable) -> str:
    """Return the caption, with a note on bold and underlined cells if there are any."""
    is_emphasised = any(name in table.heads for _, name in table.emphasis)
    return table.full_caption + (" Bold: best; underlined: second." if is_emphasised else "")


def _row(table: TextTable, number: int) -> str:
    """Write a row in LaTeX; line breaks are allowed within its first cell, the name of an algorithm."""
    first, *values = table.rows[number]
    cells = [_breakable(first)]
    for name, value in zip(list(table.heads)[1:], values, strict=True):
        emphasis = table.emphasis.get((number, name))
        cell = latex_text(value)
        if emphasis:  # emphasise the mean, but not its standard deviation
            mean, space, deviation = cell.partition(" ")
            cell = rf"\{_EMPHASIS[emphasis]}{{{mean}}}{space}{deviation}"
        cells.append(cell)
    return " & ".join(cells) + r" \\"


def _breakable(text: str) -> str:
    """Escape text and allow line breaks within algorithms, e.g. before a parenthesis."""
    return re.sub(r"(?<=\S)\(", r"\\allowbreak(", re.sub(r"([+,=])(?=\S)", r"\1\\allowbreak ", latex_text(text)))


def _width(table: TextTable) -> float:
    """Estimate the minimum width of a table in points, from the number of characters of each column's widest cell.

    The first column counts with a fixed width, because its text is wrapped.
    """
    columns = list(zip(_heads(table), *table.rows, strict=True))[1:]
    characters = sum(max(len(cell) for cell in column) for column in columns)
    return MIN_FIRST_COLUMN + CHARACTER_WIDTH * characters + SEPARATION * len(columns)
