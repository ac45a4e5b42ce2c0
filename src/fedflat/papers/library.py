"""Papers and tables by name: ``fedswa``, ``fedswa/table3``."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib import resources
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from fedflat.errors import UserError, one_of
from fedflat.papers.cells import Cell
from fedflat.papers.numbers import Gain, parse_number
from fedflat.papers.schema import Note, PaperData, PaperFile, Protocol, TableFile, Words

ORDER = ("fedswa", "fedwmsam", "wima", "eccv")
"""The papers in the order in which they are listed."""
_GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "ρ": "rho", "λ": "lambda", "η": "eta"}

File = TypeVar("File", bound=PaperData)


@dataclass(frozen=True, eq=False)
class PaperTable:
    """A table or figure of a paper, with its cells.

    In a data file, whatever varies between cells is a *word*: a named value, such as the dataset or the algorithm,
    that a protocol's settings refer to in braces. Header labels, groups of rows and methods define words.

    Attributes:
        paper: the paper that contains the table.
        name: short name, e.g. ``table3``.
        file: content of the table's data file.
    """

    paper: Paper
    name: str
    file: TableFile = field(repr=False)

    @property
    def full_name(self) -> str:
        """Name of the table on the command line, e.g. ``fedswa/table3``."""
        return f"{self.paper.name}/{self.name}"

    @property
    def title(self) -> str:
        """Name of the table in the paper, e.g. ``Table 3``."""
        return re.sub(r"(\d+)", r" \1", self.name).capitalize()

    @cached_property
    def protocols(self) -> dict[str, Protocol]:
        """The protocols of its cells, by name."""
        return {str(cell.words["protocol"]): cell.protocol for cell in self.cells.values()}

    @property
    def columns(self) -> list[tuple[str, ...]]:
        """Labels of every column, from the top to the bottom of the table's header."""
        return list(itertools.product(*self.file.header))

    @cached_property
    def rows(self) -> list[tuple[str, str]]:
        """The group and the method of every row."""
        return [(group.name, method) for group in self.file.all_groups for method in group.rows]

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """Every cell by name, row by row."""
        cells: dict[str, Cell] = {}
        for group in self.file.all_groups:
            for method, line in group.rows.items():
                numbers = line.split()
                if len(numbers) != len(self.columns):
                    raise UserError(
                        f"{self.full_name}: row {group.name} {method} has {len(numbers)} numbers "
                        f"for {len(self.columns)} columns"
                    )
                for labels, number in zip(self.columns, numbers, strict=True):
                    name = self._cell_name(group.name, method, labels)
                    if name in cells:
                        raise UserError(f"{self.full_name} has two cells named {name}")
                    cells[name] = self._make_cell(name, labels, number, self._words(group.words, method, labels))
        return cells

    def _make_cell(self, name: str, labels: tuple[str, ...], printed: str, words: Words) -> Cell:
        """Create a cell from its name, the labels of its column, its printed number and its words."""
        try:
            published = parse_number(printed)
        except UserError as error:
            raise UserError(f"{self.full_name}, {name}: {error}") from None
        return Cell(name, self.full_name, labels, published, words, self.paper.protocol(str(words["protocol"])))

    def choose(self, patterns: list[str] | tuple[str, ...]) -> list[Cell]:
        """Return the cells that match any of ``patterns``, e.g. ``fedavg/*`` or ``fedavg``, a row; default: all."""
        chosen: set[str] = set()
        for pattern in patterns or ["*"]:
            spellings = (pattern.lower(), f"{pattern.lower()}/*")
            matching = [name for name in self.cells if any(fnmatchcase(name, spelling) for spelling in spellings)]
            if not matching:
                hint = f"fedflat papers {self.full_name} --list-cells"
                raise one_of("cell", pattern, self.cells, hint, owner=self.full_name)
            chosen.update(matching)
        return [cell for name, cell in self.cells.items() if name in chosen]

    def cell_at(self, group: str, method: str, labels: tuple[str, ...]) -> Cell:
        """Return the cell in a row (group and method) and a column (its labels)."""
        return self.cells[self._cell_name(group, method, labels)]

    def sources(self, cell: Cell) -> tuple[Cell, ...]:
        """Return the cells whose runs are needed to compute the number of a cell.

        This is the cell itself or, for a gain (the difference of two cells), the two cells that are subtracted.
        """
        gain = cell.statistic
        if not isinstance(gain, Gain):
            return (cell,)
        row_index = list(self.cells).index(cell.name) // len(self.columns)
        group, method = self.rows[row_index]
        # A column has one label per header level. At one of these levels, the label declares the column a gain (by
        # the word ``number``). The columns from which the gain is computed differ from it only at that level.
        levels = zip(self.file.header, cell.labels, strict=True)
        gain_level = next(index for index, (level, label) in enumerate(levels) if "number" in (level[label] or {}))

        def source(row: str, label: str) -> Cell:
            """Return one of the two cells whose difference is the gain.

            It is in ``row`` of the gain's group. Its column is the gain's, but with ``label`` in place of the gain's
            own label at the header level ``gain_level``.
            """
            labels = (*cell.labels[:gain_level], label, *cell.labels[gain_level + 1 :])
            return self.cell_at(group, row, labels)

        # A gain subtracts another row in the same column, or another column in the same row.
        minuend, subtrahend = source(method, gain.of), source(gain.row or method, gain.column or gain.of)
        return minuend, subtrahend

    def notes_on(self, cell: Cell) -> list[Note]:
        """Return the notes that concern a cell."""
        return [note for note in self.file.notes if any(fnmatchcase(cell.name, pattern) for pattern in note.cells)]

    def _cell_name(self, group: str, method: str, labels: tuple[str, ...]) -> str:
        return f"{slug(f'{group} {method}')}/{slug(' '.join(labels))}"

    def _words(self, group_words: Words, method: str, labels: tuple[str, ...]) -> Words:
        """Collect the words (named values) of a cell.

        Later sources override earlier ones: defaults, protocol, table, rules (words that apply if others have given
        values), header, the row's group and its method. A method that is only the text of an algorithm comes before
        the header.

        Args:
            group_words: words of the row's group.
            method: name of the row's method.
            labels: labels of the cell's column, one per level of the header.
        """
        methods = self.paper.file.methods | self.file.methods
        if method not in methods:
            raise one_of("method", method, methods, owner=self.full_name)
        definition = methods[method]
        algorithm, method_words = ({}, definition) if isinstance(definition, dict) else ({"algorithm": definition}, {})
        cell_words: Words = {**algorithm}
        for level, label in zip(self.file.header, labels, strict=True):
            cell_words |= level[label] or {}
        cell_words |= group_words | method_words
        name = str(cell_words.get("protocol", self.file.protocol))
        protocol = self.paper.protocol(name)
        defaults = {
            "protocol": name,
            "number": protocol.number,
            "unit": protocol.unit,
            "evaluated": "server",
            "needs": "",
            "weights": "",
        }
        words: Words = defaults | protocol.words | self.file.words | cell_words
        for rule in [*protocol.rules, *self.file.rules]:
            if rule.holds(words):  # a rule never changes a word of the header or the row
                words |= {word: cell_words.get(word, value) for word, value in rule.then.items()}
        return words


