"""BiSeNetV2: its parameters by the paper's layers, and its outputs in training and evaluation."""

import pytest
import torch
from torch import nn

from fedflat.models import build, classifier_parameters, parameter_count

SMALL = "bisenetv2(width=0.25)"


def conv(inputs, outputs, kernel=3, groups=1):
    """A convolution without bias and its normalisation's scale and shift."""
    return inputs // groups * kernel**2 * outputs + 2 * outputs


def bare(inputs, outputs, kernel):
    return inputs * kernel**2 * outputs


def expansion(inputs, outputs, stride):
    """Parameters of a gather-and-expansion layer (figure 5); stride 2 adds a depthwise convolution and a shortcut."""
    wide = 6 * inputs
    total = conv(inputs, inputs) + conv(inputs, wide, groups=inputs) + conv(wide, outputs, 1)
    if stride == 2:
        total += conv(wide, wide, groups=wide) + conv(inputs, inputs, groups=inputs) + conv(inputs, outputs, 1)
    return total


def head(inputs, hidden, classes):
    return conv(inputs, hidden) + (hidden + 1) * classes


def stated(classes, auxiliary=True):
    """The layers of table 1 and figures 4 to 7, one by one."""
    detail = conv(3, 64) + conv(64, 64)
    detail += conv(64, 64) + 2 * conv(64, 64)
    detail += conv(64, 128) + 2 * conv(128, 128)
    stem = conv(3, 16) + conv(16, 8, 1) + conv(8, 16) + conv(32, 16)
    semantic = stem
    semantic += expansion(16, 32, 2) + expansion(32, 32, 1)
    semantic += expansion(32, 64, 2) + expansion(64, 64, 1)
    semantic += expansion(64, 128, 2) + 3 * expansion(128, 128, 1)
    context = 2 * 128 + conv(128, 128, 1) + bare(128, 128, 3)
    aggregation = 2 * (conv(128, 128, groups=128) + bare(128, 128, 1)) + 2 * conv(128, 128) + conv(128, 128)
    heads = head(128, 1024, classes)
    if auxiliary:
        heads += sum(head(width, 128, classes) for width in (16, 32, 64, 128))
    return detail + semantic + context + aggregation + heads


@pytest.mark.parametrize("classes", [11, 19])
def test_parameters_match_the_stated_layers(classes):
    assert parameter_count("bisenetv2", (3, 180, 240), classes) == stated(classes)
    assert parameter_count("bisenetv2(auxiliary=false,norm=group)", (3, 64, 64), classes) == stated(
        classes, auxiliary=False
    )
    assert stated(19, auxiliary=False) == 3_358_371


def test_statistics_are_two_for_each_normalised_channel():
    with torch.device("meta"):
        buffers = dict(build("bisenetv2", (3, 64, 64), 11).named_buffers())
        none = list(build("bisenetv2(norm=group)", (3, 64, 64), 11).buffers())
    norms = sum(b.numel() for name, b in buffers.items() if name.endswith(("running_mean", "running_var")))
    assert norms == sum(b.numel() for b in buffers.values() if b.is_floating_point()) and norms > 18_000 and not none


@pytest.mark.parametrize("size", [(32, 32), (45, 66), (180, 240)])
def test_training_gives_five_outputs_and_evaluation_one(size):
    torch.manual_seed(0)
    model, images = build(SMALL, (3, *size), 5), torch.randn(2, 3, *size)
    outputs = model(images)
    assert isinstance(outputs, tuple) and [tuple(one.shape) for one in outputs] == [(2, 5, *size)] * 5
    one = model.eval()(images)
    assert one.shape == (2, 5, *size) and torch.isfinite(one).all()
    alone = build("bisenetv2(width=0.25,auxiliary=false)", (3, *size), 5)
    assert isinstance(alone(images), torch.Tensor)


def test_every_parameter_is_trained_and_auxiliary_heads_see_their_own_stage():
    torch.manual_seed(0)
    model = build(SMALL, (3, 64, 64), 5)
    outputs = model(torch.randn(4, 3, 64, 64))
    sum(one.square().mean() for one in outputs).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    model.zero_grad()
    model(torch.randn(4, 3, 64, 64))[1].square().mean().backward()
    touched = {
        name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
    }
    assert touched == {"stem", "auxiliary"}, "the first auxiliary head looks at the stem alone"


def test_a_single_image_can_be_trained_on():
    """After global pooling it has one value per channel: no variance, so that running statistics stand in, and stay."""
    torch.manual_seed(0)
    model = build(SMALL, (3, 32, 32), 5)
    before = model.context.whole[0].running_mean.clone()
    assert all(torch.isfinite(one).all() for one in model(torch.randn(1, 3, 32, 32)))
    assert torch.equal(model.context.whole[0].running_mean, before)
    assert not torch.equal(model.stem.first[1].running_mean, torch.zeros(4))


def test_the_classifier_is_the_main_head():
    model = build(SMALL, (3, 32, 32), 5)
    assert classifier_parameters(model) == {"head.1.weight", "head.1.bias"}
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == []


def test_width_scales_every_channel_to_an_even_number():
    counts = [parameter_count(f"bisenetv2(width={width})", (3, 32, 32), 4) for width in (0.1, 0.25, 0.5, 1.0)]
    assert counts == sorted(counts) and counts[0] < 80_000
    model = build("bisenetv2(width=0.1)", (3, 32, 32), 4)
    assert all(m.num_features % 2 == 0 for m in model.modules() if isinstance(m, nn.BatchNorm2d))
