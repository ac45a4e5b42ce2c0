"""Augmentation against slow references, and the rules that make its draws reproducible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedflat.data import Augmentation, augmentation, from_arrays, normalise
from fedflat.data.augmentations import AUGMENTATIONS, CropFlip, Cutout, Draws, Mixup
from fedflat.errors import UserError

SHAPE = (3, 6, 7)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def batch(size: int, shape: tuple[int, int, int] = SHAPE, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (size, *shape), dtype=np.uint8))


def draws_of(text: str, shape: tuple[int, int, int] = SHAPE, steps: int = 1, size: int = 64, seed: int = 0) -> Draws:
    return augmentation(text).draw(np.random.default_rng(seed), steps, size, shape)


def step(draws: Draws, number: int = 0) -> Draws:
    return {name: values[number] for name, values in draws.items()}


def slow_window(image: torch.Tensor, corner: tuple[int, int], mirrored: bool, padding: int) -> torch.Tensor:
    """Pad with zeros, cut the window out, mirror it: pixel by pixel."""
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            row, column = i + corner[0] - padding, (width - 1 - j if mirrored else j) + corner[1] - padding
            if 0 <= row < height and 0 <= column < width:
                out[:, i, j] = image[:, row, column]
    return out


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("style", ["pixel", "mean"])
def test_crop_and_flip_match_a_loop_over_pixels(padding: int, style: str) -> None:
    raw, text = batch(64), f"crop-flip(padding={padding},style={style})"
    draws = step(draws_of(text))
    got = augmentation(text).inputs(raw, draws, MEAN, STD)
    before = raw if style == "pixel" else normalise(raw, MEAN, STD)
    each = zip(before, draws["corner"].tolist(), draws["mirrored"].tolist(), strict=True)
    slow = torch.stack([slow_window(image, tuple(corner), mirrored, padding) for image, corner, mirrored in each])
    assert torch.equal(got, normalise(slow, MEAN, STD) if style == "pixel" else slow)


def test_the_two_styles_pad_with_black_and_with_the_mean() -> None:
    away = {"corner": torch.tensor([[0, 0]]), "mirrored": torch.tensor([False])}
    white = torch.full((1, *SHAPE), 255, dtype=torch.uint8)
    black = augmentation("crop-flip(padding=4)").inputs(white, away, MEAN, STD)[0, :, 0, 0]
    mean = augmentation("crop-flip(padding=4,style=mean)").inputs(white, away, MEAN, STD)[0, :, 0, 0]
    assert torch.allclose(black, torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)]))
    assert torch.equal(mean, torch.zeros(3))


def test_windows_are_uniform_and_half_are_mirrored() -> None:
    pixel, mean = (draws_of(f"crop-flip(padding=2,style={style})", steps=50, size=200) for style in ("pixel", "mean"))
    for axis in (0, 1):
        assert torch.bincount(pixel["corner"][..., axis].flatten()).float().div(10_000).numpy() == pytest.approx(
            [0.2] * 5, abs=0.02
        )
    assert pixel["mirrored"].float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert (mean["corner"] == 2).all(-1).float().mean().item() == pytest.approx(0.5 + 0.5 / 25, abs=0.02)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 20])
def test_cutout_matches_a_loop_over_pixels(size: int) -> None:
    raw, text = batch(64), f"cutout(size={size})"
    draws = step(draws_of(text))
    slow = normalise(raw, MEAN, STD)
    for image, (row, column) in zip(slow, draws["centre"].tolist(), strict=True):
        for i in range(SHAPE[1]):
            for j in range(SHAPE[2]):
                if (
                    row - size // 2 <= i < row - size // 2 + size
                    and column - size // 2 <= j < column - size // 2 + size
                ):
                    image[:, i, j] = 0
    assert torch.equal(augmentation(text).inputs(raw, draws, MEAN, STD), slow)


def test_cutout_centres_cover_all_pixels() -> None:
    centres = draws_of("cutout", steps=20, size=200)["centre"].flatten(0, 1)
    assert {tuple(centre) for centre in centres.tolist()} == {(i, j) for i in range(SHAPE[1]) for j in range(SHAPE[2])}


def test_cutout_of_size_zero_changes_nothing() -> None:
    raw = batch(8)
    assert torch.equal(
        augmentation("cutout(size=0)").inputs(raw, step(draws_of("cutout(size=0)")), MEAN, STD),
        normalise(raw, MEAN, STD),
    )


def test_mixup_blends_inputs_and_returns_the_weights() -> None:
    raw, mixup = batch(9), augmentation("mixup")
    draws = step(draws_of("mixup", size=9))
    lam, order = mixup.mix(draws) or pytest.fail("mixup must mix")
    plain = normalise(raw, MEAN, STD)
    assert sorted(order.tolist()) == list(range(9)) and order.tolist() != order.argsort().tolist() and 0 < lam < 1
    slow = torch.stack([lam * plain[i] + (1 - lam) * plain[order[i]] for i in range(9)])
    assert torch.equal(mixup.inputs(raw, draws, MEAN, STD), slow)
    assert augmentation("crop-flip").mix(step(draws_of("crop-flip"))) is None


def test_mixup_with_lam_one_changes_nothing() -> None:
    raw, draws = batch(8), step(draws_of("mixup"))
    draws["lam"] = torch.ones(())
    assert torch.equal(augmentation("mixup").inputs(raw, draws, MEAN, STD), normalise(raw, MEAN, STD))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_lam_follows_the_beta_distribution(alpha: float) -> None:
    lam = draws_of(f"mixup(alpha={alpha})", steps=20_000, size=1)["lam"]
    assert lam.mean().item() == pytest.approx(0.5, abs=0.01)
    assert lam.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


ALL = "crop-flip+cutout(size=3)+mixup"


def test_a_shorter_batch_uses_the_first_draws() -> None:
    whole, raw = augmentation("crop-flip+cutout(size=3)"), batch(10)
    draws = step(draws_of(ALL, size=10))
    assert torch.equal(whole.inputs(raw[:7], draws, MEAN, STD), whole.inputs(raw, draws, MEAN, STD)[:7])
    _, order = augmentation(ALL).mix(draws, 7) or pytest.fail("mixup must mix")
    assert sorted(order.tolist()) == list(range(7))
    assert augmentation(ALL).inputs(raw[:7], draws, MEAN, STD).shape == (7, *SHAPE)


def test_padding_examples_can_be_excluded_from_the_permutation() -> None:
    draws = step(draws_of("mixup", size=10))
    _, short = augmentation("mixup").mix(draws, 7) or pytest.fail("mixup must mix")
    draws["order"][7:] = torch.inf
    _, filled = augmentation("mixup").mix(draws) or pytest.fail("mixup must mix")
    assert torch.equal(filled[:7], short)


def test_draws_do_not_depend_on_later_steps_or_on_other_parts() -> None:
    every = "+".join(AUGMENTATIONS)
    few, many, other_seed = draws_of(every, steps=3), draws_of(every, steps=9), draws_of(every, steps=3, seed=1)
    for part in AUGMENTATIONS:
        alone = draws_of(part, steps=3)
        for name, values in alone.items():
            assert torch.equal(values, few[name]) and torch.equal(values, many[name][:3])
            assert not torch.equal(values, other_seed[name]) and not torch.equal(values[0], values[1])


def test_everything_works_under_vmap() -> None:
    whole = augmentation(ALL)
    raw = torch.stack([batch(8, seed=seed) for seed in range(3)])
    draws = [step(draws_of(ALL, size=8, seed=seed)) for seed in range(3)]
    stacked = {name: torch.stack([d[name] for d in draws]) for name in draws[0]}
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    lifted = torch.func.vmap(lambda images, of_step: whole.inputs(images, of_step, mean, std))(raw, stacked)
    assert torch.equal(
        lifted,
        torch.stack([whole.inputs(images, of_step, mean, std) for images, of_step in zip(raw, draws, strict=True)]),
    )
    orders = torch.func.vmap(lambda of_step: whole.mix(of_step, 8)[1])(stacked)  # type: ignore[index]
    assert all(sorted(order.tolist()) == list(range(8)) for order in orders)


def test_normalisation_is_by_channel_and_only_for_bytes() -> None:
    raw = batch(2)
    expected = (raw.numpy() / 255.0 - np.array(MEAN).reshape(3, 1, 1)) / np.array(STD).reshape(3, 1, 1)
    assert normalise(raw, MEAN, STD).numpy() == pytest.approx(expected, abs=1e-6)
    assert normalise(raw, MEAN, STD, torch.float64).numpy() == pytest.approx(expected, abs=1e-14)
    assert normalise(raw, torch.tensor(MEAN), torch.tensor(STD), torch.bfloat16).dtype == torch.bfloat16
    floats, tokens = torch.randn(2, 5), torch.tensor([[1, 2]])
    assert torch.equal(normalise(floats, (), ()), floats) and normalise(tokens, (), ()) is tokens


def test_texts_are_canonical_and_put_in_the_order_of_application() -> None:
    assert augmentation("mixup(alpha=1)+cutout(size=8)+crop-flip(padding=4)").text == "crop-flip+cutout(size=8)+mixup"
    assert augmentation("mixup+crop-flip").steps == (CropFlip(), Mixup()) and augmentation("cutout").steps == (
        Cutout(16),
    )
    assert augmentation("none") == Augmentation() and augmentation("none").text == "none"
    assert augmentation("none").draw(np.random.default_rng(0), 2, 2, (5,)) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crop-flop", "'crop-flop'.*crop-flip"),
        ("mixup+mixup", "mixup.*once"),
        ("none+mixup", "'none' alone"),
        ("crop-flip(style=black)", "style=black.*pixel, mean"),
        ("mixup(alpha=0)", "expected a number above 0"),
        ("cutout(size=-1)", "at least 0"),
    ],
)
def test_invalid_texts_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        augmentation(text)


def test_image_augmentations_require_images() -> None:
    vectors = from_arrays(np.zeros((2, 5)), [0, 1], np.zeros((2, 5)), [0, 1], name="mine")
    tokens = from_arrays(np.zeros((2, 5), int), [0, 1], np.zeros((2, 5), int), [0, 1], name="words")
    with pytest.raises(UserError, match=r"crop-flip .*vector.*mine"):
        augmentation("crop-flip").check(vectors)
    with pytest.raises(UserError, match=r"cutout .*shape \("):
        augmentation("cutout").draw(np.random.default_rng(0), 1, 1, (5,))
    augmentation("mixup").check(vectors)
    draws = step(augmentation("mixup").draw(np.random.default_rng(0), 1, 2, (5,)))
    assert augmentation("mixup").inputs(vectors.train.inputs, draws, (), ()).shape == (2, 5)
    with pytest.raises(UserError, match=r"text.*words"):
        augmentation("mixup").check(tokens)
    with pytest.raises(UserError, match=r"mixup.*tokens"):
        augmentation("mixup").inputs(tokens.train.inputs, draws, (), ())
    augmentation("none").check(tokens)
