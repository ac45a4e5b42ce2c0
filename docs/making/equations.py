"""A slot's docstring taken apart: what it is called, its equations one by one, where they come from, and what else is said."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

SYMBOLS = {
    "x": "the server's model",
    "z": "the model that clients receive and start from; x itself, unless a method looks ahead",
    "y_k": "a client's model after k of its K local steps, y_0 = z",
    "g": "the gradient of the loss on the client's current batch, at y_k or, with a perturbation e, at y_k + e",
    "e": "the perturbation, an offset at which a gradient is taken",
    "d_k": "the direction of local step k: y_(k+1) = y_k - eta_k d_k",
    "eta_k": "the local learning rate of step k; H is the sum of those a client has used in a round",
    "D_i": "client i's displacement in a round, y_K - z",
    "q": "what the server follows: the target that the drift slot gives, less x",
    "S, N": "the round's cohort, and the number of all clients; mean_S is a mean over the cohort, of displacements by federation.weighting, of all else uniform",
    "c_i, c, m, a_i, h_i, Delta": "vectors that clients (with an i) or the server keep between rounds, from 0",
    "unit(v)": "v / ||v|| by one l2 norm over all parameters",
    "t, T": "the round, from 0, and the number of rounds",
}
_EQUATION = re.compile(r"(broadcast )?[A-Za-z|][\w^{}+|']*(\([\w +]+\))? (=|<-) ")
_NEXT = re.compile(r"then |and |with |otherwise |starting |c_i\+ by ")
_SOURCE = re.compile(r"\s*\((?P<source>[^()]*(?:\b(?:19|20)\d\d\b|FedAvg|eq\.|C\d)[^()]*)\)\.?$")


@dataclass(frozen=True)
class Said:
    """What a docstring says of a slot."""

    title: str
    equations: tuple[str, ...]
    source: str
    more: str


def said_of(spec: Any) -> Said:
    """The docstring of a slot or its class, taken apart.

    >>> from fedflat.algorithms.drift import Cm
    >>> said_of(Cm).equations
    ('d_k = alpha g + (1 - alpha) Delta', 'Delta ← mean_S (z - y_K) / H')
    """
    text = inspect.getdoc(spec if isinstance(spec, type) else type(spec)) or ""
    first, _, more = text.partition("\n\n")
    first = " ".join(first.split())
    source = _SOURCE.search(first)
    if source:
        first = first[: source.start()]
    title, colon, rest = first.partition(": ")
    if not colon or _EQUATION.match(title):
        title, rest = "", first
    lines = _split(rest.rstrip("."))
    if not _EQUATION.match(lines[0]):
        return Said(first.rstrip("."), (), source["source"] if source else "", _clean(more))
    remarks = [line for line in lines if " = " not in line and " <- " not in line and not line.startswith("then ")]
    equations = tuple(_arrow(line) for line in lines if line not in remarks)
    said = "".join(f"{line[:1].upper()}{line[1:]}. " for line in remarks if not line.startswith("c_i+"))
    return Said(title, equations, source["source"] if source else "", (said + _clean(more)).strip())


def _split(text: str) -> list[str]:
    """Pieces between commas and semicolons, where an equation or a remark begins behind them."""
    pieces, begin = [], 0
    for found in re.finditer(r"[,;] |; | (?=with r_i)| and (?=c <-)", text):
        rest = text[found.end() :]
        begins = _EQUATION.match(rest) or _NEXT.match(rest) or found[0] == "; "
        if begins and text[: found.start()].count("(") == text[: found.start()].count(")"):
            pieces.append(text[begin : found.start()])
            begin = found.end()
    return [*pieces, text[begin:]]


def _arrow(text: str) -> str:
    text = text.replace(" <- ", " ← ").strip()
    return text.removeprefix("then ") if " = " in text or "←" in text else text


def _clean(text: str) -> str:
    return " ".join(text.replace("``", "`").replace(" <- ", " ← ").split())
