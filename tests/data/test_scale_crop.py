"""Random scale and crop of images and masks against slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedflat.data import IGNORED, augmentation, from_arrays
from fedflat.data.augmentations import Flip, ScaleCrop
from fedflat.errors import UserError

SHAPE = (3, 7, 10)


def batch(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(size, *SHAPE))), torch.from_numpy(
        rng.integers(0, 5, (size, *SHAPE[1:]), dtype=np.uint8)
    )


def draws_of(text: str, size: int = 40, steps: int = 1) -> dict[str, torch.Tensor]:
    return augmentation(text).draw(np.random.default_rng(1), steps, size, SHAPE)


def slow(
    image: np.ndarray, mask: np.ndarray, scaled: list[int], corner: list[int], window: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Each pixel of the window by itself: where it lies in the original, and what is there."""
    out, ids = np.zeros((3, *window)), np.full(window, IGNORED, np.uint8)
    for i in range(window[0]):
        for j in range(window[1]):
            at = np.array([i + corner[0], j + corner[1]])
            if (at < 0).any() or (at >= scaled).any():
                continue
            source = (at + 0.5) * np.array(mask.shape) / np.array(scaled)
            row, column = np.floor(source).astype(int)
            ids[i, j] = mask[row, column]
            place = np.clip(source - 0.5, 0, np.array(mask.shape) - 1)
            low = np.floor(place).astype(int)
            high = np.minimum(low + 1, np.array(mask.shape) - 1)
            down, across = place - low
            top = (1 - across) * image[:, low[0], low[1]] + across * image[:, low[0], high[1]]
            bottom = (1 - across) * image[:, high[0], low[1]] + across * image[:, high[0], high[1]]
            out[:, i, j] = (1 - down) * top + down * bottom
    return out, ids


@pytest.mark.parametrize(
    "text",
    ["scale-crop", "scale-crop(low=0.3,high=2.5,height=5,width=13)", "scale-crop(low=1.0,high=1.0,height=9,width=4)"],
)
def test_windows_match_a_loop_over_pixels(text: str) -> None:
    made = augmentation(text)
    part = made.steps[0]
    assert isinstance(part, ScaleCrop)
    images, masks = batch(40)
    draws = {name: value[0] for name, value in draws_of(text).items()}
    got, ids = made.inputs(images, draws, (), (), torch.float64), made.targets(masks, draws)
    window = (part.height or 7, part.width or 10)
    assert got.shape == (40, 3, *window) and ids.shape == (40, *window) and ids.dtype == torch.uint8
    for k in range(40):
        image, mask = slow(
            images[k].numpy(), masks[k].numpy(), draws["scaled"][k].tolist(), draws["origin"][k].tolist(), window
        )
        assert np.allclose(got[k].numpy(), image, atol=1e-12) and np.array_equal(ids[k].numpy(), mask)


def test_scale_one_changes_nothing() -> None:
    images, masks = batch(6)
    made = augmentation("scale-crop(low=1.0,high=1.0)")
    draws = {name: value[0] for name, value in made.draw(np.random.default_rng(0), 1, 6, SHAPE).items()}
    assert torch.allclose(made.inputs(images, draws, (), (), torch.float64), images, atol=1e-12)
    assert torch.equal(made.targets(masks, draws), masks)


def test_scales_and_corners_are_spread_evenly_and_stay_in_bounds() -> None:
    draws = draws_of("scale-crop(low=0.5,high=1.5)", size=300, steps=30)
    scale = draws["scaled"].flatten(0, 1)[:, 1].double() / 10
    assert scale.min() == 0.5 and scale.max() == 1.5 and scale.mean().item() == pytest.approx(1, abs=0.02)
    room = draws["scaled"] - torch.tensor(SHAPE[1:])
    assert (draws["origin"] >= room.clamp(max=0)).all() and (draws["origin"] <= room.clamp(min=0)).all()
    widest = draws["origin"][..., 1][draws["scaled"][..., 1] == 15]
    assert torch.bincount(widest).double().div(len(widest)).numpy() == pytest.approx([1 / 6] * 6, abs=0.05)


