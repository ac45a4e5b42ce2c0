"""The registry of models: from a text such as ``resnet18(norm=batch)`` to a spec and a network."""

from __future__ import annotations

import torch
from torch import nn

from fedflat.errors import UserError
from fedflat.models.bisenet import BiSeNetV2
from fedflat.models.femnist import FemnistCnn
from fedflat.models.lenet import Cnn, LeNet5
from fedflat.models.lstm import CharLstm
from fedflat.models.mlp import Mlp
from fedflat.models.mobilenet import MobileNetV2
from fedflat.models.resnet import ResNet18, ResNet20
from fedflat.models.spec import ModelSpec
from fedflat.models.vgg import Vgg11
from fedflat.models.vit import VitB16, VitS16, VitTiny
from fedflat.registry import Registry
from fedflat.text import changed, make, parse_one, show

MODELS: Registry[type[ModelSpec]] = Registry("model", see="fedflat models")
"""Model specs by name; add your own with ``fedflat.register("mine", Mine)``."""
for _spec in (
    Mlp, LeNet5, Cnn, Vgg11, ResNet18, ResNet20, MobileNetV2, VitB16, VitS16, VitTiny, FemnistCnn, CharLstm, BiSeNetV2,
):  # fmt: skip
    MODELS.register(_spec.name, _spec)


def names() -> list[str]:
    """Return the names of all models, in the order of the documentation."""
    return list(MODELS)


def model_spec(text: str) -> ModelSpec:
    """Parse the text of a model, a name with parameters in parentheses, and check the parameters.

    >>> model_spec("MLP(hidden=32)")
    Mlp(hidden=32, layers=1)
    """
    call = parse_one(text)
    return make(MODELS.find(call.name), call, "model")


def canonical_model(text: str) -> str:
    """Return the shortest text that names the same model.

    >>> canonical_model("resnet18( stem=torchvision, norm=group, groups=2 )")
    'resnet18(stem=torchvision)'
    """
    spec = model_spec(text)
    return show(MODELS.name_of(type(spec)) or spec.name, changed(spec))


def build(text: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a model initialised from torch's global generator.

    Args:
        text: name and parameters.
        input_shape: shape of one sample.
        classes: number of outputs.

    >>> build("mlp(hidden=3)", (4,), 2)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=4, out_features=3, bias=True)
      (2): ReLU()
      (3): Linear(in_features=3, out_features=2, bias=True)
    )
    """
    return model_spec(text).build(input_shape, classes)


def parameter_count(text: str, input_shape: tuple[int, ...], classes: int) -> int:
    """Count the parameters of a model without allocating them; arguments as for ``build``.

    >>> parameter_count("cnn", (3, 32, 32), 10)
    797962
    """
    with torch.device("meta"):
        return sum(p.numel() for p in build(text, input_shape, classes).parameters())


def classifier_parameters(model: nn.Module) -> set[str]:
    """Return the parameter names of the last linear layer or, in models without one, of the last convolution.

    >>> sorted(classifier_parameters(build("mlp", (4,), 2)))
    ['3.bias', '3.weight']
    """
    modules = list(model.named_modules())
    layers = [name for name, module in modules if isinstance(module, nn.Linear)]
    if not layers:
        layers = [name for name, module in modules if isinstance(module, nn.Conv2d)]
    if not layers:
        raise UserError("this model has no linear layer and no convolution, so it has no classifier")
    classifier = model.get_submodule(layers[-1])
    return {name for name, _ in classifier.named_parameters(prefix=layers[-1])}
