"""Parameter counts against formulas written here from the papers' tables, not from the code."""

from itertools import pairwise

import pytest

from fedflat.models import build, names, parameter_count

IMAGE = (3, 32, 32)


def conv(inputs, outputs, kernel, bias=True):
    return (inputs * kernel * kernel + bias) * outputs


def linear(inputs, outputs):
    return (inputs + 1) * outputs


def normed(inputs, outputs, kernel):
    return conv(inputs, outputs, kernel, bias=False) + 2 * outputs


def mlp(pixels, hidden, layers, classes):
    widths = [pixels] + [hidden] * layers + [classes]
    return sum(linear(a, b) for a, b in pairwise(widths))


def lenet5(channels, flat, classes):
    return conv(channels, 6, 5) + conv(6, 16, 5) + linear(flat, 120) + linear(120, 84) + linear(84, classes)


def cnn(channels, flat, classes):
    return conv(channels, 64, 5) + conv(64, 64, 5) + linear(flat, 384) + linear(384, 192) + linear(192, classes)


def vgg11(hidden, classes, pixels=1):
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    return sum(conv(a, b, 3) for a, b in pairwise(widths)) + linear(512 * pixels, hidden) + linear(hidden, classes)


def resnet18(stem_kernel, classes, channels=3):
    total = normed(channels, 64, stem_kernel) + 4 * normed(64, 64, 3)
    for inputs, outputs in ((64, 128), (128, 256), (256, 512)):
        total += normed(inputs, outputs, 3) + 3 * normed(outputs, outputs, 3) + normed(inputs, outputs, 1)
    return total + linear(512, classes)


def resnet20(classes):
    total = normed(3, 16, 3) + 6 * normed(16, 16, 3)
    for inputs, outputs in ((16, 32), (32, 64)):
        total += normed(inputs, outputs, 3) + 5 * normed(outputs, outputs, 3)
    return total + linear(64, classes)


def mobilenetv2(classes, stem, stages, last):
    total, inputs = normed(3, stem, 3), stem
    for expansion, outputs, blocks in stages:
        for _ in range(blocks):
            wide = expansion * inputs
            expand = normed(inputs, wide, 1) if expansion > 1 else 0
            total += expand + normed(1, wide, 3) + normed(wide, outputs, 1)
            inputs = outputs
    return total + normed(inputs, last, 1) + linear(last, classes)


FULL_WIDTH = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
HALF_WIDTH = ((1, 8, 1), (6, 16, 2), (6, 16, 3), (6, 32, 4), (6, 48, 3), (6, 80, 3), (6, 160, 1))


def vit(width, depth, patch, patches, classes, channels=3, mlp=4):
    block = (
        2 * 2 * width
        + linear(width, 3 * width)
        + linear(width, width)
        + linear(width, mlp * width)
        + linear(mlp * width, width)
    )
    return conv(channels, width, patch) + (1 + 1 + patches) * width + depth * block + 2 * width + linear(width, classes)


def femnist(flat, classes):
    return conv(1, 32, 3) + conv(32, 64, 3) + linear(flat, 128) + linear(128, classes)


def char_lstm(vocabulary, embedding, hidden, layers):
    inputs = [embedding] + [hidden] * (layers - 1)
    return vocabulary * embedding + sum(4 * hidden * (i + hidden + 2) for i in inputs) + linear(hidden, vocabulary)


CASES = [
    ("mlp", (1, 8, 8), 10, mlp(64, 64, 1, 10)),
    ("mlp(hidden=200,layers=2)", (1, 28, 28), 10, mlp(784, 200, 2, 10)),
    ("mlp(layers=0)", (7,), 3, 7 * 3 + 3),
    ("lenet5", (1, 28, 28), 10, lenet5(1, 16 * 5 * 5, 10)),
    ("lenet5", IMAGE, 10, lenet5(3, 16 * 5 * 5, 10)),
    ("lenet5", (1, 16, 16), 10, lenet5(1, 16 * 2 * 2, 10)),
    ("cnn", IMAGE, 10, 797_962),
    ("cnn", IMAGE, 100, cnn(3, 64 * 5 * 5, 100)),
    ("cnn", (1, 16, 20), 10, cnn(1, 64 * 1 * 2, 10)),
    ("vgg11", IMAGE, 10, vgg11(100, 10)),
    ("vgg11(hidden=256)", (3, 64, 32), 100, vgg11(256, 100, pixels=2)),
    ("resnet18", IMAGE, 10, resnet18(3, 10)),
    ("resnet18", (1, 28, 28), 62, resnet18(3, 62, channels=1)),
    ("resnet18(norm=batch)", IMAGE, 10, resnet18(3, 10)),
    ("resnet18(stem=torchvision)", IMAGE, 100, resnet18(7, 100)),
    ("resnet20", IMAGE, 10, resnet20(10)),
    ("resnet20(norm=batch)", IMAGE, 100, resnet20(100)),
    ("mobilenetv2", IMAGE, 10, mobilenetv2(10, 32, FULL_WIDTH, 1280)),
    ("mobilenetv2(norm=batch)", IMAGE, 1000, 3_504_872),
    ("mobilenetv2(width=0.5,stem=small)", IMAGE, 10, mobilenetv2(10, 16, HALF_WIDTH, 1280)),
    ("vit-b16", (3, 224, 224), 200, 85_952_456),
    ("vit-b16", (3, 224, 224), 1000, vit(768, 12, 16, 196, 1000)),
    ("vit-s16", (3, 224, 224), 1000, vit(384, 12, 16, 196, 1000)),
    ("vit-tiny", IMAGE, 10, vit(192, 12, 4, 64, 10)),
    ("vit-tiny(patch=16)", (3, 224, 224), 1000, vit(192, 12, 16, 196, 1000)),
    ("vit-tiny(patch=7,depth=2,width=8,heads=1,mlp=2)", (1, 28, 28), 3, vit(8, 2, 7, 16, 3, channels=1, mlp=2)),
    ("femnist-cnn", (1, 28, 28), 62, femnist(64 * 12 * 12, 62)),
    ("char-lstm", (80,), 90, char_lstm(90, 8, 256, 2)),
    ("char-lstm(embedding=4,hidden=6,layers=3,tanh=true)", (5,), 11, char_lstm(11, 4, 6, 3)),
]


@pytest.mark.parametrize(("text", "input_shape", "classes", "expected"), CASES)
def test_parameter_count(text, input_shape, classes, expected):
    assert parameter_count(text, input_shape, classes) == expected


def test_every_model_is_counted():
    assert {text.split("(")[0] for text, *_ in CASES} == set(names()) - {"bisenetv2"}  # in test_bisenet.py


def test_published_sizes():
    assert round(resnet18(3, 10) / 1e6, 2) == 11.17
    assert round(resnet20(10) / 1e6, 2) == 0.27
    assert cnn(3, 64 * 5 * 5, 10) == 797_962
    assert vit(768, 12, 16, 196, 1000) == 86_567_656  # timm's vit_base_patch16_224
    assert vit(384, 12, 16, 196, 1000) == 22_050_664
    assert vit(192, 12, 16, 196, 1000) == 5_717_416
    assert mobilenetv2(1000, 32, FULL_WIDTH, 1280) == 3_504_872


def test_counting_allocates_nothing_and_counts_what_is_built():
    built = build("lenet5", (1, 28, 28), 10)
    assert all(p.device.type == "cpu" for p in built.parameters())
    assert parameter_count("lenet5", (1, 28, 28), 10) == sum(p.numel() for p in built.parameters())
