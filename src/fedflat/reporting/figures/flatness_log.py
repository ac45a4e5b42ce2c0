"""Flatness logged during training, as curves over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fedflat.errors import UserError
from fedflat.reporting.figures.style import (
    LineStyle,
    add_outer_legend,
    described_labels,
    line_styles,
    open_frame,
    scale_logarithmically,
    subplot_list,
)
from fedflat.reporting.tables.summary import shown_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedflat.experiment.store.run_folder import Record

Points = list[tuple[int, float]]
"""(round, value) pairs."""


def sample_text(examples: Iterable[int]) -> str:
    """State the sample of in-run measurements, given ``flatness.examples`` of the runs.

    >>> sample_text([500, 500])
    'curvature and sharpness on at most 500 training examples (flatness.examples)'
    """
    return f"curvature and sharpness on at most {shown_range(examples)} training examples (flatness.examples)"


MODEL = "MODEL"
"""Stands for the name of a model in the path of a quantity."""


class Quantity(NamedTuple):
    """A quantity of the flatness log."""

    label: str
    path: tuple[str, ...]
    """Nested keys of its value in the log of a round."""
    reduce: Callable[[list[float]], float] | None = None
    """Reduces the values at the path, one per client or class, to one number; None if there is a single value."""

    def read(self, entry: Mapping[str, Any], model: str) -> float | None:
        """Return the quantity in the log of a round; None if it was not measured or is not finite.

        An average that does not exist yet has the value of the server model.
        """
        value: Any = entry
        for key in self.path:
            values = value or {}
            if key == MODEL:
                key = model if model in values else "server"
            value = values.get(key)
        if self.reduce is None:
            return cast("float | None", value)
        listed = value.values() if isinstance(value, Mapping) else value or ()
        numbers = [number for number in listed if number is not None]
        return self.reduce(numbers) if numbers else None


THRESHOLD = "stability threshold"
"""The curvature at which local gradient descent becomes unstable, drawn as a dashed line with ``lambda_max``."""
QUANTITIES = {
    "lambda_max": Quantity("largest eigenvalue of the Hessian", ("models", MODEL, "lambda_max")),
    THRESHOLD: Quantity("stability threshold of local gradient descent", ("stability_threshold",)),
    "sharpness": Quantity("sharpness at rho = 0.05", ("models", MODEL, "sharpness")),
    "m_sharpness": Quantity("m-sharpness at rho = 0.05, m = 32", ("models", MODEL, "m_sharpness")),
    "fisher_lambda_max": Quantity(
        "largest eigenvalue of the Gauss-Newton matrix", ("models", MODEL, "fisher_lambda_max")
    ),
    "fisher_trace": Quantity("trace of the Gauss-Newton matrix", ("models", MODEL, "fisher_trace")),
    "relative_flatness": Quantity("relative flatness of the last layer", ("models", MODEL, "relative_flatness")),
    "fisher_rao": Quantity("Fisher-Rao norm", ("models", MODEL, "fisher_rao")),
    "pac_bayes_sigma": Quantity("PAC-Bayes sigma", ("models", MODEL, "pac_bayes_sigma")),
    "magnitude_sigma": Quantity("magnitude-aware PAC-Bayes sigma", ("models", MODEL, "magnitude_sigma")),
    "gap": Quantity("test minus training loss", ("models", MODEL, "gap")),
    "participation_gap": Quantity("held-out minus training clients' loss", ("models", MODEL, "participation_gap")),
    "cosine": Quantity("mean cosine of local and mean update", ("cohort", "cosine"), fmean),
    "diversity": Quantity("diversity of updates", ("cohort", "disagreement", "diversity")),
    "momentum": Quantity("mean agreement with the momentum", ("cohort", "momentum", "agreement"), fmean),
    "local lambda_max": Quantity("median eigenvalue of clients' models", ("cohort", "local", "lambda_max"), median),
    "overlap": Quantity(
        "mean overlap of client and global top eigenspaces", ("cohort", "similarity", "overlap_at_server"), fmean
    ),
    "cka": Quantity("mean CKA of client and server features", ("cohort", "similarity", "cka"), fmean),
    "worst class": Quantity("test metric on the worst class", ("accuracy", "classes"), min),
    "features": Quantity("mean norm of output features", ("features",), fmean),
    "L": Quantity("largest gradient of an example", ("constants", "lipschitz")),
    "sigma": Quantity("noise of gradients within a client", ("constants", "noise")),
    "sigma_g": Quantity("heterogeneity of gradients", ("constants", "heterogeneity")),
}
"""Plotted quantities by name. Those of single layers are not listed, because they depend on the model."""
LAYER = "lambda_max of "
"""Start of the names of single layers' eigenvalues, before the name of a weight matrix."""


