"""Flatness logged during training, as curves over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedflat.errors import UserError
from fedflat.reporting.figures.curves import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedflat.experiment.store.run_folder import Record

Look = Mapping[str, Any]
Points = list[tuple[int, float]]
STYLES = ("-", "--", "-.", ":")
"""Line styles distinguish runs in greyscale."""


def _known(values: Any) -> list[float]:
    return [value for value in (values.values() if isinstance(values, Mapping) else values or []) if value is not None]


def _mean(values: Any) -> float | None:
    return statistics.fmean(_known(values)) if _known(values) else None


QUANTITIES: dict[str, tuple[str, Callable[[Look, str], float | None]]] = {
    "lambda_max": ("largest eigenvalue of the Hessian", lambda look, model: _of(look, model, "lambda_max")),
    "sharpness": ("sharpness at rho = 0.05", lambda look, model: _of(look, model, "sharpness")),
    "gap": ("test less training loss", lambda look, model: _of(look, model, "gap")),
    "participation_gap": (
        "held-out minus training clients' loss",
        lambda look, model: _of(look, model, "participation_gap"),
    ),
    "cosine": ("mean cosine of local and mean update", lambda look, _: _mean(look.get("cohort", {}).get("cosine"))),
    "diversity": (
        "diversity of updates",
        lambda look, _: look.get("cohort", {}).get("disagreement", {}).get("diversity"),
    ),
    "momentum": (
        "mean agreement with the momentum",
        lambda look, _: _mean(look.get("cohort", {}).get("momentum", {}).get("agreement")),
    ),
    "local lambda_max": ("median eigenvalue of clients' models", lambda look, _: _median(look)),
    "worst class": (
        "test metric on the worst class",
        lambda look, _: min(_known(look.get("accuracy", {}).get("classes")), default=None),
    ),
    "features": ("mean norm of output features", lambda look, _: _mean(look.get("features"))),
    "L": ("largest gradient of an example", lambda look, _: look.get("constants", {}).get("lipschitz")),
    "sigma": ("noise of gradients within a client", lambda look, _: look.get("constants", {}).get("noise")),
    "sigma_g": ("heterogeneity of gradients", lambda look, _: look.get("constants", {}).get("heterogeneity")),
}
"""Plotted quantities: label and reader."""


def _of(look: Look, model: str, name: str) -> float | None:
    models = look.get("models", {})
    value: float | None = models.get(model, models.get("server", {})).get(name)
    return value


def _median(look: Look) -> float | None:
    found = _known(look.get("cohort", {}).get("local", {}).get("lambda_max"))
    return statistics.median(found) if found else None


def logged(record: Record, model: str = "server") -> dict[str, Points]:
    """Every logged quantity over rounds; model quantities are of ``model``, or of the server before it exists."""
    looks = [(entry["round"], entry["flatness"]) for entry in record.history if "flatness" in entry]
    if not looks:
        where = record.folder.path if record.folder else "this run"
        raise UserError(f"{where} has no flatness log; run it with --flatness every=N")
    found: dict[str, Points] = {}
    for name, (_, read) in QUANTITIES.items():
        points = [(rounds, value) for rounds, look in looks if (value := read(look, model)) is not None]
        if points:
            found[name] = points
    return found


def log_picture(runs: Mapping[str, Mapping[str, Points]]) -> Figure:
    """One panel per quantity, one line per run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [name for name in QUANTITIES if any(name in one for one in runs.values())]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.1 * columns + 0.6, 2.9 * rows + 0.6), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for axes, name in zip(places, names, strict=False):
        for number, (label, found) in enumerate(runs.items()):
            if name in found:
                style = {"color": COLOURS[number % len(COLOURS)], "ls": STYLES[number % len(STYLES)]}
                axes.plot(*zip(*found[name], strict=True), lw=1.7, marker="o", ms=3, label=label, **style)
        axes.set_title(QUANTITIES[name][0], loc="left", fontsize=9.5)
        axes.set_xlabel("communication round", fontsize=8.5, color="#333333")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.tick_params(labelsize=8, colors="#444444")
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in places[len(names) :]:
        axes.set_visible(False)
    named = {label: line for axes in places for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        [named[label] for label in runs if label in named],
        list(runs),
        frameon=False,
        fontsize=9,
        loc="outside upper left",
        ncols=4,
    )
    return figure
