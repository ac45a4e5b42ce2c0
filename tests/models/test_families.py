"""Details of single families, against torch's own layers or numbers worked out by hand."""

import pytest
import torch
from torch import nn

from fedflat.models import build
from fedflat.models.lstm import UnrolledLstm
from fedflat.models.norms import BatchNorm
from fedflat.models.resnet import Conv3x3, PaddedShortcut


def convolutions(model):
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


def feature_side(features, side):
    return features(torch.zeros(1, 3, side, side)).shape[-1]


def test_lenet_pads_below_32_pixels():
    assert convolutions(build("lenet5", (1, 28, 28), 10))[0].padding == (2, 2)
    assert convolutions(build("lenet5", (1, 32, 32), 10))[0].padding == (0, 0)


def test_resnet18_stems():
    small, imagenet = (build(text, (3, 32, 32), 10) for text in ("resnet18", "resnet18(stem=torchvision)"))
    assert feature_side(small.stem, 32) == 32
    assert feature_side(nn.Sequential(small.stem, small.blocks), 32) == 4
    assert feature_side(imagenet.stem, 32) == 8
    assert feature_side(nn.Sequential(imagenet.stem, imagenet.blocks), 32) == 1


def test_resnet20_has_twenty_weighted_layers_and_no_projection():
    model = build("resnet20", (3, 32, 32), 10)
    assert len(convolutions(model)) + 1 == 20
    assert all(c.kernel_size == (3, 3) for c in convolutions(model))
    assert feature_side(nn.Sequential(model.stem, model.blocks), 32) == 8


def test_padded_shortcut_by_hand():
    x = torch.arange(9.0).reshape(1, 1, 3, 3)
    y = PaddedShortcut(1, 3, 2)(x)
    assert y[0, 0].tolist() == [[0.0, 2.0], [6.0, 8.0]]
    assert y.shape == (1, 3, 2, 2)
    assert not y[0, 1:].any()


def test_one_pixel_uses_only_the_central_weights():
    torch.manual_seed(0)
    convolution = Conv3x3(6, 4, stride=2).double()
    pixel = torch.randn(5, 6, 1, 1, dtype=torch.float64, requires_grad=True)
    fast, whole = convolution(pixel), nn.Conv2d.forward(convolution, pixel)
    assert torch.allclose(fast, whole, rtol=0, atol=1e-14)
    ours, theirs = (torch.autograd.grad(out.sin().sum(), [pixel, convolution.weight]) for out in (fast, whole))
    assert all(torch.allclose(one, other, rtol=0, atol=1e-14) for one, other in zip(ours, theirs, strict=True))


def test_larger_images_use_the_full_convolution():
    convolution = Conv3x3(2, 3)
    image = torch.randn(1, 2, 1, 2)
    assert torch.equal(convolution(image), nn.Conv2d.forward(convolution, image))


def test_mobilenet_stems_share_their_weights():
    standard, small = (build(text, (3, 32, 32), 10) for text in ("mobilenetv2", "mobilenetv2(stem=small)"))
    assert feature_side(standard.features, 64) == 2
    assert feature_side(small.features, 32) == 4
    small.load_state_dict(standard.state_dict())


def test_mobilenet_depthwise_and_residual_blocks():
    model = build("mobilenetv2", (3, 32, 32), 10)
    assert sum(c.groups > 1 for c in convolutions(model)) == 17
    assert sum(getattr(m, "residual", False) is True for m in model.modules()) == 10


@pytest.mark.parametrize("width", [0.25, 0.35, 0.5, 0.75, 1.0, 1.4])
def test_mobilenet_widths_are_multiples_of_eight(width):
    model = build(f"mobilenetv2(width={width},stem=small)", (3, 8, 8), 10)
    assert all(c.out_channels % 8 == 0 for c in convolutions(model))
    assert model.classifier.in_features == (1792 if width == 1.4 else 1280)


@pytest.mark.parametrize(("text", "kind", "count"), [("group", nn.GroupNorm, 20), ("batch", nn.BatchNorm2d, 20)])
def test_norm_policy(text, kind, count):
    layers = [
        m
        for m in build(f"resnet18(norm={text})", (3, 8, 8), 10).modules()
        if isinstance(m, nn.GroupNorm | nn.BatchNorm2d)
    ]
    assert len(layers) == count
    assert all(isinstance(m, kind) for m in layers)


def test_batch_norm_matches_torch_without_the_counter():
    theirs, ours = nn.BatchNorm2d(3), BatchNorm(3)
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    assert ours.num_batches_tracked == 0
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize(("text", "groups"), [("resnet18", 2), ("resnet20(groups=4)", 4), ("mobilenetv2", 8)])
def test_groups(text, groups):
    assert {m.num_groups for m in build(text, (3, 32, 32), 10).modules() if isinstance(m, nn.GroupNorm)} == {groups}


def test_unrolled_lstm_is_torchs_lstm():
    torch.manual_seed(0)
    ours = UnrolledLstm(3, 5)
    torch.manual_seed(0)
    theirs = nn.LSTM(3, 5, batch_first=True)
    assert {n: p.tolist() for n, p in ours.named_parameters()} == {n: p.tolist() for n, p in theirs.named_parameters()}
    x = torch.randn(2, 6, 3)
    (y, (h, c)), (y_, (h_, c_)) = ours(x), theirs(x)
    torch.testing.assert_close((y, h, c), (y_, h_[0], c_[0]))


def test_fused_char_lstm_gives_the_same_and_learns_the_same():
    x = torch.randint(0, 9, (3, 11))
    gradients = []
    for text in ("char-lstm(hidden=12)", "char-lstm(hidden=12,fused=true)"):
        torch.manual_seed(0)
        model = build(text, (11,), 9)
        model(x).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert list(gradients[0]) == list(gradients[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_char_lstm_sees_only_the_past():
    torch.manual_seed(0)
    model = build("char-lstm(hidden=12)", (6,), 9)
    x = torch.randint(0, 9, (1, 6))
    y = x.clone()
    y[0, 4] = (y[0, 4] + 1) % 9
    before, after = model(x), model(y)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])
