"""Accuracy curves of the algorithms on digits, from the numbers that docs/digits_table.py measured."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from making.markdown import DOCS
from making.svg import FAINT, INK, band, drawing, polyline, rule, words

FILE = DOCS / "measured" / "digits_curves.json"
LEARNING_RATES = {"local-adamw": 0.01, "fedadamw": 0.01, "local-muon": 0.03, "fedmuon": 0.03}
"""Learning rates of algorithms for which the default, 0.1, is too large."""
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 150, 22, 40
OWN, BASE = "#1b6ca8", "#d1495b"


@cache
def measured() -> dict[str, Any]:
    """The evaluated rounds and, for each algorithm, mean and standard deviation over seeds of the accuracy in percent."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"rounds": [], "curves": {}}


def curve(name: str) -> str | None:
    """An SVG with the curves of an algorithm, FedAvg and, in faint grey, all others; None if it was not measured."""
    rounds, curves = measured()["rounds"], measured()["curves"]
    if name not in curves:
        return None
    own, base = curves[name]["mean"], curves["fedavg"]["mean"]
    low = 60.0 if min(own[len(own) // 4 :]) > 60 else 0.0
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM + 4
    parts = [
        *_axes(low, rounds[-1]),
        f'<clipPath id="frame"><rect x="{LEFT}" y="{TOP - 4}" width="{width}" height="{height}"/></clipPath>',
        '<g clip-path="url(#frame)">',
    ]
    for other, values in curves.items():
        if other not in (name, "fedavg"):
            parts.append(polyline(_line(rounds, values["mean"], low), "#9aa5b1", 0.8, 0.35))
    for label, colour in {"fedavg": BASE, name: OWN}.items():
        mean, std = curves[label]["mean"], curves[label]["std"]
        edges = [[m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1)]
        parts.append(band(*(_line(rounds, edge, low) for edge in edges), colour))
        parts.append(polyline(_line(rounds, mean, low), colour, 2.2))
    parts += ["</g>", *_labels(name, own[-1], base[-1], low)]
    return drawing(WIDTH, HEIGHT, parts, f"Test accuracy of {name} on digits")


def _x(round: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * round / last


def _y(value: float, low: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (100 - value) / (100 - low)


def _line(rounds: list[int], values: list[float], low: float) -> list[tuple[float, float]]:
    return [(_x(round, rounds[-1]), _y(value, low)) for round, value in zip(rounds, values, strict=True)]


def _axes(low: float, last: int) -> list[str]:
    parts = []
    for value in range(int(low), 101, 10 if low else 20):
        y = _y(value, low)
        parts += [rule(LEFT, y, WIDTH - RIGHT, y), words(LEFT - 8, y + 4, f"{value} %", size=11, anchor="end")]
    for round in range(0, last + 1, 10):
        parts.append(words(_x(round, last), HEIGHT - BOTTOM + 18, str(round), size=11, anchor="middle"))
    parts.append(words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "communication round", size=11, anchor="middle"))
    return parts


def _labels(name: str, own: float, base: float, low: float) -> list[str]:
    """Names at the ends of the lines, moved apart if they would overlap."""
    x, own_y, base_y = WIDTH - RIGHT + 8, _y(own, low) + 4, _y(base, low) + 4
    if name != "fedavg" and abs(own_y - base_y) < 15:
        middle, sign = (own_y + base_y) / 2, -1 if own >= base else 1
        own_y, base_y = middle + sign * 7.5, middle - sign * 7.5
    parts = [words(x, own_y, f"{name}  {own:.1f}", colour=OWN, bold=True)]
    if name != "fedavg":
        parts.append(words(x, base_y, f"fedavg  {base:.1f}", colour=BASE))
    parts.append(words(x, HEIGHT - BOTTOM, "grey: other algorithms", size=10, colour=FAINT))
    return [*parts, words(LEFT, TOP - 8, "test accuracy, mean ± standard deviation over 3 seeds", size=11, colour=INK)]
