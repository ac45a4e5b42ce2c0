"""Mistakes that a user can mend, each told in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what is wrong, what was expected, and what to do."""


def one_of(what: str, name: object, known: Iterable[str], see: str = "") -> UserError:
    """The error for an unknown name, with the nearest valid ones and where to see them all.

    >>> str(one_of("algorithm", "fedsma", ["fedavg", "fedsam", "fedswa"], "fedflat algorithms"))
    "there is no algorithm 'fedsma'; did you mean fedswa or fedsam or fedavg? (all of them: fedflat algorithms)"
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.6)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif len(names) <= 12:
        hint = f"expected one of {', '.join(names)}" if names else "none is known"
    else:
        hint = f"for example {', '.join(names[:5])}"
    more = f" (all of them: {see})" if see else ""
    return UserError(f"there is no {what} '{name}'; {hint}{more}")
