"""Models, one module per family, named by texts such as ``resnet18(norm=batch,stem=torchvision)``.

Vision transformers are initialised as in timm, all other models as torch does by default. Models have no state except
parameters and BatchNorm buffers, and work under ``torch.func.functional_call`` and ``vmap``. Imports no other package
of fedflat.
"""

from fedflat.models.bisenet import BiSeNetV2
from fedflat.models.femnist import FemnistCnn
from fedflat.models.hugging_face import HuggingFace
from fedflat.models.lenet import Cnn, LeNet5
from fedflat.models.low_rank import merge_adapters
from fedflat.models.lstm import CharLstm
from fedflat.models.mlp import Mlp
from fedflat.models.mobilenet import MobileNetV2
from fedflat.models.registry import (
    MODELS,
    ImageModelSpec,
    ModelExample,
    ModelSpec,
    build,
    canonical_model,
    classifier_parameters,
    model_spec,
    names,
    parameter_count,
)
from fedflat.models.resnet import ResNet18, ResNet20
from fedflat.models.trained import describe_trained, freeze, trained_parts
from fedflat.models.vgg import Vgg11
from fedflat.models.vit import VitB16, VitS16, VitTiny

for _spec in (
    Mlp, LeNet5, Cnn, Vgg11, ResNet18, ResNet20, MobileNetV2, VitB16, VitS16, VitTiny, FemnistCnn, CharLstm, BiSeNetV2,
    HuggingFace,
):  # fmt: skip
    MODELS.register(_spec.name, _spec)

__all__ = [
    "MODELS",
    "ImageModelSpec",
    "ModelExample",
    "ModelSpec",
    "build",
    "canonical_model",
    "classifier_parameters",
    "describe_trained",
    "freeze",
    "merge_adapters",
    "model_spec",
    "names",
    "parameter_count",
    "trained_parts",
]
