"""A cell of a table: what is printed in it, and the runs from which it is formed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from fedflat.errors import UserError
from fedflat.experiment.config import Config, config
from fedflat.papers.numbers import Form, Gain, Published, RoundsTo, form, read
from fedflat.papers.schema import Protocol, Words
from fedflat.text import parse

if TYPE_CHECKING:
    from fedflat.papers.library import Table

_WORD = re.compile(r"\{(\w+)\}")
OR = " | "
"""Between algorithms of which a paper reports the best."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell; ``name`` is row/column."""

    name: str
    labels: tuple[str, ...]
    """Of its column."""
    published: Published | None
    words: Words = field(repr=False)
    table: Table = field(repr=False)

    @property
    def protocol(self) -> Protocol:
        """How its runs were done."""
        return self.table.paper.protocol(str(self.words["protocol"]))

    @cached_property
    def needs(self) -> str:
        """What fedflat lacks to run it and form its number; empty where nothing."""
        from fedflat.data import DATASETS
        from fedflat.models.registry import MODELS

        lacks = [str(self.words["needs"])] if self.words["needs"] else []
        for experiment in self.configs[:1]:
            model, data = parse(experiment.model)[0].name, parse(experiment.data.dataset)[0].name
            lacks += [f"the model {model}"] * (model not in MODELS) + [f"the dataset {data}"] * (data not in DATASETS)
        return ", ".join(lacks)

    @property
    def weights(self) -> str:
        """The published weights from which its runs start, which a user must bring; empty where they start afresh."""
        return str(self.words["weights"])

    @property
    def unit(self) -> str:
        """What the number counts: % of all test examples, a share of them, rounds, points, seconds."""
        return "rounds" if isinstance(self.number, RoundsTo) else str(self.words["unit"])

    @cached_property
    def number(self) -> Form:
        """How it is formed."""
        return form(str(self._filled("number")))

    @property
    def evaluated(self) -> str:
        """The model that is evaluated: the server's own, or an average by its name."""
        return str(self._filled("evaluated"))

    @property
    def unreached(self) -> bool:
        """Whether what is printed says that a target was never reached."""
        return isinstance(self.number, RoundsTo) and (self.published is None or self.published.beyond)

    @cached_property
    def configs(self) -> tuple[Config, ...]:
        """The complete experiments behind it, with seed 0: one, several of which the best counts, or none for what follows from others."""
        if isinstance(self.number, Gain):
            return ()
        settings = {name: fill(text, self.words) for name, text in self.protocol.settings.items()}
        return tuple(_config(_nested(settings | {"algorithm": text})) for text in str(settings["algorithm"]).split(OR))

    def formed_from(self) -> tuple[Cell, Cell]:
        """For a gain: the cell it is taken of, and the one it is over."""
        gain = self.number
        assert isinstance(gain, Gain)
        own = next(
            label
            for level, label in zip(self.table.file.header, self.labels, strict=True)
            if "number" in (level[label] or {})
        )
        group, method = self.table.rows[list(self.table.cells).index(self.name) // len(self.table.columns)]

        def labels(label: str) -> tuple[str, ...]:
            return tuple(label if mine == own else mine for mine in self.labels)

        of = self.table.cell_at(group, method, labels(gain.of))
        return of, self.table.cell_at(group, gain.row or method, labels(gain.column or gain.of))

    def _filled(self, word: str) -> Any:
        return fill(self.words[word], self.words)


def make_cell(name: str, labels: tuple[str, ...], printed: str, words: Words, table: Table) -> Cell:
    """A cell from what is printed and the words of its row and column."""
    try:
        return Cell(name, labels, read(printed), words, table)
    except UserError as mistake:
        raise UserError(f"{table.full_name}, {name}: {mistake}") from None


def fill(value: Any, words: Words) -> Any:
    """A value with the words in its braces put in; where a word is all of it, the word's own value.

    >>> fill("fedsam(rho={sam})", {"sam": 0.1}), fill("{rounds}", {"rounds": 500})
    ('fedsam(rho=0.1)', 500)
    """
    if not isinstance(value, str) or "{" not in value:
        return value
    whole = _WORD.fullmatch(value)
    if whole:
        return fill(_word(whole[1], words), words)
    return _WORD.sub(lambda found: str(fill(_word(found[1], words), words)), value)


def _word(name: str, words: Words) -> Any:
    if name not in words:
        raise UserError(f"the word {{{name}}} has no value here; there are {', '.join(sorted(words))}")
    return words[name]


def _nested(settings: Words) -> Words:
    nested: Words = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value
    return nested


def _config(values: Words) -> Config:
    return _cached(json.dumps(values))


@cache
def _cached(text: str) -> Config:
    """Cells of one run share its config, and checking it takes time."""
    return config(json.loads(text))
