"""The built-in segmentation task."""

from __future__ import annotations

import pytest
import torch

from fedflat.data import load
from fedflat.errors import UserError


def test_every_picture_is_of_one_digit_and_background():
    dense, digits = load("digit_masks"), load("digits")
    assert dense.input_shape == (1, 32, 32)
    assert dense.kind == "segmentation"
    assert dense.classes == ("background", *"0123456789")
    for masks, labels in ((dense.train.targets, digits.train.targets), (dense.test.targets, digits.test.targets)):
        assert torch.equal(masks.flatten(1).amax(1).long(), labels + 1)
        for mask, label in zip(masks[:50], labels[:50], strict=True):
            assert set(mask.unique().tolist()) == {0, int(label) + 1}


def test_weathers_are_domains_and_change_the_images():
    dense = load("digit_masks")
    assert dense.group_names == ("clear", "dusk", "fog", "snow", "night")
    strokes = dense.train.targets > 0
    ink, paper = (
        [
            float(dense.train.inputs[:, 0][(dense.train.groups == group)[:, None, None] & where].float().mean())
            for group in range(5)
        ]
        for where in (strokes, ~strokes)
    )
    assert ink[0] > ink[1] and paper[2] > paper[0]
    assert all(light > dark for light, dark in zip(ink[:4], paper[:4], strict=True))
    assert ink[4] < paper[4]


def test_an_unseen_weather_is_only_tested_on():
    dense = load("digit_masks(unseen=night)")
    assert set(dense.train.groups.tolist()) == {0, 1, 2, 3}
    assert set(dense.test.groups.tolist()) == {0, 1, 2, 3, 4}
    with pytest.raises(UserError, match=r"digit_masks .*'rain'.*clear, dusk, fog, night, none, snow"):
        load("digit_masks(unseen=rain)")
