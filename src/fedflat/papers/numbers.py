"""Numbers as papers print them, and how each was formed from a run.

>>> read("79.6±0.2")
Published(text='79.6±0.2', value=79.6, plus_minus=0.2, beyond=False)
>>> read("1000+").beyond, read("N/A").value, read("-") is None
(True, None, True)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
        raise UserError(f"cannot read the printed number '{text}'; expected 79.6, 79.6±0.2, 1000+, N/A, or - where nothing is printed")
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
class Eigenvalue(Form):
    """The largest eigenvalue of the Hessian of the training loss at the final model, or its ratio to the ``over``-th."""

    over: int | None = param(None, "none is the eigenvalue itself", low=2)


@dataclass(frozen=True)
class ClientSeconds(Form):
    """Seconds of computation of the clients, on the authors' machine."""


FORMS: dict[str, type[Form]] = {
    "last": Last,
    "best": Best,
    "mean": Mean,
    "rounds-to": RoundsTo,
    "gain": Gain,
    "eigenvalue": Eigenvalue,
    "client-seconds": ClientSeconds,
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