def label_of(name: str) -> str:
    """Return the label of a quantity."""
    if name in QUANTITIES:
        return QUANTITIES[name].label
    return f"largest eigenvalue of the Hessian of {name.removeprefix(LAYER)}"


def logged(record: Record, model: str = "server") -> dict[str, Points]:
    """Return the (round, value) pairs of every logged quantity.

    Args:
        record: a run with a flatness log.
        model: the model whose quantities, such as its largest eigenvalue, are returned. In rounds in which an average
            does not exist yet, they are those of the server model.
    """
    entries = {entry["round"]: entry["flatness"] for entry in record.history if "flatness" in entry}
    if not entries:
        raise UserError(f"{record.display_name} has no flatness log; run it with --flatness every=N")
    layers = [
        name
        for entry in entries.values()
        for name in entry.get("models", {}).get("server", {})
        if name.startswith(LAYER)
    ]
    known = QUANTITIES | {name: Quantity(label_of(name), ("models", MODEL, name)) for name in layers}
    quantities: dict[str, Points] = {}
    for name, quantity in known.items():
        for round_number, entry in entries.items():
            value = quantity.read(entry, model)
            if value is not None:
                quantities.setdefault(name, []).append((round_number, value))
    return quantities


def log_picture(
    runs: Mapping[str, Mapping[str, Points]],
    styles: Mapping[str, LineStyle] | None = None,
    descriptions: Mapping[str, str] | None = None,
) -> Figure:
    """Plot the quantities of some runs: one panel per quantity, one line per run.

    Args:
        runs: the quantities of each run by label, from ``logged``.
        styles: colours and markers by label; default: chosen by the labels.
        descriptions: the model of each run by label, e.g. ``server model``; default: none.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    measured = dict.fromkeys(name for quantities in runs.values() for name in quantities)
    # The threshold has a panel of its own only without the eigenvalues with which it is compared.
    hidden = THRESHOLD if {"lambda_max", THRESHOLD} <= measured.keys() else ""
    names = [name for name in dict.fromkeys([*QUANTITIES, *measured]) if name in measured and name != hidden]
    if not names:
        raise UserError("the flatness log has no finite value to plot")
    columns = min(3, len(names))
    figure = Figure(figsize=(4.1 * columns + 0.6, 2.9 * ceil(len(names) / columns) + 0.6), layout="constrained")
    handles, styles = {}, styles or line_styles(runs)
    for axes, name in zip(subplot_list(figure, len(names), columns), names, strict=True):
        dashed = hidden if name == "lambda_max" else ""
        for label, quantities in runs.items():
            if name in quantities:
                (handles[label],) = axes.plot(*zip(*quantities[name], strict=True), lw=1.7, **styles[label].line)
            if dashed in quantities:
                axes.plot(*zip(*quantities[dashed], strict=True), color=styles[label].colour, lw=1, ls="--", marker="")
        if dashed and all(value > 0 for line in axes.lines for value in line.get_ydata()):
            scale_logarithmically(axes)  # the threshold can be far above the eigenvalues
        axes.set_title(label_of(name) + (f" (dashed: {dashed})" if dashed else ""), loc="left", fontsize=9.5)
        axes.set_xlabel("communication round", fontsize=8.5, color="#333333")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))  # a log may have a single round
        axes.tick_params(which="both", labelsize=8, colors="#444444")
        open_frame(axes, grid=0.2)
    labels, shared_description = described_labels(runs, descriptions or {})
    legend = {labels[label]: handles[label] for label in runs if label in handles}
    options: dict[str, Any] = {"handles": list(legend.values()), "labels": list(legend), "title": shared_description}
    options |= {"ncols": min(4, columns) if descriptions is None or shared_description else 1}
    add_outer_legend(figure, "outside upper left", **options)
    return figure
