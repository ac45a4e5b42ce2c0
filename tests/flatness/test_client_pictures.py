"""Figures of clients, gaps, constants and twins: they show the measured values, and every axis has a label."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedflat.reporting.figures.clients import clients_picture, constants_picture, gap_picture, twins_picture
from fedflat.reporting.figures.style import line_styles


def cohort(rounds: int, clients: list[int], cosines: list[float | None], **more) -> dict:
    return {"round": rounds, "clients": clients, "cosine": cosines, **more}


COHORTS = [
    cohort(1, [0, 2, 5], [0.1, 0.5, 0.3], local={"lambda_max": {"0": 1.0, "2": 4.0, "5": 9.0}}),
    cohort(4, [2, 3, 5], [0.2, None, 0.8], local={"lambda_max": {"2": 2.0, "3": None, "5": 8.0}}),
]
SEEN = [
    {"round": 0, "accuracy": {"classes": {"cat": 0.1, "dog": 0.9}, "clients": {"4": 0.5}}, "features": {"4": 1.5}},
    {"round": 3, "accuracy": {"classes": {"cat": 0.8, "dog": None}, "clients": {"4": 0.7}}, "features": {"4": 3.5}},
]


def panels(figure: Figure) -> dict[str, object]:
    return {
        axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible() and axes.get_title(loc="left")
    }


def strongest(axes) -> tuple[list[float], list[float]]:
    """The data of the line with the given legend label."""
    (line,) = [line for line in axes.lines if not line.get_label().startswith("_")]
    return list(line.get_xdata()), list(line.get_ydata())


def test_medians_and_every_client_are_drawn() -> None:
    found = panels(clients_picture(COHORTS, [], "a run"))
    assert list(found) == [r"$\lambda_{max}$ of a client's model on its data", "cosine of local and mean update"]
    curvature, cosine = found.values()
    assert strongest(curvature) == ([1, 4], [4.0, 5.0])
    assert strongest(cosine) == ([1, 4], pytest.approx([0.3, 0.5]))
    assert curvature.get_yscale() == "log"
    own = sorted(tuple(line.get_ydata()) for line in curvature.lines if line.get_label().startswith("_"))
    assert own == [(1.0,), (4.0, 2.0), (9.0, 8.0)]
    assert all(axes.get_xlabel() == "communication round" for axes in found.values())


def test_momentum_and_variates_have_panels_where_there_are_any() -> None:
    more = {
        "momentum": {"agreement": [0.1, 0.2, None]},
        "client_vectors": {"drift.c": [3.0, 1.0, 2.0], "perturbation.mu": [1.0, 1.0, 1.0]},
    }
    found = panels(clients_picture([cohort(2, [0, 1, 2], [0.1, 0.2, 0.3], **more)], [], "a run"))
    assert list(found) == [
        "cosine of local and mean update",
        "agreement of local update and momentum",
        "norm of client state (drift.c)",
        "norm of client state (perturbation.mu)",
    ]
    assert strongest(found["agreement of local update and momentum"])[1] == pytest.approx([0.15])
    assert strongest(found["norm of client state (drift.c)"])[1] == [2.0]
    low, high = found["cosine of local and mean update"].get_xlim()
    assert [tick for tick in found["cosine of local and mean update"].get_xticks() if low <= tick <= high] == [2], (
        "no halves of a round"
    )


def test_accuracies_are_shades_from_zero_to_one() -> None:
    found = panels(clients_picture([], SEEN, "a run"))
    classes = found["test accuracy on each class"]
    mesh = classes.collections[0]
    drawn = np.ma.filled(mesh.get_array().reshape(2, 2), np.nan)
    assert np.allclose(drawn, [[0.1, 0.8], [0.9, np.nan]], equal_nan=True)
    assert mesh.get_clim() == (0, 1)
    assert [label.get_text() for label in classes.get_yticklabels()] == ["cat", "dog"]
    assert [label.get_text() for label in classes.get_xticklabels()] == ["0", "3"]
    assert classes.get_ylabel() == "class"
    assert found["norm of output features on a client's data"].get_ylabel() == "client"


def test_darker_is_more_in_grey_too() -> None:
    mesh = panels(clients_picture([], SEEN, "a run"))["test accuracy on each class"].collections[0]
    shades = mesh.cmap(np.linspace(0, 1, 20))[:, :3] @ [0.299, 0.587, 0.114]
    assert (np.diff(shades) < 0).all()


def test_the_gap_is_between_the_lines() -> None:
    looks = [
        {"round": t, "train_loss": 2.0 / (t + 1), "test_loss": 2.5 / (t + 1), "unseen_loss": 3.0 / (t + 1)}
        for t in (0, 4)
    ]
    losses, between = gap_picture({"server": looks}, "a run").axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in between.lines if not line.get_label().startswith("_")}
    assert drawn == {
        "server, test minus training": pytest.approx([0.5, 0.1]),
        "server, held-out clients minus training": pytest.approx([1.0, 0.2]),
    }
    assert len(losses.lines) == 3
    assert losses.get_ylabel() == "loss"
    models = {f"model {number}": looks for number in range(9)}
    _, between = gap_picture(models, "a run").axes
    lines = [line for line in between.lines if line.get_label().endswith("test minus training")]
    drawn_styles = [(line.get_color(), line.get_marker()) for line in lines]
    assert drawn_styles == [(style.colour, style.marker) for style in line_styles(models).values()]


def test_runs_have_the_style_of_their_algorithm() -> None:
    (style,) = line_styles(["scaffold"]).values()
    twins = [{"round": t, "distance": [t, 3 * t], "largest_loss_difference": [0.1, 0.3]} for t in (1, 2)]
    for figure in (clients_picture(COHORTS, [], "a run", algorithm="scaffold"), twins_picture(twins, "", "scaffold")):
        for axes in figure.axes:
            (strong,) = (line for line in axes.lines if line.get_lw() == 2.0)
            assert (strong.get_color(), strong.get_marker()) == (style.colour, style.marker)


def test_constants_differ_by_more_than_colour() -> None:
    names = ("lipschitz", "smoothness", "noise", "heterogeneity")
    looks = [
        {"round": t, "constants": {name: float(place + t + 1) for place, name in enumerate(names)}} for t in (0, 5)
    ]
    (axes,) = constants_picture(looks, "a run").axes
    assert len({line.get_linestyle() for line in axes.lines}) == len({line.get_marker() for line in axes.lines}) == 4
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 6], [2, 7], [3, 8], [4, 9]]


def test_twins_and_their_mean() -> None:
    looks = [{"round": t, "distance": [t, 3 * t], "largest_loss_difference": [0.1, 0.3]} for t in (1, 2)]
    weights, losses = twins_picture(looks, "twins").axes
    assert strongest(weights) == ([1, 2], [2.0, 4.0])
    assert strongest(losses)[1] == pytest.approx([0.2, 0.2])
    assert "weights" in weights.get_ylabel()
