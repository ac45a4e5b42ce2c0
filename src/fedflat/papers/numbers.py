"""Numbers as papers print them, and the statistics of a run that they report.

>>> parse_number("79.6±0.2")
Published(text='79.6±0.2', value=79.6, plus_minus=0.2, is_bound=False)
>>> parse_number("1000+").is_bound, parse_number("N/A").value, parse_number("-") is None
(True, None, True)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fedflat.errors import UserError, one_of
from fedflat.text import changed, make, param, parse_one, show

_PRINTED = re.compile(r"(?P<value>[+-]?\d+(?:\.\d+)?)(?:±(?P<spread>\d+(?:\.\d+)?))?(?P<bound>\+?)")
NOT_PRINTED, NOT_AVAILABLE = "-", "N/A"


@dataclass(frozen=True)
class Published:
    """A number as printed in a paper.

    Attributes:
        text: the printed text, e.g. ``79.6±0.2``.
        value: the number; None if printed as N/A.
        plus_minus: the number after ±; None if there is none.
        is_bound: whether only a bound is printed: ``1000+`` is a target that was not reached in 1000 rounds.
    """

    text: str
    value: float | None
    plus_minus: float | None = None
    is_bound: bool = False

    @property
    def rounding(self) -> float:
        """The largest error of rounding to the printed digits: half a unit of the last one.

        >>> parse_number("79.6±0.2").rounding, parse_number("574").rounding
        (0.05, 0.5)
        """
        digits = self.text.partition("±")[0].partition(".")[2].rstrip("+")
        return float(0.5 / 10 ** len(digits))


def parse_number(text: str) -> Published | None:
    """Parse a printed number such as ``79.6±0.2``; return None for ``-``, which means that nothing is printed."""
    if text == NOT_PRINTED:
        return None
    if text == NOT_AVAILABLE:
        return Published(text, None)
    match = _PRINTED.fullmatch(text)
    if not match:
        raise UserError(
            f"cannot read the printed number '{text}'; "
            "expected 79.6, 79.6±0.2, 1000+, N/A, or - where nothing is printed"
        )
    plus_minus = float(match["spread"]) if match["spread"] else None
    return Published(text, float(match["value"]), plus_minus, is_bound=bool(match["bound"]))


@dataclass(frozen=True)
class Statistic:
    """How a reported number is computed from a run, or from other numbers of its table."""

    @property
    def text(self) -> str:
        """The text from which :func:`parse_statistic` makes this statistic: its name and non-default parameters."""
        name = next(name for name, kind in STATISTICS.items() if kind is type(self))
        return show(name, changed(self))


@dataclass(frozen=True)
class Last(Statistic):
    """The last evaluation."""


@dataclass(frozen=True)
class Best(Statistic):
    """The highest of all evaluations; optimistic, since the test set selects it."""


@dataclass(frozen=True)
class Mean(Statistic):
    """The mean over the evaluations of the last rounds."""

    rounds: int = param(100, "number of rounds", low=1)
    until: int | None = param(None, "last of these rounds; none means the last round of the run", low=1)


@dataclass(frozen=True)
class RoundsTo(Statistic):
    """The first round whose evaluation reaches a target."""

    target: float = param(0.5, "the target, as a share", low=0, high=1)


@dataclass(frozen=True)
class Gain(Statistic):
    """The difference of two numbers of the table.

    The first is the number in column ``of`` of the gain's own row. The second is the number in the same column of
    another row, or in another column of the same row.
    """

    of: str = param("", "label of the column to subtract from")
    row: str = param("", "the row whose number in that column is subtracted")
    column: str = param("", "or the label of the column whose number in this row is subtracted")
    relative: bool = param(False, "in per cent of the subtracted number")


@dataclass(frozen=True)
class ClientSeconds(Statistic):
    """Seconds per round, which depend on the machine."""


@dataclass(frozen=True)
class ModelStatistic(Statistic):
    """A statistic that ``post_hoc`` measures on a model of a finished run."""


@dataclass(frozen=True)
class Eigenvalue(ModelStatistic):
    """The largest Hessian eigenvalue of the training loss, or its ratio to the ``over``-th."""

    over: int | None = param(None, "rank of the eigenvalue to divide by; none means no division", low=2)
    count: int = param(1, "number of eigenvalues to compute and store, for a figure", low=1)

    @property
    def needed(self) -> int:
        """Number of largest eigenvalues to compute."""
        return max(self.over or 1, self.count)


@dataclass(frozen=True)
class ClientEigenvalue(ModelStatistic):
    """The maximum, over the next cohort, of the largest Hessian eigenvalue of a client's model on its own data."""


@dataclass(frozen=True)
class Corrupted(ModelStatistic):
    """The metric on corrupted test images of one severity, averaged over corruptions."""

    severity: int = param(5, "from 1 to 5", low=1, high=5)


@dataclass(frozen=True)
class OnClients(ModelStatistic):
    """The metric on each client's own training data, averaged over clients."""


@dataclass(frozen=True)
class Features(ModelStatistic):
    """The norm of the output on each client's data, averaged over clients."""


@dataclass(frozen=True)
class DomainMetric(ModelStatistic):
    """The metric on test examples of the domains that clients trained on, or of the others."""

    part: Literal["seen", "unseen"] = param("seen", "which domains")


STATISTICS: dict[str, type[Statistic]] = {
    "last": Last,
    "best": Best,
    "mean": Mean,
    "rounds-to": RoundsTo,
    "gain": Gain,
    "client-seconds": ClientSeconds,
    "eigenvalue": Eigenvalue,
    "client-eigenvalue": ClientEigenvalue,
    "corrupted": Corrupted,
    "on-clients": OnClients,
    "features": Features,
    "domains": DomainMetric,
}


def parse_statistic(text: str) -> Statistic:
    """Parse the text of a statistic, ``name(parameter=value)``.

    >>> parse_statistic("mean(until=5000)"), parse_statistic("rounds-to(target=0.78)").text
    (Mean(rounds=100, until=5000), 'rounds-to(target=0.78)')
    """
    call = parse_one(text)
    if call.name not in STATISTICS:
        raise one_of("statistic", call.name, STATISTICS)
    return make(STATISTICS[call.name], call, "number")
