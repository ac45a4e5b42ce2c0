"""Documentation of algorithms: docstrings of their parts, and differences between papers and their published code."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

_SOURCE = re.compile(r"\s*\(([^()]*(?:\b(?:19|20)\d\d\b|\beqs?\. )[^()]*)\)$")
"""Parentheses at the end of a title that contain a year or an equation number."""


class Description(NamedTuple):
    """The pieces into which ``describe`` splits a docstring; ``str`` joins them into plain text."""

    title: str
    source: str
    """Algorithm, paper and equation numbers."""
    equations: tuple[str, ...]
    """The lines of the indented block."""
    remarks: str
    """All other text: paragraphs, separated by empty lines, and lists of symbols with one item per line."""

    def __str__(self) -> str:
        head = f"{self.title} ({self.source})" if self.source else self.title
        return "\n\n".join(filter(None, (f"{head}." if head else "", "\n".join(self.equations), self.remarks)))


def describe(part: object) -> Description:
    """Split the docstring of an algorithm's part, given as its class or an instance; missing pieces are empty.

    The first paragraph is the title, with the source in parentheses at its end. Indented paragraphs are equations,
    doctests are dropped, and everything else is remarks. Line breaks remain only between paragraphs and list items.

    >>> from fedflat.algorithms.drift import Prox
    >>> prox = describe(Prox)
    >>> prox.title, prox.source
    ("A proximal term pulls the client's model towards the received one", 'FedProx; Li et al. 2020, eq. 2')
    >>> prox.equations
    ('d_k = g + mu (y_k - z)',)
    >>> prox.remarks.splitlines()[0]
    '- d_k: direction of local step k'
    """
    text = inspect.getdoc(part if isinstance(part, type) else type(part)) or ""
    paragraphs = [block for block in re.split(r"\n\s*\n", text) if not block.lstrip().startswith(">>>")]
    title = " ".join(paragraphs[0].split()).removesuffix(".") if paragraphs else ""
    source = _SOURCE.search(title)
    equations: list[str] = []
    remarks: list[str] = []
    for paragraph in paragraphs[1:]:
        if paragraph.startswith("    "):
            equations += [line.strip() for line in paragraph.splitlines()]
        else:
            remarks.append("\n".join(" ".join(item.split()) for item in re.split(r"\n(?=- )", paragraph)))
    return Description(
        title[: source.start()] if source else title,
        source[1] if source else "",
        tuple(equations),
        "\n\n".join(remarks).replace("``", "`"),
    )


@dataclass(frozen=True)
class Difference:
    """One difference between a paper and published code."""

    number: str
    """Its number in the documentation, D1, D2, ..."""
    where: str
    """The paper, and file and lines of the published code."""
    fault: str
    """What differs."""
    here: str
    """What fedflat does, and the parameter that selects the other form."""


_FILE = Path(__file__).with_name("differences.yaml")
DIFFERENCES: dict[str, Difference] = {
    number: Difference(number, **entry) for number, entry in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
}
"""Differences by number."""
