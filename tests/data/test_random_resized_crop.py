"""Random resized crop: the windows as torchvision draws them, the pictures as a loop over windows stretches them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedflat.data import augmentation, normalise
from fedflat.data.augmentations import RandomResizedCrop
from fedflat.errors import UserError

from .test_augment import MEAN, STD, batch, draws_of, step

TEXT = "random-resized-crop"


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 9, 24), (3, 24, 9)])
@pytest.mark.parametrize("floats", [False, True])
def test_pictures_match_a_loop_over_windows(shape: tuple[int, int, int], floats: bool) -> None:
    raw = batch(64, shape).float() if floats else batch(64, shape)
    draws = step(draws_of(TEXT, shape))
    slow = []
    for image, (top, left, height, width) in zip(raw.float(), draws["window"].tolist(), strict=True):
        cut = image[None, :, top : top + height, left : left + width]
        slow.append(F.interpolate(cut, shape[1:], mode="bilinear", align_corners=False)[0])
    got = augmentation(TEXT).inputs(raw, draws, MEAN[: shape[0]], STD[: shape[0]])
    if floats:
        assert torch.allclose(got, torch.stack(slow), atol=1e-3)
    else:
        rounded = (torch.stack(slow) + 2**-10).round().to(torch.uint8)
        assert torch.allclose(got, normalise(rounded, MEAN[: shape[0]], STD[: shape[0]]), atol=1e-6)


def torchvision_window(
    rng: np.random.Generator, height: int, width: int, scale: float, ratio: float
) -> tuple[int, int]:
    """Height and width of a window, drawn as torchvision's RandomResizedCrop.get_params draws them."""
    for _ in range(10):
        area = height * width * rng.uniform(scale, 1)
        aspect = np.exp(rng.uniform(-np.log(ratio), np.log(ratio)))
        w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return h, w
    if width / height < 1 / ratio:
        return round(width * ratio), width
    if width / height > ratio:
        return height, round(height * ratio)
    return height, width


@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 60), (60, 20)])
@pytest.mark.parametrize(("scale", "ratio"), [(0.08, 4 / 3), (0.9, 1.1), (1.0, 1.0)])
def test_windows_are_distributed_as_in_torchvision(height: int, width: int, scale: float, ratio: float) -> None:
    mine = draws_of(f"{TEXT}(scale={scale},ratio={ratio})", (3, height, width), size=4_000)["window"][0].numpy()
    rng = np.random.default_rng(1)
    theirs = np.array([torchvision_window(rng, height, width, scale, ratio) for _ in range(4_000)])
    for axis in (0, 1):
        assert mine[:, 2 + axis].mean() == pytest.approx(theirs[:, axis].mean(), rel=0.03)
        assert mine[:, 2 + axis].std() == pytest.approx(theirs[:, axis].std(), rel=0.08, abs=0.05)
    corner, window = mine[:, :2], mine[:, 2:]
    assert (corner >= 0).all() and (window >= 1).all() and (corner + window <= (height, width)).all()
    free = (height, width) - window
    movable = (free > 0) if (scale, ratio) == (0.08, 4 / 3) and height == width else np.zeros_like(free, dtype=bool)
    if movable.any():
        assert (corner[movable] / free[movable]).mean() == pytest.approx(0.5, abs=0.02), "everywhere equally often"


def test_the_whole_picture_as_a_window_changes_nothing() -> None:
    raw = batch(8, (3, 12, 10))
    window = {"window": torch.tensor([[0, 0, 12, 10]] * 8)}
    assert torch.equal(RandomResizedCrop().on_pixels(raw, window), raw)


def test_a_shorter_batch_uses_the_first_draws() -> None:
    raw, whole, draws = batch(10, (3, 8, 8)), augmentation(TEXT), step(draws_of(TEXT, (3, 8, 8), size=10))
    assert torch.equal(whole.inputs(raw[:7], draws, MEAN, STD), whole.inputs(raw, draws, MEAN, STD)[:7])


def test_it_works_under_vmap() -> None:
    whole = augmentation(f"{TEXT}+crop-flip(padding=0)+cutout(size=2)+mixup")
    raw = torch.stack([batch(6, (3, 8, 8), seed) for seed in range(3)])
    draws = [step(draws_of(whole.text, (3, 8, 8), size=6, seed=seed)) for seed in range(3)]
    stacked = {name: torch.stack([d[name] for d in draws]) for name in draws[0]}
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    lifted = torch.func.vmap(lambda images, of_step: whole.inputs(images, of_step, mean, std))(raw, stacked)
    slow = torch.stack([whole.inputs(images, of_step, mean, std) for images, of_step in zip(raw, draws, strict=True)])
    assert torch.allclose(lifted, slow, atol=1e-6)


def test_texts() -> None:
    assert augmentation(f"mixup+{TEXT}(scale=0.5)").text == f"mixup+{TEXT}(scale=0.5)"
    for text, message in (
        (f"{TEXT}(scale=0)", "above 0"),
        (f"{TEXT}(scale=1.1)", "at most 1"),
        (f"{TEXT}(ratio=0.9)", "at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            augmentation(text)
