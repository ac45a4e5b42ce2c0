"""Curves of the flatness log of a run."""

from __future__ import annotations

import pytest

from fedflat.errors import UserError
from fedflat.experiment.config import parse_config
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.figures.flatness_log import QUANTITIES, log_picture, logged


def record(*looks: tuple[int, dict]) -> Record:
    history = [{"round": rounds, "test": {"server": {}}, "flatness": look} for rounds, look in looks]
    return Record(parse_config({}), [*history, {"round": 99, "test": {"server": {}}}], "finished", "", 1.0, {})


FIRST = {"models": {"server": {"lambda_max": 2.0, "gap": 0.1}}, "stability_threshold": 20.0}
SECOND = {
    "models": {"server": {"lambda_max": 3.0, "gap": None}, "wima": {"lambda_max": 1.0, "gap": 0.3}},
    "cohort": {
        "cosine": [0.2, None, 0.4],
        "disagreement": {"diversity": 5.0},
        "momentum": {"agreement": [0.5, 0.7]},
        "local": {"lambda_max": {"3": 4.0, "8": 6.0, "9": 20.0}},
    },
    "accuracy": {"classes": {"a": 0.9, "b": 0.2}, "clients": {"0": 1.0}},
    "features": {"0": 2.0, "5": 4.0},
    "constants": {"lipschitz": 7.0, "smoothness": 3.0, "noise": 2.0, "heterogeneity": 1.0},
}


def test_every_quantity_by_hand() -> None:
    assert logged(record((0, FIRST), (5, SECOND)), "wima") == {
        "lambda_max": [(0, 2.0), (5, 1.0)],
        "stability threshold": [(0, 20.0)],
        "gap": [(0, 0.1), (5, 0.3)],
        "cosine": [(5, pytest.approx(0.3))],
        "diversity": [(5, 5.0)],
        "momentum": [(5, pytest.approx(0.6))],
        "local lambda_max": [(5, 6.0)],
        "worst class": [(5, 0.2)],
        "features": [(5, 3.0)],
        "L": [(5, 7.0)],
        "sigma": [(5, 2.0)],
        "sigma_g": [(5, 1.0)],
    }


def test_non_finite_values_are_left_out() -> None:
    assert logged(record((0, FIRST), (5, SECOND)))["gap"] == [(0, 0.1)]


def test_a_panel_for_each_quantity_and_a_line_for_each_run() -> None:
    runs = {"fedavg": logged(record((0, FIRST), (5, SECOND))), "fedsam": logged(record((0, FIRST)))}
    figure = log_picture(runs)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    titles = [QUANTITIES[name].label for name in QUANTITIES if name in runs["fedavg"] and name != "stability threshold"]
    assert [axes.get_title(loc="left") for axes in shown] == [f"{titles[0]} (dashed: stability threshold)", *titles[1:]]
    assert [len(axes.lines) for axes in shown[:3]] == [4, 2, 1]
    curve, threshold = shown[0].lines[:2]
    assert (
        list(threshold.get_ydata()) == [20.0] and shown[0].get_yscale() == "log" and threshold.get_linestyle() == "--"
    )
    assert threshold.get_color() == curve.get_color()
    assert len({line.get_marker() for line in shown[0].lines[::2]}) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg", "fedsam"]


def test_a_threshold_without_eigenvalues_has_a_panel() -> None:
    only_threshold = {"models": {"server": {"lambda_max": None}}, "stability_threshold": 20.0}
    (axes,) = log_picture({"fedavg": logged(record((0, only_threshold)))}).axes
    assert axes.get_title(loc="left") == "stability threshold of local gradient descent" and len(axes.lines) == 1
    with pytest.raises(UserError, match="no finite value"):
        log_picture({"fedavg": {}})


def test_a_run_without_a_log() -> None:
    with pytest.raises(UserError, match="--flatness every=N"):
        logged(record())
