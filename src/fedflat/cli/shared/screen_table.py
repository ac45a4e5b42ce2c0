"""A table that fits the screen without breaking words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
    from rich.table import Table
    from rich.text import Text

GAP = 2
"""Spaces between two columns."""
LONG_WORD = 18
"""Longest word that stays whole; longer ones, such as paths, may also break after one of ``/,+(``."""
_WORD = re.compile(r"\s*\S+(?: %(?!\S))?")  # a per cent sign stays with its number or word
_BREAK_IN_LONG_WORD = re.compile(r"(?<=[/,+])(?=\w)|(?<=\w\()(?=\w)")


@dataclass
class TableColumn:
    """A column: its title, its cells and how they are shown.

    Attributes:
        title: the title, which may have several lines.
        cells: one cell per row.
        is_numeric: right-aligned; cells such as ``1.2 MB`` stay on one line.
        is_whole: cells stay on one line.
        is_optional: left out if the table does not fit otherwise.
        style: style of the cells.
    """

    title: str
    cells: list[Text]
    is_numeric: bool = False
    is_whole: bool = False
    is_optional: bool = False
    style: str = ""

    @property
    def natural_width(self) -> int:
        """Width at which no line of a cell wraps."""
        return max(len(line) for text in self._texts() for line in text.split("\n"))

    @property
    def smallest_width(self) -> int:
        """Smallest width at which no word, and no cell that must stay on one line, is broken."""
        lines = [line for text in self._texts() for line in text.split("\n")]
        words = [word.strip() for line in lines for word in pieces(line)]
        if self.is_numeric or self.is_whole:
            words += [line for cell in self.cells for line in cell.plain.split("\n")]
        return max(map(len, words), default=0)

    def heights(self, width: int) -> list[int]:
        """Return the numbers of lines of the title and of every cell at this width."""
        return [sum(len(line_breaks(line, width)) + 1 for line in text.split("\n")) for text in self._texts()]

    def _texts(self) -> list[str]:
        return [self.title, *(cell.plain for cell in self.cells)]


@dataclass
class ScreenTable:
    """A table whose cells wrap between words; if it is still too wide, its columns continue in a further table below.

    Attributes:
        columns: the columns; the first one is repeated when the table continues.
        has_titles: whether the titles are shown.
    """

    columns: Sequence[TableColumn]
    has_titles: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or several with a blank line between them; rich calls this method to print the object."""
        for number, columns in enumerate(self._groups(options.max_width)):
            if number:
                yield ""
            yield self._table(columns, column_widths(columns, options.max_width))

    def _groups(self, width: int) -> list[list[TableColumn]]:
        """Divide the columns into groups that each fit ``width``; optional columns are left out first."""
        columns = list(self.columns)
        for column in [column for column in columns if column.is_optional]:
            if smallest_table_width(columns) > width:
                columns.remove(column)
        groups = [columns[:1]]  # every group starts with the first column
        for column in columns[1:]:
            if len(groups[-1]) > 1 and smallest_table_width([*groups[-1], column]) > width and self.has_titles:
                groups.append(columns[:1])
            groups[-1].append(column)
        return groups

    def _table(self, columns: Sequence[TableColumn], widths: Sequence[int]) -> Table:
        """Return a rich table of these columns, whose cells are wrapped to these widths."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        grid = Table(
            box=box.SIMPLE_HEAD if self.has_titles else None,
            show_header=self.has_titles,
            show_edge=False,
            pad_edge=False,
            padding=(0, GAP - 1 if self.has_titles else GAP, 0, 0),  # with titles, the box adds a space
        )
        for column, width in zip(columns, widths, strict=True):
            justify: JustifyMethod = "right" if column.is_numeric else "left"
            title = wrapped(Text(column.title), width)
            grid.add_column(title, justify=justify, style=column.style, width=width, overflow="fold")
        for row in zip(*(column.cells for column in columns), strict=True):
            grid.add_row(*(wrapped(cell, width) for cell, width in zip(row, widths, strict=True)))
        return grid


def smallest_table_width(columns: Sequence[TableColumn]) -> int:
    """Return the width below which columns side by side would break a word."""
    return sum(column.smallest_width for column in columns) + GAP * (len(columns) - 1)


def column_widths(columns: Sequence[TableColumn], width: int) -> list[int]:
    """Return the widths of columns such that the table is at most ``width`` wide and needs few lines.

    Every column starts at the width at which no cell wraps. While the table is too wide, the column whose narrowing by
    one character adds the fewest lines is narrowed.
    """
    available = width - GAP * (len(columns) - 1)
    widths = [max(1, min(column.natural_width, available)) for column in columns]
    smallest = [column.smallest_width for column in columns]
    heights = [column.heights(width) for column, width in zip(columns, widths, strict=True)]  # lines of every cell
    while sum(widths) > available and max(widths) > 1:
        reducible = [index for index in range(len(widths)) if widths[index] > smallest[index]]
        best_cost: tuple[int, int] | None = None
        # If no column can be narrowed without breaking a word, the widest one is narrowed.
        for index in reducible or [widths.index(max(widths))]:
            narrower = columns[index].heights(widths[index] - 1)
            cells_by_row = zip(*heights[:index], narrower, *heights[index + 1 :], strict=True)
            table_height = sum(max(cells) for cells in cells_by_row)
            cost = (table_height, -widths[index])  # among equal heights, prefer the widest column
            if best_cost is None or cost < best_cost:
                best_cost, best_index, best_heights = cost, index, narrower
        heights[best_index] = best_heights
        widths[best_index] -= 1
    return widths


def pieces(line: str) -> list[str]:
    """Split a line at the places where it may be wrapped: before spaces, and inside long words after punctuation.

    >>> pieces("last 10 % of"), pieces("resnet18(norm=batch,groups=2,stem=cifar)")
    (['last', ' 10 %', ' of'], ['resnet18(', 'norm=batch,', 'groups=2,', 'stem=cifar)'])
    """
    words: list[str] = _WORD.findall(line)
    parts: list[str] = []
    for word in words:
        parts += _BREAK_IN_LONG_WORD.split(word) if len(word.strip()) > LONG_WORD else [word]
    return parts


def line_breaks(line: str, width: int) -> list[int]:
    """Return the positions at which a line is wrapped, such that its parts are at most ``width`` wide where possible.

    >>> line_breaks("one two three", 8)
    [7]
    """
    if len(line) <= width:
        return []
    breaks = []
    start = position = 0  # of the current output line, and of the current piece
    for piece in pieces(line):
        end = position + len(piece)
        if end - start > width and position > start:
            breaks.append(position)
            start = end - len(piece.lstrip())  # spaces at the beginning of a line are dropped
        position = end
    return breaks


def wrapped(text: Text, width: int) -> Text:
    """Return a text with line breaks where lines are wider than ``width``."""
    from rich.text import Text

    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        first, *others = line.divide(line_breaks(line.plain, width))
        lines.append(first)
        for part in others:
            spaces = len(part) - len(part.plain.lstrip())
            lines.append(part[spaces:])
    return Text("\n").join(lines)


def columns_of(titles: Iterable[str], rows: Iterable[Iterable[Text]]) -> list[TableColumn]:
    """Return the columns of a table, given their titles and the rows."""
    columns = [TableColumn(title, []) for title in titles]
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            column.cells.append(cell)
    return columns
