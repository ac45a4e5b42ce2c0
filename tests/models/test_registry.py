"""Names, texts and mistakes."""

import dataclasses

import pytest
import torch
from torch import nn

from fedflat.errors import UserError
from fedflat.models import MODELS, ImageModelSpec, build, canonical_model, classifier_parameters, model_spec, names
from fedflat.text import param, parameters


@pytest.mark.parametrize("name", names())
def test_the_bare_name_is_canonical(name):
    assert canonical_model(name) == name
    assert model_spec(name) == MODELS[name]()
    assert MODELS[name].name == name


@pytest.mark.parametrize("name", names())
def test_every_parameter_explains_itself(name):
    assert MODELS[name].__doc__
    assert all(field.metadata["help"] for field in parameters(MODELS[name]))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("resnet18(norm=batch,stem=torchvision)", "resnet18(norm=batch,stem=torchvision)"),
        ("resnet18(stem=small, norm=group, groups=2)", "resnet18"),
        ("mlp( layers=3 , hidden=64 )", "mlp(layers=3)"),
        ("mobilenetv2(width=1,groups=4)", "mobilenetv2(groups=4)"),
        ("mobilenetv2(width=0.50)", "mobilenetv2(width=0.5)"),
        ("femnist-cnn(dropout=false)", "femnist-cnn(dropout=false)"),
        ("char-lstm(embedding=8,hidden=128,tanh=true)", "char-lstm(hidden=128,tanh=true)"),
        ("vgg11(hidden=256)", "vgg11(hidden=256)"),
        ("vit-tiny(patch=4,depth=6,heads=3)", "vit-tiny(depth=6)"),
        ("vit-b16(width=768)", "vit-b16"),
    ],
)
def test_round_trip(text, canonical):
    assert canonical_model(text) == canonical
    assert model_spec(canonical) == model_spec(text)
    assert canonical_model(canonical) == canonical


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("resnet19", "resnet18"),
        ("resnet19", "fedflat models"),
        ("lenet5(hidden=3)", "lenet5 has no parameter 'hidden'"),
        ("resnet18(norm=layer)", "expected one of group, batch"),
        ("resnet18(stem=big)", "expected one of small, torchvision"),
        ("mlp(hidden=0)", "at least 1"),
        ("mlp(hidden=2.5)", "hidden=2.5"),
        ("mobilenetv2(width=0)", "above 0"),
        ("cnn+vgg11", "2 parts"),
    ],
)
def test_wrong_text(text, said):
    with pytest.raises(UserError) as error:
        model_spec(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "input_shape", "said"),
    [
        ("lenet5", (1, 8, 8), "at least 16x16 pixels, but these have 8x8"),
        ("cnn", (3, 32, 15), "at least 16x16"),
        ("vgg11", (3, 28, 28), "at least 32x32"),
        ("resnet18", (3, 7, 8), "at least 8x8"),
        ("resnet18(stem=torchvision)", (3, 28, 28), "at least 32x32"),
        ("resnet20", (3, 3, 3), "at least 4x4"),
        ("mobilenetv2", (3, 28, 28), "at least 32x32"),
        ("femnist-cnn", (1, 5, 5), "at least 6x6"),
        ("resnet18", (80,), "samples have shape 80"),
        ("lenet5", (28, 28), "28x28"),
        ("char-lstm", (3, 32, 32), "samples have shape 3x32x32"),
        ("mlp", (3, 0), "positive sizes"),
        ("resnet20(groups=3)", (3, 32, 32), "groups=3 does not divide the 16 channels"),
    ],
)
def test_wrong_samples(text, input_shape, said):
    with pytest.raises(UserError) as error:
        build(text, input_shape, 10)
    message = str(error.value)
    assert said in message
    assert "\n" not in message
    assert ". " not in message


def test_a_model_without_classes_is_rejected():
    with pytest.raises(UserError, match="at least 1"):
        build("mlp", (4,), 0)


@pytest.mark.parametrize(
    ("text", "smallest"),
    [
        ("lenet5", 16),
        ("cnn", 16),
        ("vgg11", 32),
        ("resnet18", 8),
        ("resnet18(stem=torchvision)", 32),
        ("resnet20", 4),
        ("mobilenetv2(width=0.25)", 32),
        ("mobilenetv2(width=0.25,stem=small)", 8),
        ("femnist-cnn", 6),
    ],
)
def test_the_smallest_image_works(text, smallest):
    assert build(text, (1, smallest, smallest), 4)(torch.randn(2, 1, smallest, smallest)).shape == (2, 4)


@pytest.mark.parametrize("name", names())
def test_classifier_is_the_layer_that_gives_the_classes(name):
    shape = (12,) if name == "char-lstm" else (3, 32, 32)
    with torch.device("meta"):
        model = build(name, shape, 13)
    chosen = classifier_parameters(model)
    by_name = dict(model.named_parameters())
    assert chosen <= set(by_name)
    assert {kind: by_name[f].shape[0] for f in chosen for kind in [f.rpartition(".")[2]]} == {"weight": 13, "bias": 13}


def test_classifier_of_other_models():
    assert classifier_parameters(nn.Linear(2, 3, bias=False)) == {"weight"}
    with pytest.raises(UserError, match="no linear layer"):
        classifier_parameters(nn.ReLU())
    assert classifier_parameters(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1))) == {"1.weight", "1.bias"}


def test_a_user_model(request):
    @dataclasses.dataclass(frozen=True)
    class Tiny(ImageModelSpec):
        name = "tiny"
        channels: int = param(8, "width of the convolution", low=1)

        def smallest_side(self):
            return 3

        def network(self, input_shape, classes):
            conv = nn.Conv2d(input_shape[0], self.channels, 3)
            return nn.Sequential(
                conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.channels, classes)
            )

    MODELS.register(Tiny.name, Tiny)
    request.addfinalizer(lambda: MODELS.unregister(Tiny.name))
    assert canonical_model("tiny(channels=4)") == "tiny(channels=4)"
    assert build("tiny", (1, 5, 5), 2)(torch.zeros(1, 1, 5, 5)).shape == (1, 2)
    with pytest.raises(UserError, match="'cnn' is already registered"):
        MODELS.register("CNN", Tiny)


@pytest.mark.parametrize(("text", "name"), [("ResNet-18", "resnet18"), ("LeNet5", "lenet5"), ("ViT-B16", "vit-b16")])
def test_spelling_of_names_is_free(text, name):
    assert canonical_model(text) == name
