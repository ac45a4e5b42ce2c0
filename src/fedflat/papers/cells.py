"""A cell of a table: what is printed in it, and the experiments behind it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fedflat.errors import UserError
from fedflat.experiment.campaign.sweep_file import nested
from fedflat.experiment.config import Config, config
from fedflat.papers.numbers import Gain, Published, RoundsTo, Statistic, statistic
from fedflat.papers.schema import Protocol, Words
from fedflat.text import parse

_WORD = re.compile(r"\{(\w+)\}")
OR = " | "
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
        return statistic(str(fill(self.words["number"], self.words)))

    @property
    def evaluated(self) -> str:
        """The evaluated model: ``server``, or the name of an average."""
        return str(fill(self.words["evaluated"], self.words))

    @property
    def unreached(self) -> bool:
        """Whether the paper reports that a target was never reached."""
        return isinstance(self.statistic, RoundsTo) and (self.published is None or self.published.beyond)

    @cached_property
    def configs(self) -> tuple[Config, ...]:
        """The experiments behind it, with seed 0: one, or several of which the best counts; none for a gain."""
        if isinstance(self.statistic, Gain):
            return ()
        settings = {name: fill(text, self.words) for name, text in self.protocol.settings.items()}
        algorithms = str(settings["algorithm"]).split(OR)
        return tuple(_config(json.dumps(nested(settings | {"algorithm": text}))) for text in algorithms)


def fill(value: Any, words: Words) -> Any:
    """A value with the words in its braces inserted; a text that is a single word becomes that word's value.

    >>> fill("fedsam(rho={sam})", {"sam": 0.1}), fill("{rounds}", {"rounds": 500})
    ('fedsam(rho=0.1)', 500)
    """
    if not isinstance(value, str) or "{" not in value:
        return value
    single = _WORD.fullmatch(value)
    if single:
        return fill(_word(single[1], words), words)
    return _WORD.sub(lambda match: str(fill(_word(match[1], words), words)), value)


def _word(name: str, words: Words) -> Any:
    if name not in words:
        raise UserError(f"the word {{{name}}} has no value; expected one of {', '.join(sorted(words))}")
    return words[name]


@cache
def _config(text: str) -> Config:
    """A config from JSON; cached, since many cells share a run and validation takes time."""
    return config(json.loads(text))
