"""The picture of a partition shows every client and every class, whatever their number."""

from __future__ import annotations

import io

import numpy as np
import pytest

from fedflat.data import make_partition
from fedflat.reporting.figures.partition import MAX_CLIENTS, partition_picture, partition_pictures


def histogram(text: str, classes: int, clients: int) -> np.ndarray:
    targets = np.arange(4000) % classes
    return make_partition(text, targets, classes, clients, 0).histogram(targets, classes)


def names(classes: int) -> list[str]:
    return [f"class {label}" for label in range(classes)]


def test_a_column_is_a_client_and_a_colour_a_class() -> None:
    counts = np.array([[0, 30, 10], [20, 0, 0], [0, 5, 45]])
    axes = partition_picture(counts, names(3), "by hand").axes[0]
    first, *stacked = axes.containers
    assert [bar.get_height() for bar in first] == [20, 30, 45], "sorted by the most frequent class, which lies below"
    tops = np.sum([[bar.get_height() for bar in bars] for bars in axes.containers], axis=0)
    assert tops.tolist() == [20, 40, 50] and len(stacked) == 3
    colours = [bars[0].get_facecolor() for bars in stacked]
    assert [bar.get_facecolor() for bar in first] == colours
    assert (
        axes.get_title("left") == "by hand"
        and axes.get_title("right") == "3 clients, 20 to 50 examples each, 1.7 classes per client"
    )


@pytest.mark.parametrize(("classes", "clients"), [(1, 1), (2, 100), (20, 7), (21, 30), (100, 400)])
def test_any_number_of_clients_and_classes_can_be_drawn(classes: int, clients: int) -> None:
    figure = partition_picture(
        histogram("iid", classes, clients),
        names(classes),
        "dirichlet(alpha=0.1)+longtail(factor=100)+held-out(share=0.2)",
    )
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=50)
    assert written.getvalue().startswith(b"\x89PNG")
    if clients > MAX_CLIENTS:
        assert figure.axes[0].get_title("right").startswith("200 of 400 clients")


def test_several_partitions_share_one_legend() -> None:
    texts = ["iid", "dirichlet", "dirichlet(alpha=0)"]
    figure = partition_pictures({text: histogram(text, 10, 20).tolist() for text in texts}, names(10))
    assert [axes.get_title("left") for axes in figure.axes] == texts
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names(10)
