"""Models of a run for other tools: tensors by name for torch and safetensors, a graph for ONNX."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedflat.data import Dataset, normalise
from fedflat.errors import UserError, one_of
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.models import merge_adapters

Format = Literal["torch", "safetensors", "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: dict[str, Format] = {".pt": "torch", ".pth": "torch", ".safetensors": "safetensors", ".onnx": "onnx"}
"""The formats that a file's name says."""
INSTALL = "pip install 'fedflat[onnx]'"


def format_of(path: Path, wanted: str | None = None) -> Format:
    """The format that is asked for, or else the one that a file's name says.

    >>> format_of(Path("model.pt")), format_of(Path("weights"), "onnx")
    ('torch', 'onnx')
    """
    if wanted is not None:
        if wanted not in FORMATS:
            raise one_of("format", wanted, FORMATS)
        return next(known for known in FORMATS if known == wanted)
    if path.suffix not in ENDINGS:
        raise UserError(
            f"the name {path.name} does not say in which format; expected one that ends in {', '.join(ENDINGS)}, or a format"
        )
    return ENDINGS[path.suffix]


def write_state(path: Path, tensors: Mapping[str, Tensor], format: Format, about: Mapping[str, Any]) -> None:
    """The tensors of a model, for ``torch.load(path, weights_only=True)`` or ``safetensors.torch.load_file(path)``."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if format == "safetensors":
        content = save(whole, {"format": "pt", "fedflat": json.dumps(about)})
    else:
        buffer = io.BytesIO()
        torch.save(whole, buffer)
        content = buffer.getvalue()
    create_folder(path.parent)
    write_whole(path, content)


def write_onnx(path: Path, network: nn.Module, data: Dataset, about: Mapping[str, Any]) -> None:
    """A model as an ONNX graph from ``inputs`` to ``outputs`` for batches of any size; adapters are merged first.

    The graph takes what the model takes: images are normalised, (pixel / 255 - mean) / std, by the mean and std that its metadata hold.
    """
    missing = [package for package in ("onnx", "onnxscript") if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"ONNX needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: {INSTALL}"
        )
    network = merge_adapters(network).to("cpu", torch.float32).eval()
    inputs = _example(data)
    try:
        with _quiet():
            program = torch.onnx.export(
                network,
                (inputs,),
                dynamo=True,
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
    except Exception as error:  # an exporter of graphs fails in as many ways as there are models
        raise UserError(
            f"this model cannot be written as ONNX: {str(error).splitlines()[0]}; export its tensors (torch, safetensors)"
        ) from error
    assert program is not None
    proto = program.model_proto
    if not proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise UserError(
            "this model fixes the size of its batches, so that its graph would take no other; "
            "let its forward take the size from x.shape[0], not from len(x)"
        )
    known = {**about, "mean": list(data.mean), "std": list(data.std), "classes": list(data.classes)}
    proto.metadata_props.add(key="fedflat", value=json.dumps(known))
    create_folder(path.parent)
    write_whole(path, proto.SerializeToString())


def _example(data: Dataset) -> Tensor:
    """Two examples as a model takes them: one alone would fix the size of the batch."""
    raw = data.test.inputs[:1].expand(2, *data.input_shape)
    mean, std = (torch.tensor(values, dtype=torch.float32) for values in (data.mean, data.std))
    return normalise(torch.as_tensor(raw), mean, std, torch.float32).contiguous()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of other packages and of its own future."""
    talkative = logging.getLogger("torch.onnx")
    level = talkative.level
    talkative.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        talkative.setLevel(level)