def test_masks_follow_their_images() -> None:
    """Where an image shows its own mask, it still does so after all that can happen to both."""
    masks = (
        torch.from_numpy(np.random.default_rng(3).integers(0, 2, (50, 1, 4, 5), dtype=np.uint8))
        .repeat_interleave(4, 2)
        .repeat_interleave(4, 3)
    )
    shown = masks.expand(-1, 3, -1, -1).double() + 1  # 0 is what lies around the image
    made = augmentation("scale-crop(low=0.75,high=1.5,height=12,width=24)+flip")
    draws = {name: value[0] for name, value in made.draw(np.random.default_rng(2), 1, 50, (3, 16, 20)).items()}
    values, ids = made.inputs(shown, draws, (), (), torch.float64)[:, 0], made.targets(masks[:, 0], draws)
    ignored = ids == IGNORED
    assert torch.equal(ignored, values == 0) and 0.02 < ignored.double().mean() < 0.6
    assert (values.round() - 1 == ids)[~ignored].double().mean() > 0.97, "but for interpolated borders"


def test_mirror_images() -> None:
    images, masks = batch(64)
    draws = {name: value[0] for name, value in draws_of("flip", size=64).items()}
    made = Flip()
    for k, mirrored in enumerate(draws["flipped"].tolist()):
        wanted = (images[k].flip(-1), masks[k].flip(-1)) if mirrored else (images[k], masks[k])
        assert torch.equal(made.on_values(images, draws)[k], wanted[0]) and torch.equal(
            made.on_masks(masks, draws)[k], wanted[1]
        )
    assert 20 < draws["flipped"].sum() < 44


def test_crop_and_flip_moves_masks_too() -> None:
    masks = batch(30)[1]
    made = augmentation("crop-flip(padding=3)")
    draws = {name: value[0] for name, value in draws_of("crop-flip(padding=3)", size=30).items()}
    shown = made.inputs((masks[:, None].expand(-1, 3, -1, -1).double() + 1), draws, (), (), torch.float64)[:, 0]
    ids = made.targets(masks, draws)
    assert torch.equal(ids == IGNORED, shown == 0) and torch.equal(ids[ids != IGNORED].double(), shown[shown > 0] - 1)
    assert torch.equal(made.targets(torch.arange(5), draws), torch.arange(5)), "classes of whole images stay"


def test_short_batches_and_low_precision() -> None:
    images, masks = batch(8)
    made = augmentation("scale-crop+flip")
    draws = {name: value[0] for name, value in draws_of("scale-crop+flip", size=8).items()}
    whole = made.inputs(images, draws, (), (), torch.float64)
    assert torch.equal(made.inputs(images[:3], draws, (), (), torch.float64), whole[:3])
    assert torch.equal(made.targets(masks[:3], draws), made.targets(masks, draws)[:3])
    rough = made.inputs(images.float(), draws, (), (), torch.bfloat16)
    assert rough.dtype == torch.bfloat16 and (rough.double() - whole).abs().max() < 0.05, (
        "places are exact, values are rounded"
    )


def test_texts_and_errors() -> None:
    assert augmentation("flip+scale-crop(low=0.5, high=2)").text == "scale-crop(high=2.0)+flip"
    pictures = np.zeros((4, 3, 8, 8), np.uint8)
    images = from_arrays(pictures, [0, 1] * 2, pictures, [0, 1] * 2)
    with pytest.raises(UserError, match=r"scale-crop .*arrays has no masks"):
        augmentation("scale-crop").check(images)
    augmentation("flip").check(images)
    with pytest.raises(UserError, match="vector"):
        augmentation("flip").check(
            from_arrays(np.zeros((4, 2), np.float32), [0] * 4, np.zeros((4, 2), np.float32), [0] * 4)
        )
