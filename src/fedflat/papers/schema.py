"""The data files, validated on reading: papers, protocols and tables.

Everything that varies within a table is a *word*, a named value: the dataset, the method's algorithm, the level of
heterogeneity. Protocols, tables, header labels, groups of rows and methods all set words, and a protocol's settings
refer to words in braces. A table file therefore holds the printed numbers and little else, and reads like the table.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Words = dict[str, Any]
"""Values by name; a text may contain other words in braces."""


class PaperData(BaseModel):
    """Base class of everything in a data file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(PaperData):
    """Words (named values of a data file) that follow from other words.

    The words of ``then`` apply to cells in which every word of ``if`` has the given value, or one of the given list.
    """

    if_: Words = Field(alias="if")
    then: Words

    def holds(self, words: Words) -> bool:
        """Return whether the rule applies to a cell with these words."""
        allowed = {name: value if isinstance(value, list) else [value] for name, value in self.if_.items()}
        return all(words.get(name) in values for name, values in allowed.items())


class Protocol(PaperData):
    """The experimental setup of the runs behind some tables."""

    says: str
    """Summary in one sentence."""
    words: Words = {}
    rules: list[Rule] = []
    settings: Words
    """fedflat's settings by full name, with words in braces."""
    number: str
    """The reported statistic; see ``numbers``."""
    unit: str = "%"
    seeds: int | None = None
    """Number of seeds over which the paper averages, if stated."""
    assumed: list[str] = []
    """Assumptions where the paper is silent."""


class Note(PaperData):
    """A remark on printed numbers."""

    cells: list[str] = []
    """The cells it concerns, as patterns of row/column."""
    kind: str = Field("note", pattern="^(note|misprint|gap|ocr)$")
    """misprint: contradicts the paper itself; gap: missing in our copy of the text; ocr: garbled in our copy."""
    printed: str = ""
    """The text of our copy, where the file corrects it."""
    says: str


class Statement(PaperData):
    """A number that the running text states for a table or figure."""

    value: str
    """The number as printed."""
    says: str
    """What the number is."""


class RowGroup(PaperData):
    """Rows that share words."""

    name: str = ""
    words: Words = {}
    rows: dict[str, str]
    """The printed numbers from left to right, by method."""


class TableFile(PaperData):
    """A table or figure as written in its file."""

    caption: str
    protocol: str
    words: Words = {}
    rules: list[Rule] = []
    header: list[dict[str, Words | None]] = [{"value": None}]
    """Levels of the header from top to bottom, each with its labels and their words; columns are all combinations."""
    methods: dict[str, str | Words] = {}
    """The meaning of row names that the paper's own list lacks."""
    groups: list[RowGroup] = []
    rows: dict[str, str] = {}
    representative: str = ""
    """Name of the cell that represents the table when only one cell is run, e.g. at small scale."""
    picture: list[str] = []
    """The commands that draw a figure, with placeholders such as {models}; see ``pictures``."""
    bars: bool = False
    """Whether ``fedflat reproduce`` draws the measured numbers as bars."""
    states: list[Statement] = []
    notes: list[Note] = []

    @model_validator(mode="after")
    def _require_rows_or_groups(self) -> TableFile:
        """Reject a table with both ``rows`` and ``groups``, or with neither."""
        if bool(self.groups) == bool(self.rows):
            raise ValueError("a table has either rows or groups of rows")
        return self

    @property
    def all_groups(self) -> list[RowGroup]:
        """The groups; a plain table has one without a name."""
        return self.groups or [RowGroup(rows=self.rows)]


class PaperFile(PaperData):
    """A paper: its authors, its methods in fedflat's notation, and its protocols."""

    title: str
    authors: list[str]
    venue: str
    year: int
    documents: list[str]
    """The files of its text, in which a test finds every number again."""
    methods: dict[str, str | Words]
    """By method: the text of its algorithm, or its words."""
    protocols: dict[str, Protocol]
    notes: list[Note] = []
