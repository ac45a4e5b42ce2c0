"""Models, one module per family, each named by a text such as ``resnet18(norm=batch,stem=torchvision)``.

All of them start from torch's default init (transformers from timm's), keep no state but parameters (and the buffers of
``norm=batch``), work in place on nothing, and so run under ``torch.func.functional_call`` and ``vmap``.
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
from fedflat.models.spec import ImageModelSpec, ModelSpec
from fedflat.models.trained import freeze, trained_parts, trained_sentence

__all__ = [
    "MODELS",
    "ImageModelSpec",
    "ModelSpec",
    "build",
    "canonical_model",
    "classifier_parameters",
    "freeze",
    "merge_adapters",
    "model_spec",
    "names",
    "parameter_count",
    "trained_parts",
    "trained_sentence",
]
