"""Figure of sharpness over the radius."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from fedflat.reporting.figures.style import LEGEND_ROW, described_labels, line_styles, open_frame

if TYPE_CHECKING:
    from fedflat.flatness import Sharpness


def sharpness_picture(
    models: Mapping[str, Mapping[tuple[str, float], Sequence[Sharpness]]],
    descriptions: Mapping[str, str] | None = None,
) -> Figure:
    """Plot the rise of the loss over the radius rho, with one panel per kind and one line per model.

    Lines show means over the subsets of the examples.

    Args:
        models: for each name, by kind and radius, the model's sharpness on each subset of the examples.
        descriptions: for each name, what the model is, e.g. ``server model, seed 0, round 60``; default: none.
    """
    kinds = list(dict.fromkeys(kind for results in models.values() for kind, _ in results))
    styles = line_styles(models)
    labels, shared_description = described_labels(models, descriptions or {})
    figure = Figure(figsize=(max(4.2 * len(kinds), 6.4), 3.6 + LEGEND_ROW * len(models)), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for name, results in models.items():
            radii = sorted(radius for other_kind, radius in results if other_kind == kind)
            rises = [fmean(result.value for result in results[kind, radius]) for radius in radii]
            axes.plot(radii, rises, **styles[name].line, lw=1.6, label=labels[name])
        axes.set_title(kind, loc="left", fontsize=11)
        axes.set_xlabel("radius rho")
        axes.set_ylabel("rise of the loss")
        open_frame(axes)
    options: dict[str, Any] = {"frameon": False, "fontsize": 9, "title_fontsize": 9, "alignment": "left"}
    figure.legend(handles=figure.axes[0].lines, loc="outside lower left", title=shared_description, **options)
    return figure
