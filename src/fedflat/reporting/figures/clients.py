"""Figures over rounds: clients, generalisation gaps, constants of generalisation bounds, and twin runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedflat.display import is_share
from fedflat.reporting.figures.style import (
    LineStyle,
    add_outer_legend,
    evenly_spaced,
    line_styles,
    marker_spacing,
    open_frame,
    scale_logarithmically,
    subplot_list,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Entry = Mapping[str, Any]
"""The measurements of one round."""
INK, QUIET, PALE = "#1f3b57", "#7d8a97", "#c3ccd5"
LABEL: dict[str, Any] = {"fontsize": 9, "color": "#333333"}
SHADES = "YlGnBu"
"""Light to dark, readable in greyscale."""
TITLE_CHARACTERS = 9
"""Characters of a figure's title per inch."""
MAX_ROWS = 40
"""Maximum number of rows of a heat map whose cells are separated by lines."""


def clients_picture(
    cohorts: Sequence[Entry], evaluations: Sequence[Entry], title: str, metric: str = "accuracy", algorithm: str = ""
) -> Figure:
    """Plot curvature and drift of every client, and accuracies and feature norms of the server model, over rounds.

    Args:
        cohorts: for each round, measurements of its clients.
        evaluations: for each round, the metric and feature norms of the server model by class and by client; may be
            empty.
        title: title of the figure.
        metric: name of the metric that ``evaluations`` store under the key ``accuracy``.
        algorithm: the run's algorithm, which determines the colour and marker of medians.
    """
    panels: list[Callable[[Axes], None]] = []  # each draws one panel
    style = _style_of(algorithm)
    for path, label, is_log in _client_quantities(cohorts):
        by_round = {entry["round"]: _values_by_client(entry, path) for entry in cohorts}
        if any(by_round.values()):
            panels.append(partial(_draw_clients, by_round=by_round, style=style, label=label, is_log=is_log))
    if evaluations:
        accuracies = [entry["accuracy"] for entry in evaluations]
        highest_value = 1.0 if is_share(metric) else None
        feature_norms = [entry["features"] for entry in evaluations]
        heat_maps = (  # what a row is, title, value of the darkest shade (None: the maximum), values of each round
            ("class", f"test {metric} on each class", highest_value, [accuracy["classes"] for accuracy in accuracies]),
            ("client", f"{metric} on a client's data", highest_value, [accuracy["clients"] for accuracy in accuracies]),
            ("client", "norm of output features on a client's data", None, feature_norms),
        )
        rounds = [entry["round"] for entry in evaluations]
        for part, label, highest, columns in heat_maps:
            if not columns[-1]:  # e.g. a regression dataset has no classes
                continue
            draw_map = partial(_draw_heat_map, rounds=rounds, columns=columns, label=label, part=part, highest=highest)
            panels.append(draw_map)
    per_row = 2 if len(panels) <= 4 else 3
    figure = Figure(figsize=(5.2 * per_row, 3.9 * ceil(len(panels) / per_row) + 0.4), layout="constrained")
    for axes, draw in zip(subplot_list(figure, len(panels), per_row), panels, strict=True):
        draw(axes)
    _set_title(figure, title)
    return figure


