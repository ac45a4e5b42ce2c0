"""SVG drawings written as text, so that equal numbers give equal files."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]
FONT = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
INK, FAINT, GRID = "#22303c", "#6b7580", "#e3e7eb"


def drawing(width: int, height: int, parts: Sequence[str], title: str) -> str:
    """A complete SVG file with a white background, readable on dark pages too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" role="img">'
    background = f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>'
    return "\n".join([head, f"<title>{escaped(title)}</title>", background, *parts, "</svg>", ""])


def escaped(text: str) -> str:
    """Text with XML's special characters escaped."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def words(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    colour: str = FAINT,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    """A line of text."""
    weight = ' font-weight="600"' if bold else ""
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}'
    return f'<text x="{_n(x)}" y="{_n(y)}" {style}>{escaped(text)}</text>'


def polyline(points: Sequence[Point], colour: str, width: float = 2.0, opacity: float = 1.0) -> str:
    """A line through points."""
    faded = f' opacity="{opacity:g}"' if opacity < 1 else ""
    style = f'fill="none" stroke="{colour}" stroke-width="{width:g}" stroke-linejoin="round"{faded}'
    return f'<polyline points="{_points(points)}" {style}/>'


def band(lower: Sequence[Point], upper: Sequence[Point], colour: str) -> str:
    """The area between two lines."""
    return f'<polygon points="{_points([*upper, *reversed(lower)])}" fill="{colour}" opacity="0.16"/>'


def boxes(rectangles: Sequence[tuple[float, float, float, float]], colour: str) -> str:
    """Rectangles (x, y, width, height) of one colour, as one path."""
    path = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in rectangles)
    return f'<path d="{path}" fill="{colour}"/>'


def rule(x1: float, y1: float, x2: float, y2: float) -> str:
    """A faint straight line."""
    return f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" stroke="{GRID}"/>'


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(value: float) -> str:
    shown = f"{value:.1f}".rstrip("0").rstrip(".")
    return shown.replace("-0", "0") if abs(value) < 0.05 else shown
