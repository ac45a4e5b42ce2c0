"""A cell of a table: its printed number, and the experiments behind it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fedflat.errors import UserError
from fedflat.experiment.config import Config, parse_config
from fedflat.papers.numbers import Gain, Published, RoundsTo, Statistic, parse_statistic
from fedflat.papers.schema import Protocol, Words
from fedflat.setting_names import nest
from fedflat.text import parse

_WORD = re.compile(r"\{(\w+)\}")
ALTERNATIVES = " | "
"""Separates algorithms of which a paper reports the best."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell of a published table: its printed number, and how fedflat reproduces it.

    Attributes:
        name: row and column, e.g. ``fedavg/cifar100-accuracy``.
        table: full name of its table, e.g. ``fedswa/table3``.
        labels: the labels of its column, one per level of the header.
        published: the printed number; None if nothing is printed.
        words: values of the words in braces of the data files, e.g. ``alpha`` of ``dirichlet(alpha={alpha})``.
        protocol: the experimental setup that the paper states for this cell.
    """

    name: str
    table: str
    labels: tuple[str, ...]
    published: Published | None
    words: Words = field(repr=False)
    protocol: Protocol = field(repr=False)

    @cached_property
    def needs(self) -> str:
        """What the cell needs but fedflat lacks: a model, a dataset, what the data file states; empty if nothing."""
        from fedflat.data import DATASETS
        from fedflat.models.registry import MODELS

        missing = [str(self.words["needs"])] if self.words["needs"] else []
        if self.configs:  # all of them use the same model and dataset
            experiment = self.configs[0]
            model, dataset = parse(experiment.model)[0].name, parse(experiment.data.dataset)[0].name
            if model not in MODELS:
                missing.append(f"the model {model}")
            if dataset not in DATASETS:
                missing.append(f"the dataset {dataset}")
        return ", ".join(missing)

    @property
    def weights(self) -> str:
        """The published weights that its runs start from and that the user must supply; empty if they start fresh."""
        return str(self.words["weights"])

    @property
    def unit(self) -> str:
        """Unit of the number: %, share, rounds, points or seconds."""
        return "rounds" if isinstance(self.statistic, RoundsTo) else str(self.words["unit"])

    @cached_property
    def statistic(self) -> Statistic:
        """How the number is computed."""
        return parse_statistic(str(substitute(self.words["number"], self.words)))

    @property
    def evaluated(self) -> str:
        """The evaluated model: ``server``, or the name of an average."""
        return str(substitute(self.words["evaluated"], self.words))

    @property
    def is_unreached(self) -> bool:
        """Whether the paper reports that a target was never reached."""
        return isinstance(self.statistic, RoundsTo) and (self.published is None or self.published.is_bound)

    @cached_property
    def configs(self) -> tuple[Config, ...]:
        """The experiments behind the cell, with seed 0.

        A cell has several if the paper reports the best of several algorithms, and none if it is a gain, which is
        computed from two other cells.
        """
        if isinstance(self.statistic, Gain):
            return ()
        stated = {name: substitute(value, self.words) for name, value in self.protocol.settings.items()}
        settings = {"engine.precision": "float32"} | stated  # the same on every device, so that results are comparable
        algorithms = str(settings["algorithm"]).split(ALTERNATIVES)
        return tuple(_config(json.dumps(nest(settings | {"algorithm": algorithm}))) for algorithm in algorithms)


def substitute(value: Any, words: Words) -> Any:
    """Replace the words in braces of a text by their values, which may contain further words in braces.

    A text that is a single word in braces becomes the value itself, of whatever type. Values other than text are
    returned unchanged.

    >>> substitute("fedsam(rho={sam})", {"sam": 0.1}), substitute("{rounds}", {"rounds": 500})
    ('fedsam(rho=0.1)', 500)
    """
    if not isinstance(value, str) or "{" not in value:
        return value

    def word_value(match: re.Match[str]) -> Any:
        """Return the value of a matched ``{word}``; words in braces within the value are replaced as well."""
        name = match[1]
        if name not in words:
            raise UserError(f"the word {{{name}}} has no value; expected one of {', '.join(sorted(words))}")
        return substitute(words[name], words)

    single_word = _WORD.fullmatch(value)
    return word_value(single_word) if single_word else _WORD.sub(lambda match: str(word_value(match)), value)


@cache
def _config(text: str) -> Config:
    """Read a config from JSON; cached, since many cells share a run and validation takes time."""
    return parse_config(json.loads(text))