@dataclass(frozen=True, eq=False)
class Paper:
    """A paper with its tables and figures."""

    name: str
    """Short name of the paper, e.g. ``fedswa``."""
    file: PaperFile = field(repr=False)
    """Content of the paper's data file: title, protocols and notes."""
    tables: dict[str, PaperTable] = field(default_factory=dict, repr=False)
    """Tables and figures by short name."""

    def protocol(self, name: str) -> Protocol:
        """Return a protocol by name."""
        if name not in self.file.protocols:
            raise one_of("protocol", name, self.file.protocols, owner=self.name)
        return self.file.protocols[name]

    def table(self, name: str) -> PaperTable:
        """Return a table or figure by its short name, e.g. ``table3``."""
        if name not in self.tables:
            raise UserError(f"{self.name} has no '{name}'; expected one of {', '.join(self.tables)}")
        return self.tables[name]


@cache
def papers() -> dict[str, Paper]:
    """All papers by name."""
    return {name: _read_paper(name) for name in ORDER}


def find(name: str) -> Paper | PaperTable:
    """Return the paper or table with a name such as ``fedswa`` or ``fedswa/table3``."""
    paper_name, slash, table = name.strip("/").lower().partition("/")
    if paper_name not in papers():
        raise one_of("paper", paper_name, papers(), "fedflat papers")
    paper = papers()[paper_name]
    return paper.table(table.replace(" ", "")) if slash else paper


def find_table(name: str) -> PaperTable:
    """Return the table or figure with a name such as ``fedswa/table3``."""
    table = find(name)
    if isinstance(table, Paper):
        example = f"{name}/{next(iter(table.tables))}"
        raise UserError(f"'{name}' is a paper; expected one of its tables or figures, for example {example}")
    return table


def find_cell(paper: str, key: str) -> Cell:
    """Return a cell by its paper and its key, e.g. ``table2/fedavg/cifar10-lenet-5-accuracy``."""
    table_name, _, name = key.partition("/")
    table = find_table(f"{paper}/{table_name}")
    if name not in table.cells:
        raise one_of("cell", name, table.cells, owner=table.full_name)
    return table.cells[name]


def slug(text: str) -> str:
    """Return a label in the form that is used in the names of cells.

    >>> slug("FedSWA (i)"), slug("α=0.5/0.05 5cl")
    ('fedswa-i', 'alpha-0.5-0.05-5cl')
    """
    for letter, word in _GREEK.items():
        text = text.replace(letter, f" {word} ")
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _read_paper(name: str) -> Paper:
    """Read a paper, and its tables and figures, from the data files in its folder."""
    folder = resources.files("fedflat.papers") / "data" / name
    paper = Paper(name, _validate(PaperFile, f"{name}/paper.yaml", (folder / "paper.yaml").read_text("utf-8")))
    tables = (file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name != "paper.yaml")
    for table in sorted(tables, key=_table_order):
        file = _validate(TableFile, f"{name}/{table}.yaml", (folder / f"{table}.yaml").read_text("utf-8"))
        paper.tables[table] = PaperTable(paper, table, file)
    return paper


def _table_order(table: str) -> tuple[bool, int]:
    """Sort key: tables before figures, each by number."""
    return table.startswith("figure"), int(re.sub(r"\D", "", table) or 0)


def _validate(kind: type[File], name: str, text: str) -> File:
    """Parse the YAML text of a data file into the model ``kind``; errors name the file and the first invalid field."""
    values: Any = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the C loader is faster
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{name} is invalid: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
