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
from fedflat.papers.cells import Cell, make_cell
from fedflat.papers.schema import Note, PaperFile, Part, Protocol, TableFile, Words

ORDER = ("fedswa", "fedwmsam", "wima", "eccv")
"""The works, as they are listed."""
_GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "ρ": "rho", "λ": "lambda", "η": "eta"}

File = TypeVar("File", bound=Part)


@dataclass(frozen=True, eq=False)
class Table:
    """A table or a figure of a paper, with its cells."""

    paper: Paper
    name: str
    file: TableFile = field(repr=False)

    @property
    def full_name(self) -> str:
        """As on the command line: ``fedswa/table3``."""
        return f"{self.paper.name}/{self.name}"

    @property
    def title(self) -> str:
        """As in the paper: ``Table 3``."""
        return re.sub(r"(\d+)", r" \1", self.name).capitalize()

    @cached_property
    def protocols(self) -> dict[str, Protocol]:
        """How its runs were done: the protocols of its cells, by name."""
        return {str(cell.words["protocol"]): cell.protocol for cell in self.cells.values()}

    @property
    def columns(self) -> list[tuple[str, ...]]:
        """The labels of every column, from the top of the header to its bottom."""
        return list(itertools.product(*self.file.header))

    @cached_property
    def rows(self) -> list[tuple[str, str]]:
        """The group and the method of every row."""
        return [(group.name, method) for group in self.file.all_groups for method in group.rows]

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """Every cell by its name, row by row."""
        found: dict[str, Cell] = {}
        for group in self.file.all_groups:
            for method, line in group.rows.items():
                printed = line.split()
                if len(printed) != len(self.columns):
                    raise UserError(
                        f"{self.full_name}: row {group.name} {method} has {len(printed)} numbers for {len(self.columns)} columns"
                    )
                for labels, text in zip(self.columns, printed, strict=True):
                    cell = make_cell(
                        self._name(group.name, method, labels),
                        labels,
                        text,
                        self._words(group.words, method, labels),
                        self,
                    )
                    if cell.name in found:
                        raise UserError(f"{self.full_name} has two cells named {cell.name}")
                    found[cell.name] = cell
        return found

    def choose(self, patterns: list[str] | tuple[str, ...]) -> list[Cell]:
        """The cells whose names fit any of the patterns; all of them where there is no pattern."""
        chosen = dict.fromkeys(name for pattern in patterns or ["*"] for name in self._fitting(pattern))
        return [cell for name, cell in self.cells.items() if name in chosen]

    def cell_at(self, group: str, method: str, labels: tuple[str, ...]) -> Cell:
        """The cell of a row and a column."""
        return self.cells[self._name(group, method, labels)]

    def notes_on(self, cell: Cell) -> list[Note]:
        """What there is to know about a cell."""
        return [note for note in self.file.notes if any(fnmatchcase(cell.name, pattern) for pattern in note.cells)]

    def _fitting(self, pattern: str) -> list[str]:
        fitting = [name for name in self.cells if fnmatchcase(name, pattern.lower())]
        if not fitting:
            raise one_of(f"cell of {self.full_name}", pattern, self.cells, f"fedflat papers {self.full_name} --cells")
        return fitting

    def _name(self, group: str, method: str, labels: tuple[str, ...]) -> str:
        return f"{slug(f'{group} {method}')}/{slug(' '.join(labels))}"

    def _words(self, of_group: Words, method: str, labels: tuple[str, ...]) -> Words:
        """The words of a cell; those of the header and of the row count more than the rules', the rules' more than the protocol's."""
        methods = self.paper.file.methods | self.file.methods
        if method not in methods:
            raise one_of(f"method of {self.full_name}", method, methods)
        meaning = methods[method]
        own: Words = {} if isinstance(meaning, dict) else {"algorithm": meaning}
        for level, label in zip(self.file.header, labels, strict=True):
            own |= level[label] or {}
        own |= of_group | (meaning if isinstance(meaning, dict) else {})
        name = str(own.get("protocol", self.file.protocol))
        protocol = self.paper.protocol(name)
        general = {"protocol": name, "number": protocol.number, "unit": protocol.unit, "evaluated": "server"}
        general |= {"needs": "", "weights": ""}
        words: Words = general | protocol.words | self.file.words | own
        for rule in [*protocol.rules, *self.file.rules]:
            if rule.holds(words):
                words |= rule.then | {name: own[name] for name in rule.then if name in own}
        return words


@dataclass(frozen=True, eq=False)
class Paper:
    """A work with its tables and figures."""

    name: str
    file: PaperFile = field(repr=False)
    tables: dict[str, Table] = field(default_factory=dict, repr=False)

    def protocol(self, name: str) -> Protocol:
        """A protocol by its name."""
        if name not in self.file.protocols:
            raise one_of(f"protocol of {self.name}", name, self.file.protocols)
        return self.file.protocols[name]

    def table(self, name: str) -> Table:
        """A table or figure by its short name."""
        if name not in self.tables:
            raise UserError(f"{self.name} has no '{name}' here; it has {', '.join(self.tables)}")
        return self.tables[name]


@cache
def papers() -> dict[str, Paper]:
    """All papers by name."""
    return {name: _read_paper(name) for name in ORDER}


def find(name: str) -> Paper | Table:
    """The paper or the table that a name such as ``fedswa`` or ``fedswa/table3`` means."""
    paper, slash, table = name.strip("/").lower().partition("/")
    if paper not in papers():
        raise one_of("paper", paper, papers(), "fedflat papers")
    found = papers()[paper]
    return found.table(table.replace(" ", "")) if slash else found


def find_table(name: str) -> Table:
    """The table that a name such as ``fedswa/table3`` means."""
    found = find(name)
    if isinstance(found, Paper):
        raise UserError(
            f"'{name}' is a paper; expected one of its tables or figures, for example {name}/{next(iter(found.tables))}"
        )
    return found


def slug(text: str) -> str:
    """A label as part of a name.

    >>> slug("FedSWA (i)"), slug("α=0.5/0.05 5cl")
    ('fedswa-i', 'alpha-0.5-0.05-5cl')
    """
    for letter, word in _GREEK.items():
        text = text.replace(letter, f" {word} ")
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _read_paper(name: str) -> Paper:
    folder = resources.files("fedflat.papers") / "data" / name
    paper = Paper(name, _checked(PaperFile, f"{name}/paper.yaml", (folder / "paper.yaml").read_text("utf-8")))
    names = sorted(
        (file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name != "paper.yaml"), key=_in_order
    )
    for table in names:
        file = _checked(TableFile, f"{name}/{table}.yaml", (folder / f"{table}.yaml").read_text("utf-8"))
        paper.tables[table] = Table(paper, table, file)
    return paper


def _in_order(name: str) -> tuple[bool, int]:
    return name.startswith("figure"), int(re.sub(r"\D", "", name) or 0)


def _checked(kind: type[File], name: str, text: str) -> File:
    values: Any = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{name} is not as expected: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
