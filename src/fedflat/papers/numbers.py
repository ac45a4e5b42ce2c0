"""Numbers as papers print them, and how each was formed from a run.

>>> read("79.6±0.2")
Published(text='79.6±0.2', value=79.6, plus_minus=0.2, beyond=False)
>>> read("1000+").beyond, read("N/A").value, read("-") is None
(True, None, True)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fedflat.errors import UserError, one_of
from fedflat.text import changed, make, param, parse_one, show

_PRINTED = re.compile(r"(?P<value>[+-]?\d+(?:\.\d+)?)(?:±(?P<spread>\d+(?:\.\d+)?))?(?P<beyond>\+?)")
NOT_PRINTED, NOT_AVAILABLE = "-", "N/A"


@dataclass(frozen=True)
class Published:
    """One printed number."""

    text: str
    value: float | None
    plus_minus: float | None = None
    beyond: bool = False
    """Whether only a bound is printed: 1000+ is a target not reached in 1000 rounds."""

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit.

        >>> read("79.6±0.2").rounding, read("574").rounding
        (0.05, 0.5)
        """
        digits = self.text.partition("±")[0].partition(".")[2].rstrip("+")
        return float(0.5 / 10 ** len(digits))


def read(text: str) -> Published | None:
    """A printed number; None where nothing is printed."""
    if text == NOT_PRINTED:
        return None
    if text == NOT_AVAILABLE:
        return Published(text, None)
    found = _PRINTED.fullmatch(text)
    if not found:
        raise UserError(
            f"cannot read the printed number '{text}'; expected 79.6, 79.6±0.2, 1000+, N/A, or - where nothing is printed"
        )
    spread = found["spread"]
    return Published(text, float(found["value"]), None if spread is None else float(spread), bool(found["beyond"]))


# --- how a number is formed --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How a reported number is formed from a run, or from other numbers of its table."""

    @property
    def text(self) -> str:
        """The shortest text of the form."""
        name = next(name for name, kind in FORMS.items() if kind is type(self))
        return show(name, changed(self))


@dataclass(frozen=True)
class Last(Form):
    """The last evaluation."""


@dataclass(frozen=True)
class Best(Form):
    """The highest of all evaluations: optimistic, since the test set chose it."""


@dataclass(frozen=True)
class Mean(Form):
    """The mean over the evaluations of the last rounds."""

    rounds: int = param(100, "how many rounds that is", low=1)
    until: int | None = param(None, "the round at which they end; none is the last", low=1)


@dataclass(frozen=True)
class RoundsTo(Form):
    """The first round whose evaluation reaches a target."""

    target: float = param(0.5, "the target, as a share", low=0, high=1)


@dataclass(frozen=True)
class Gain(Form):
    """By how much one number of the table exceeds another: in the column ``of``, over a row or over another column."""

    of: str = param("", "the label of the column whose number is taken")
    row: str = param("", "the row whose number in that column is subtracted")
    column: str = param("", "or the label of the column whose number in this row is subtracted")
    relative: bool = param(False, "in per cent of what is subtracted")


@dataclass(frozen=True)
class ClientSeconds(Form):
    """Seconds of a round, which differ from machine to machine."""


@dataclass(frozen=True)
class OfModels(Form):
    """What is measured on a model of a run once the run is over; ``afterwards`` does it."""


@dataclass(frozen=True)
class Eigenvalue(OfModels):
    """The largest eigenvalue of the Hessian of the training loss, or its ratio to the ``over``-th."""

    over: int | None = param(None, "none is the eigenvalue itself", low=2)
    count: int = param(1, "how many of the largest are computed and kept, for a picture of them", low=1)

    @property
    def needed(self) -> int:
        """How many of the largest eigenvalues it takes."""
        return max(self.over or 1, self.count)


@dataclass(frozen=True)
class ClientEigenvalue(OfModels):
    """The highest, over the clients of the next round, of the largest eigenvalue of a client's model on its own data."""


@dataclass(frozen=True)
class Corrupted(OfModels):
    """The metric on corrupted test images of one severity, averaged over corruptions."""

    severity: int = param(5, "from 1 to 5", low=1, high=5)


@dataclass(frozen=True)
class OnClients(OfModels):
    """The metric on each client's own training data, averaged over clients."""


@dataclass(frozen=True)
class Features(OfModels):
    """The norm of the output on each client's data, averaged over clients."""


@dataclass(frozen=True)
class Domains(OfModels):
    """The metric on the test examples of those domains that clients trained on, or of the others."""

    part: Literal["seen", "unseen"] = param("seen", "which of them")


FORMS: dict[str, type[Form]] = {
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
    "domains": Domains,
}


def form(text: str) -> Form:
    """The form that a text names.

    >>> form("mean(until=5000)"), form("rounds-to(target=0.78)").text
    (Mean(rounds=100, until=5000), 'rounds-to(target=0.78)')
    """
    call = parse_one(text)
    if call.name not in FORMS:
        raise one_of("way to form a number", call.name, FORMS)
    return make(FORMS[call.name], call, "number")