def gap_picture(gaps: Mapping[str, Sequence[Entry]], title: str) -> Figure:
    """Plot training and test loss of every model over rounds, and the gap between them.

    Args:
        gaps: the losses of each model by name, one entry per round; those on held-out clients are optional.
        title: title of the figure.
    """
    figure = Figure(figsize=(10.4, 4.4), layout="constrained")
    loss_axes, gap_axes = figure.subplots(1, 2)
    has_held_out = any("unseen_loss" in entries[-1] for entries in gaps.values())  # clients that never train
    styles, legend = line_styles(gaps), {}
    for name, entries in gaps.items():
        rounds = [entry["round"] for entry in entries]
        train, test = (np.array([entry[key] for entry in entries], float) for key in ("train_loss", "test_loss"))
        colour = styles[name].colour
        solid = {"color": colour, "lw": 1.8, "marker": styles[name].marker, "ms": 4}
        dashed = solid | {"lw": 1.4, "ls": (0, (4, 2)), "mfc": "white"}
        legend[name] = loss_axes.plot(rounds, test, **solid, label=f"{name}, test")[0]
        loss_axes.plot(rounds, train, **dashed, label=f"{name}, training")
        gap_axes.plot(rounds, test - train, **solid, label=f"{name}, test minus training")
        if has_held_out:
            held_out = np.array([entry["unseen_loss"] for entry in entries], float)
            dotted = solid | {"lw": 1.3, "ls": ":", "mfc": "white"}
            loss_axes.plot(rounds, held_out, **dotted, label=f"{name}, held-out clients")
            label = f"{name}, held-out clients minus training"
            gap_axes.plot(rounds, held_out - train, **dotted, label=label)
    _draw_zero(gap_axes)
    loss_axes.set_ylim(bottom=0)
    for axes, label in ((loss_axes, "loss"), (gap_axes, "loss minus training loss")):
        _label_axes(axes, label)
    # Models differ in colour and marker, losses in dashes.
    losses = {"test": "-", "training": "--"} | ({"held-out clients": ":"} if has_held_out else {})
    legend |= {loss: Line2D([], [], color=INK, ls=dashes) for loss, dashes in losses.items()}
    add_outer_legend(figure, handles=list(legend.values()), labels=list(legend), ncols=4)
    _set_title(figure, title)
    return figure


def constants_picture(entries: Sequence[Entry], title: str) -> Figure:
    """Plot the constants of generalisation bounds (L, beta, sigma and sigma_g) over rounds, on a logarithmic axis.

    ``entries`` holds the estimates of each round.
    """
    lines = {
        "lipschitz": (r"$L$, largest gradient of an example", INK, "-", "o"),
        "smoothness": (r"$\beta$, largest eigenvalue", "#b4552d", "--", "s"),
        "noise": (r"$\sigma$, noise within a client", "#3d7f6e", "-.", "^"),
        "heterogeneity": (r"$\sigma_g$, between clients", "#6f6f6f", ":", "D"),
    }
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    axes = figure.subplots()
    rounds = [entry["round"] for entry in entries]
    for name, (label, colour, style, marker) in lines.items():
        values = [entry["constants"][name] for entry in entries]
        axes.plot(rounds, values, color=colour, ls=style, marker=marker, ms=4.5, lw=1.6, label=label)
    scale_logarithmically(axes, nonpositive="mask")
    _label_axes(axes)
    figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=4)
    _set_title(figure, title)
    return figure


def twins_picture(entries: Sequence[Entry], title: str, algorithm: str = "") -> Figure:
    """Plot how far twins are from the original run over rounds, in weights and losses.

    A twin is trained on the same data with a single example replaced. Thin lines show the twins, a strong
    line shows their mean.

    Args:
        entries: the measurements of each round, with one value per twin.
        title: title of the figure.
        algorithm: the algorithm, which determines the colour and marker of means.
    """
    style = _style_of(algorithm)
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    rounds = [entry["round"] for entry in entries]
    panels = (
        ("distance", "distance of the weights"),
        ("largest_loss_difference", "largest difference of a test example's loss"),
    )
    for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        values = np.array([entry[name] for entry in entries], float)  # [rounds, twins]
        for twin in values.T:
            axes.plot(rounds, twin, color=PALE, lw=1.0)
        spacing = marker_spacing(len(rounds))
        axes.plot(rounds, values.mean(1), **style.line, markevery=spacing, lw=2.0, label="mean of the twins")
        axes.set_ylim(bottom=0)
        _label_axes(axes, label)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    _set_title(figure, title)
    return figure


def _style_of(algorithm: str) -> LineStyle:
    return line_styles([algorithm])[algorithm]


def _client_quantities(cohorts: Sequence[Entry]) -> list[tuple[tuple[str, ...], str, bool]]:
    """Return for each plotted quantity its nested keys in a round, its label, and whether the axis is logarithmic."""
    # All rounds have the same client vectors (e.g. control variates), if the algorithm has any.
    client_vectors = next((entry["client_vectors"] for entry in cohorts if "client_vectors" in entry), ())
    return [
        (("local", "lambda_max"), r"$\lambda_{max}$ of a client's model on its data", True),
        (("cosine",), "cosine of local and mean update", False),
        (("momentum", "agreement"), "agreement of local update and momentum", False),
        *((("client_vectors", name), f"norm of client state ({name})", False) for name in client_vectors),
    ]


