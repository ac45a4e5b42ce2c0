"""A cell of a table: its printed number, and the experiments behind it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fedflat.errors import UserError
from fedflat.experiment.config import Config, config
from fedflat.papers.numbers import Gain, Published, RoundsTo, Statistic, parse_statistic
from fedflat.papers.schema import Protocol, Words
from fedflat.setting_names import nest
from fedflat.text import parse

_WORD = re.compile(r"\{(\w+)\}")
ALTERNATIVES = " | "
"""Separates algorithms of which a paper reports the best."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell of a table."""

    name: str
    """row/column."""
    table: str
    """Full name of its table, e.g. ``fedswa/table3``."""
    labels: tuple[str, ...]
    """The labels of its column."""
    published: Published | None
    words: Words = field(repr=False)
    protocol: Protocol = field(repr=False)

    @cached_property
    def needs(self) -> str:
        """What fedflat lacks to reproduce it; empty if nothing."""
        from fedflat.data import DATASETS
        from fedflat.models.registry import MODELS

        missing = [str(self.words["needs"])] if self.words["needs"] else []
        for experiment in self.configs[:1]:
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
        """The experiments behind it, with seed 0: one, or several of which the best counts; none for a gain."""
        if isinstance(self.statistic, Gain):
            return ()
        settings = {name: substitute(value, self.words) for name, value in self.protocol.settings.items()}
        algorithms = str(settings["algorithm"]).split(ALTERNATIVES)
        return tuple(_config(json.dumps(nest(settings | {"algorithm": algorithm}))) for algorithm in algorithms)


def substitute(value: Any, words: Words) -> Any:
    """Replace words in braces by their values, recursively; a text that is a single word keeps the value's type.

    >>> substitute("fedsam(rho={sam})", {"sam": 0.1}), substitute("{rounds}", {"rounds": 500})
    ('fedsam(rho=0.1)', 500)
    """
    if not isinstance(value, str) or "{" not in value:
        return value

    def word_value(match: re.Match[str]) -> Any:
        name = match[1]
        if name not in words:
            raise UserError(f"the word {{{name}}} has no value; expected one of {', '.join(sorted(words))}")
        return substitute(words[name], words)

    single_word = _WORD.fullmatch(value)
    return word_value(single_word) if single_word else _WORD.sub(lambda match: str(word_value(match)), value)


@cache
def _config(text: str) -> Config:
    """Read a config from JSON; cached, since many cells share a run and validation takes time."""
    return config(json.loads(text))
