"""The data files, as checked on reading: what a paper is, what its protocols say, and how a table is written down.

Everything that varies in a table is a *word*: the dataset, the method's algorithm, the level of heterogeneity. Protocols, tables, header
labels, groups of rows and methods all give words; a protocol's settings are texts in which words stand in braces. So a table file holds the
printed numbers and little else, and reads like the table.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Words = dict[str, Any]
"""Values by name; a text may contain other words in braces."""


class Part(BaseModel):
    """A part of a data file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(Part):
    """Words that follow from others: ``then`` holds where every word of ``if`` has one of the values given."""

    if_: Words = Field(alias="if")
    then: Words

    def holds(self, words: Words) -> bool:
        """Whether the rule applies to these words."""
        return all(
            words.get(name) in (wanted if isinstance(wanted, list) else [wanted]) for name, wanted in self.if_.items()
        )


class Protocol(Part):
    """How the runs behind some tables were done."""

    says: str
    """In a sentence."""
    words: Words = {}
    rules: list[Rule] = []
    settings: Words
    """fedflat's settings by full name, with words in braces."""
    number: str
    """How a reported number is formed; see ``numbers``."""
    unit: str = "%"
    seeds: int | None = None
    """Over how many seeds the paper averages, where it says so."""
    assumed: list[str] = []
    """What the paper does not state, and what is taken for it."""


class Note(Part):
    """Something about printed numbers that a reader must know."""

    cells: list[str] = []
    """The cells it is about, as patterns of row/column."""
    kind: str = Field("note", pattern="^(note|misprint|gap|ocr)$")
    """A misprint contradicts the paper itself; a gap is missing in the text at hand; ocr is a number that the text at hand garbles."""
    printed: str = ""
    """What the text has instead, where the file holds something else."""
    says: str


class Statement(Part):
    """A number that the running text states for a table or a figure."""

    value: str
    says: str


class Group(Part):
    """Some rows that share words, printed under one another."""

    name: str = ""
    words: Words = {}
    rows: dict[str, str]
    """Under each method's name, the printed numbers from left to right."""


class TableFile(Part):
    """A table or a figure, as it is written down."""

    caption: str
    protocol: str
    words: Words = {}
    rules: list[Rule] = []
    header: list[dict[str, Words | None]] = [{"value": None}]
    """The levels of the header from top to bottom, each with its labels and the words they give; columns are all their combinations."""
    methods: dict[str, str | Words] = {}
    """What the rows' names mean, where the paper's own list is not enough."""
    groups: list[Group] = []
    rows: dict[str, str] = {}
    small: str = ""
    """The cell that stands for the table at small scale."""
    picture: str = ""
    """The command that draws a figure from its runs: {models} of the chosen cells, the {folder} of the first, or {out}, where all lie."""
    states: list[Statement] = []
    notes: list[Note] = []

    @model_validator(mode="after")
    def _one_kind_of_rows(self) -> TableFile:
        if bool(self.groups) == bool(self.rows):
            raise ValueError("a table has either rows or groups of rows")
        return self

    @property
    def all_groups(self) -> list[Group]:
        """The groups, of which a plain table has one without a name."""
        return self.groups or [Group(rows=self.rows)]


class PaperFile(Part):
    """A paper: who wrote it, what its methods are in fedflat's grammar, and its protocols."""

    title: str
    authors: list[str]
    venue: str
    year: int
    documents: list[str]
    """The files of its text, by which a test finds every number again."""
    methods: dict[str, str | Words]
    """A method's algorithm, or its words."""
    protocols: dict[str, Protocol]
    notes: list[Note] = []
