"""Models, one module per family, named by texts such as ``resnet18(norm=batch,stem=torchvision)``.

All use torch's default initialisation (transformers timm's), have no state except parameters and BatchNorm buffers, and
work under ``torch.func.functional_call`` and ``vmap``. Imports only ``registry``, ``text`` and ``errors`` of fedflat.
"""

from fedflat.models.adapters import merge_adapters
from fedflat.models.registry import (
    MODELS,
    build,
    canonical_model,
    classifier_parameters,
    model_spec,
    names,
    parameter_count,
)
from fedflat.models.spec import ImageModelSpec, ModelExample, ModelSpec
from fedflat.models.trained import describe_trained, freeze, trained_parts

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
