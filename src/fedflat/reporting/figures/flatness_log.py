"""Flatness logged during training, as curves over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

from fedflat.errors import UserError
from fedflat.reporting.figures.style import LineStyle, described_labels, line_styles, open_frame, subplot_list
from fedflat.reporting.tables.summary import shown_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedflat.experiment.store.run_folder import Record

Entry = Mapping[str, Any]
"""The flatness log of one round."""
Points = list[tuple[int, float]]
"""(round, value) pairs."""
Reader = Callable[[Entry, str], float | None]
"""Reads a quantity from the log of a round, given the name of a model."""


def sample_text(examples: Iterable[int]) -> str:
    """State the sample of in-run measurements, given ``flatness.examples`` of the runs.

    >>> sample_text([500, 500])
    'curvature and sharpness on at most 500 training examples (flatness.examples)'
    """
    return f"curvature and sharpness on at most {shown_range(examples)} training examples (flatness.examples)"


def _model_value(name: str) -> Reader:
    """Return a reader of a quantity that is logged for each model, such as ``lambda_max``."""

    def read(entry: Entry, model: str) -> float | None:
        """Return the quantity ``name`` of ``model`` in the log of a round; None if it was not measured.

        An average that does not exist yet has the value of the server model.
        """
        models = entry.get("models", {})
        value: float | None = models.get(model, models.get("server", {})).get(name)
        return value

    return read


def _value_at(*path: str) -> Reader:
    """Return a reader of the value at a path of nested keys, which does not depend on the model."""

    def read(entry: Entry, model: str) -> float | None:
        """Return the value at ``path`` in the log of a round; None if a key is missing."""
        value: Any = entry
        for key in path:
            value = None if value is None else value.get(key)
        return cast("float | None", value)

    return read


def _reduced(reduce: Callable[[list[float]], float], *path: str) -> Reader:
    """Return a reader that reduces the values at a path of nested keys, one per client or class, to one number."""
    read_all = _value_at(*path)

    def read(entry: Entry, model: str) -> float | None:
        """Return ``reduce(values)`` of the values in a round's log, one per client or class; None if there are none."""
        values: Any = read_all(entry, model) or []
        if isinstance(values, Mapping):
            values = values.values()
        numbers = [value for value in values if value is not None]
        return reduce(numbers) if numbers else None

    return read


THRESHOLD = "stability threshold"
"""The curvature at which local gradient descent becomes unstable, drawn as a dashed line with ``lambda_max``."""
QUANTITIES: dict[str, tuple[str, Reader]] = {
    "lambda_max": ("largest eigenvalue of the Hessian", _model_value("lambda_max")),
    THRESHOLD: ("stability threshold of local gradient descent", _value_at("stability_threshold")),
    "sharpness": ("sharpness at rho = 0.05", _model_value("sharpness")),
    "m_sharpness": ("m-sharpness at rho = 0.05, m = 32", _model_value("m_sharpness")),
    "fisher_lambda_max": ("largest eigenvalue of the Gauss-Newton matrix", _model_value("fisher_lambda_max")),
    "fisher_trace": ("trace of the Gauss-Newton matrix", _model_value("fisher_trace")),
    "relative_flatness": ("relative flatness of the last layer", _model_value("relative_flatness")),
    "fisher_rao": ("Fisher-Rao norm", _model_value("fisher_rao")),
    "pac_bayes_sigma": ("PAC-Bayes sigma", _model_value("pac_bayes_sigma")),
    "magnitude_sigma": ("magnitude-aware PAC-Bayes sigma", _model_value("magnitude_sigma")),
    "gap": ("test minus training loss", _model_value("gap")),
    "participation_gap": ("held-out minus training clients' loss", _model_value("participation_gap")),
    "cosine": ("mean cosine of local and mean update", _reduced(fmean, "cohort", "cosine")),
    "diversity": ("diversity of updates", _value_at("cohort", "disagreement", "diversity")),
    "momentum": ("mean agreement with the momentum", _reduced(fmean, "cohort", "momentum", "agreement")),
    "local lambda_max": ("median eigenvalue of clients' models", _reduced(median, "cohort", "local", "lambda_max")),
    "overlap": (
        "mean overlap of client and global top eigenspaces",
        _reduced(fmean, "cohort", "similarity", "overlap_at_server"),
    ),
    "cka": ("mean CKA of client and server features", _reduced(fmean, "cohort", "similarity", "cka")),
    "worst class": ("test metric on the worst class", _reduced(min, "accuracy", "classes")),
    "features": ("mean norm of output features", _reduced(fmean, "features")),
    "L": ("largest gradient of an example", _value_at("constants", "lipschitz")),
    "sigma": ("noise of gradients within a client", _value_at("constants", "noise")),
    "sigma_g": ("heterogeneity of gradients", _value_at("constants", "heterogeneity")),
}
"""Plotted quantities: label and reader. Those of single layers are not listed, because every model has others."""
LAYER = "lambda_max of "
"""Start of the names of single layers' eigenvalues, before the name of a weight matrix."""


def label_of(name: str) -> str:
    """Return the label of a quantity."""
    if name in QUANTITIES:
        return QUANTITIES[name][0]
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
        run = record.folder.path if record.folder else "this run"
        raise UserError(f"{run} has no flatness log; run it with --flatness every=N")
    layers = [
        name
        for entry in entries.values()
        for name in entry.get("models", {}).get("server", {})
        if name.startswith(LAYER)
    ]
    readers = {name: read for name, (_, read) in QUANTITIES.items()} | {name: _model_value(name) for name in layers}
    quantities: dict[str, Points] = {}
    for name, read in readers.items():
        for round_number, entry in entries.items():
            value = read(entry, model)
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
    hidden = THRESHOLD if "lambda_max" in measured else None
    names = [name for name in dict.fromkeys([*QUANTITIES, *measured]) if name in measured and name != hidden]
    if not names:
        raise UserError("the flatness log has no finite value to plot")
    columns = min(3, len(names))
    figure = Figure(figsize=(4.1 * columns + 0.6, 2.9 * ceil(len(names) / columns) + 0.6), layout="constrained")
    handles, styles = {}, styles or line_styles(runs)
    for axes, name in zip(subplot_list(figure, len(names), columns), names, strict=True):
        for label, quantities in runs.items():
            if name in quantities:
                (line,) = axes.plot(*zip(*quantities[name], strict=True), lw=1.7, **styles[label].line)
                handles[label] = line
            if name == "lambda_max" and THRESHOLD in quantities:
                axes.plot(
                    *zip(*quantities[THRESHOLD], strict=True), color=styles[label].colour, lw=1, ls="--", marker=""
                )
        title = label_of(name)
        if name == "lambda_max" and THRESHOLD in measured:
            title = f"{title} (dashed: {THRESHOLD})"
            if all(value > 0 for line in axes.lines for value in line.get_ydata()):
                axes.set_yscale("log")  # the threshold can be far above the eigenvalues
        axes.set_title(title, loc="left", fontsize=9.5)
        axes.set_xlabel("communication round", fontsize=8.5, color="#333333")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.tick_params(labelsize=8, colors="#444444")
        open_frame(axes, grid=0.2)
    labels, shared_description = described_labels(runs, descriptions or {})
    legend = {labels[label]: handles[label] for label in runs if label in handles}
    options: dict[str, Any] = {"frameon": False, "fontsize": 9, "title_fontsize": 9, "alignment": "left"}
    options |= {"ncols": min(4, columns) if descriptions is None or shared_description else 1}
    figure.legend(legend.values(), legend.keys(), loc="outside upper left", title=shared_description, **options)
    return figure