def _values_by_client(entry: Entry, path: Sequence[str]) -> dict[int, float]:
    """Return the finite values of a round at a path of nested keys, by client; empty if the round does not have them.

    The round holds them by client, or as a list in the order of its ``clients``.
    """
    values: Any = entry
    for key in path:
        values = values.get(key, {})
    pairs = values.items() if isinstance(values, Mapping) else zip(entry["clients"], values, strict=True)
    return {int(client): value for client, value in pairs if value is not None}


def _draw_clients(
    axes: Axes, by_round: Mapping[int, Mapping[int, float]], style: LineStyle, label: str, is_log: bool
) -> None:
    """Draw one dot per client and round, a pale line per client, and a strong line through the medians.

    Args:
        axes: where to draw.
        by_round: for each round, the value of each client.
        style: colour and marker of the medians.
        label: title of the panel.
        is_log: whether the vertical axis is logarithmic; it then omits values that are not positive.
    """
    for client in sorted({client for values in by_round.values() for client in values}):
        points = [(round_number, values[client]) for round_number, values in by_round.items() if client in values]
        if is_log:
            points = [(round_number, value) for round_number, value in points if value > 0]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=PALE, lw=0.8, marker="o", ms=3.2, mfc=QUIET, mec="none", zorder=1)
    medians = {
        round_number: float(np.median(list(values.values()))) for round_number, values in by_round.items() if values
    }
    x, y = tuple(medians), tuple(medians.values())
    axes.plot(x, y, **style.line, lw=2.0, label="median of the clients", zorder=3)
    if is_log:
        scale_logarithmically(axes)
    else:
        _draw_zero(axes)
    _label_axes(axes, title=label)
    axes.legend(frameon=False, fontsize=8.5)


def _draw_heat_map(
    axes: Axes,
    rounds: Sequence[int],
    columns: Sequence[Mapping[str, float | None]],
    label: str,
    part: str,
    highest: float | None,
) -> None:
    """Draw a heat map of classes or clients over rounds; if one is forgotten, its cells become lighter.

    Args:
        axes: where to draw.
        rounds: the round of every column.
        columns: the values of every column, by the name of the class or client; missing ones are left blank.
        label: title of the panel.
        part: what a row is: ``class`` or ``client``.
        highest: value of the darkest shade; None for the maximum.
    """
    names = list(columns[-1])
    table = np.array([[column.get(name) for column in columns] for name in names], dtype=float)  # None becomes NaN
    line_width = 0.4 if len(names) <= MAX_ROWS else 0  # lines would hide cells of many rows
    mesh = axes.pcolormesh(table, cmap=SHADES, vmin=0, vmax=highest, edgecolors="white", linewidth=line_width)
    x_ticks, y_ticks = evenly_spaced(len(rounds), 9), evenly_spaced(len(names), 14)
    axes.set_xticks(x_ticks + 0.5, [str(rounds[index]) for index in x_ticks])
    axes.set_yticks(y_ticks + 0.5, [names[index] for index in y_ticks])
    axes.set_xlabel("after round", **LABEL)
    axes.set_ylabel(part, **LABEL)
    axes.set_title(label, loc="left", fontsize=10)
    bar = axes.figure.colorbar(mesh, ax=axes, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    for ticked in (axes, bar.ax):
        ticked.tick_params(labelsize=8, length=0, colors="#444444")
    axes.spines[:].set_visible(False)


def _draw_zero(axes: Axes) -> None:
    axes.axhline(0, color=QUIET, lw=0.8, ls=(0, (2, 3)))


def _set_title(figure: Figure, title: str) -> None:
    characters = int(TITLE_CHARACTERS * figure.get_figwidth())
    figure.suptitle(wrapped(title, characters), x=0.01, ha="left", fontsize=11, fontweight="bold")


def _label_axes(axes: Axes, label: str = "", title: str = "") -> None:
    """Set the vertical label, the title and the style of a plot over rounds."""
    axes.set_xlabel("communication round", **LABEL)
    axes.set_ylabel(label, **LABEL)
    axes.set_title(title, loc="left", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))  # a run may have a single round
    open_frame(axes, grid=0.2)
    axes.tick_params(which="both", labelsize=8.5, colors="#444444")
