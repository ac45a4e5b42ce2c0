"""Figures of clients, gaps, constants and twins over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedflat.reporting.figures.curves import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = Mapping[str, Any]
Values = Callable[[Figures], dict[int, float]]
"""One value per client of a round."""
INK, QUIET, PALE = "#1f3b57", "#7d8a97", "#c3ccd5"
SHADES = "YlGnBu"
"""Light to dark, readable in greyscale."""
MOST_ROWS = 40
"""Maximum number of labelled classes or clients; more are subsampled evenly."""


def clients_picture(
    cohorts: Sequence[Figures], seen: Sequence[Figures], title: str, metric: str = "accuracy"
) -> Figure:
    """Curvature and drift of every client, and accuracies and feature norms of the server model, over rounds."""
    panels: list[Callable[[Axes], None]] = []
    for values, label, log in _of_clients(cohorts):
        if any(values(one) for one in cohorts):
            panels.append(partial(_per_client, cohorts=cohorts, values=values, label=label, log=log))
    if seen:
        for part, label, highest, read in (
            ("class", f"test {metric} on each class", 1.0, lambda one: one["accuracy"]["classes"]),
            ("client", f"{metric} on a client's data", 1.0, lambda one: one["accuracy"]["clients"]),
            ("client", "norm of output features on a client's data", None, lambda one: one["features"]),
        ):
            panels.append(partial(_shaded, seen=seen, values=read, label=label, part=part, highest=highest))
    columns = 2 if len(panels) <= 4 else 3
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.9 * rows + 0.4), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, draw in zip(places, panels, strict=False):
        draw(axes)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    _title(figure, title)
    return figure


def gap_picture(gaps: Mapping[str, Sequence[Figures]], title: str) -> Figure:
    """Training and test loss of every model over rounds, and the gap."""
    figure = Figure(figsize=(10.4, 4.4), layout="constrained")
    losses, between = figure.subplots(1, 2)
    for colour, (name, looks) in zip(COLOURS, gaps.items(), strict=False):
        rounds = [one["round"] for one in looks]
        train, test = (np.array([one[which] for one in looks], float) for which in ("train_loss", "test_loss"))
        losses.plot(rounds, test, color=colour, lw=1.8, marker="o", ms=3.5, label=f"{name}, test")
        losses.plot(
            rounds,
            train,
            color=colour,
            lw=1.4,
            ls=(0, (4, 2)),
            marker="o",
            ms=3.5,
            mfc="white",
            label=f"{name}, training",
        )
        between.plot(
            rounds, test - train, color=colour, lw=1.8, marker="o", ms=3.5, label=f"{name}, test minus training"
        )
        if "unseen_loss" in looks[-1]:
            unseen = np.array([one["unseen_loss"] for one in looks], float)
            losses.plot(rounds, unseen, color=colour, lw=1.3, ls=":", label=f"{name}, unseen clients")
            between.plot(
                rounds,
                unseen - train,
                color=colour,
                lw=1.3,
                ls=":",
                marker="s",
                ms=3.5,
                label=f"{name}, held-out minus training",
            )
    between.axhline(0, color=QUIET, lw=0.8, ls=(0, (2, 3)))
    losses.set_ylim(bottom=0)
    for axes, label in ((losses, "loss"), (between, "gap")):
        _frame(axes, label, "")
        axes.legend(frameon=False, fontsize=8.5)
    _title(figure, title)
    return figure


def constants_picture(looks: Sequence[Figures], title: str) -> Figure:
    """L, beta, sigma and sigma_g over rounds, on one logarithmic axis."""
    names = {
        "lipschitz": (r"$L$, largest gradient of an example", "-", "o"),
        "smoothness": (r"$\beta$, largest eigenvalue", "--", "s"),
        "noise": (r"$\sigma$, noise within a client", "-.", "^"),
        "heterogeneity": (r"$\sigma_g$, between clients", ":", "D"),
    }
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    axes = figure.subplots()
    rounds = [one["round"] for one in looks]
    for colour, (name, (label, style, marker)) in zip(
        (INK, "#b4552d", "#3d7f6e", "#6f6f6f"), names.items(), strict=True
    ):
        values = [one["constants"][name] for one in looks]
        axes.plot(rounds, values, color=colour, ls=style, marker=marker, ms=4.5, lw=1.6, label=label)
    _logarithmic(axes)
    _frame(axes, "", "")
    figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=4)
    _title(figure, title)
    return figure


def twins_picture(looks: Sequence[Figures], title: str) -> Figure:
    """Distance of twins over rounds, in weights and losses: thin lines per twin, a strong line for the mean."""
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    rounds = [one["round"] for one in looks]
    panels = (
        ("distance", "distance of the weights"),
        ("largest_loss_difference", "largest difference of a test example's loss"),
    )
    for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        values = np.array([one[name] for one in looks], float)
        for twin in values.T:
            axes.plot(rounds, twin, color=PALE, lw=1.0)
        axes.plot(rounds, values.mean(1), color=INK, lw=2.0, label="mean of the twins")
        axes.set_ylim(bottom=0)
        _frame(axes, label, "")
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    _title(figure, title)
    return figure


def _of_clients(cohorts: Sequence[Figures]) -> Iterator[tuple[Values, str, bool]]:
    """Plotted values per client: reader, label, and whether the axis is logarithmic."""

    def listed(*path: str) -> Values:
        def values(one: Figures) -> dict[int, float]:
            found: Any = one
            for name in path:
                found = found.get(name, {})
            return {
                client: value for client, value in zip(one["clients"], found, strict=bool(found)) if value is not None
            }

        return values

    def curvature(one: Figures) -> dict[int, float]:
        return {
            int(client): value
            for client, value in one.get("local", {}).get("lambda_max", {}).items()
            if value is not None
        }

    yield curvature, r"$\lambda_{max}$ of a client's model on its data", True
    yield listed("cosine"), "cosine of local and mean update", False
    yield listed("momentum", "agreement"), "agreement of local update and momentum", False
    for name in next((list(one["client_vectors"]) for one in cohorts if "client_vectors" in one), []):
        yield listed("client_vectors", name), f"norm of client state ({name})", False


def _per_client(axes: Axes, cohorts: Sequence[Figures], values: Values, label: str, log: bool) -> None:
    """One dot per client and round, a pale line per client, a strong line through the medians."""
    rounds = [one["round"] for one in cohorts]
    found = [values(one) for one in cohorts]
    for client in sorted({client for one in found for client in one}):
        own = [
            (where, one[client])
            for where, one in zip(rounds, found, strict=True)
            if client in one and (not log or one[client] > 0)
        ]
        axes.plot(
            *zip(*own, strict=True), color=PALE, lw=0.8, marker="o", ms=3.2, mfc=QUIET, mec="none", zorder=1
        ) if own else None
    medians = [(where, float(np.median(list(one.values())))) for where, one in zip(rounds, found, strict=True) if one]
    axes.plot(
        *zip(*medians, strict=True), color=INK, lw=2.0, marker="o", ms=4.5, label="median of the clients", zorder=3
    )
    if log:
        _logarithmic(axes)
    else:
        axes.axhline(0, color=QUIET, lw=0.8, ls=(0, (2, 3)))
    _frame(axes, "", label)
    axes.legend(frameon=False, fontsize=8.5)


def _shaded(axes: Axes, seen: Sequence[Figures], values: Any, label: str, part: str, highest: float | None) -> None:
    """A heat map [parts, rounds]; forgetting shows as a cell lighter than the previous one."""
    names = list(values(seen[-1]))
    table = np.array([[_number(values(one).get(name)) for one in seen] for name in names])
    drawn = axes.pcolormesh(
        table, cmap=SHADES, vmin=0, vmax=highest, edgecolors="white", linewidth=0.4 if len(names) <= MOST_ROWS else 0
    )
    rounds = [one["round"] for one in seen]
    shown = np.unique(np.linspace(0, len(rounds) - 1, min(len(rounds), 9)).round().astype(int))
    axes.set_xticks(shown + 0.5, [str(rounds[place]) for place in shown])
    named = np.unique(np.linspace(0, len(names) - 1, min(len(names), 14)).round().astype(int))
    axes.set_yticks(named + 0.5, [names[place] for place in named])
    axes.set_xlabel("after round", fontsize=9, color="#333333")
    axes.set_ylabel(part, fontsize=9, color="#333333")
    axes.set_title(label, loc="left", fontsize=10)
    axes.tick_params(labelsize=8, length=0, colors="#444444")
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(drawn, ax=axes, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0, colors="#444444")


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def _title(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _logarithmic(axes: Axes) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _frame(axes: Axes, label: str, title: str) -> None:
    axes.set_xlabel("communication round", fontsize=9, color="#333333")
    axes.set_ylabel(label, fontsize=9, color="#333333")
    axes.set_title(title, loc="left", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))  # a single round has no neighbours
    axes.grid(alpha=0.2)
    axes.tick_params(labelsize=8.5, colors="#444444")
    axes.spines[["top", "right"]].set_visible(False)
