"""Export of models: state dicts for torch and safetensors, graphs for ONNX, adapters for peft."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedflat.data import Dataset, normalise
from fedflat.engines.problem.token_model import adapt
from fedflat.errors import UserError, first_line
from fedflat.experiment.store.files import create_folder, require_regular, write_atomically
from fedflat.models import merge_adapters
from fedflat.models.peft_adapters import CONFIG_FILE, WEIGHTS_FILE, save_peft_adapter

Format = Literal["torch", "safetensors", "onnx", "peft"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: dict[str, Format] = {".pt": "torch", ".pth": "torch", ".safetensors": "safetensors", ".onnx": "onnx"}
"""The format that each file extension stands for."""
INSTALL = "pip install 'fedflat[onnx]'"


def format_of(path: Path, wanted: str | None = None) -> Format:
    """The format to export in: ``wanted``, or by default the one that the file's extension stands for.

    >>> format_of(Path("model.pt")), format_of(Path("weights"), "onnx")
    ('torch', 'onnx')
    """
    by_extension = ENDINGS.get(path.suffix)
    if wanted is None:
        if by_extension is None:
            if path.is_dir():
                raise UserError(f"{path} is a folder; expected a file such as {path / 'model.pt'}")
            raise UserError(
                f"cannot tell the format of {path.name}; use an extension out of {', '.join(ENDINGS)}, or pass a format"
            )
        return by_extension
    format = next((known for known in FORMATS if known == wanted), None)  # ``wanted``, with the type ``Format``
    if format is None:
        raise UserError(f"unknown format '{wanted}'; expected torch (a state_dict), safetensors, onnx or peft")
    if by_extension not in (None, format):
        raise UserError(
            f"{path.name} has the extension of {by_extension}, but the format is {format}; change one of them"
        )
    return format


def write_state(path: Path, tensors: Mapping[str, Tensor], format: Format, description: Mapping[str, Any]) -> None:
    """Write a state dict, for ``torch.load(path, weights_only=True)`` or ``safetensors.torch.load_file(path)``.

    Args:
        path: the file; its folder is created if necessary.
        tensors: the state dict.
        format: ``torch`` or ``safetensors``.
        description: what the model is, for the header of a safetensors file, or for ``<path>.json`` next to a torch
            file.

    Raises:
        UserError: the file or the JSON file exists and is not that of an exported model.
    """
    _require_replaceable(path)
    description_file = path.with_name(f"{path.name}.json")
    if format == "torch" and description_file.exists() and not _describes_export(description_file):
        raise UserError(
            f"{description_file} exists and does not describe an exported model; the export would overwrite it; "
            "move it, or choose another file name for the model"
        )
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if format == "safetensors":
        content = save(copies, {"format": "pt", "fedflat": json.dumps(description)})
    else:
        buffer = io.BytesIO()
        torch.save(copies, buffer)
        content = buffer.getvalue()
    create_folder(path.parent)
    write_atomically(path, content)
    if format == "torch":
        write_atomically(description_file, json.dumps(description, indent=2) + "\n")


def _require_replaceable(file: Path) -> None:
    """Raise a ``UserError`` if a file exists that does not look like an exported model."""
    require_regular(file)
    if file.exists() and file.suffix not in ENDINGS and not _is_model_file(file):
        raise UserError(
            f"{file} exists and is not an exported model; move it, or choose a name that ends in {', '.join(ENDINGS)}"
        )


def _is_model_file(file: Path) -> bool:
    """Whether a file starts like one of torch (a ZIP archive), safetensors (the length of a JSON text) or ONNX."""
    with file.open("rb") as stream:
        start = stream.read(9)
    return start.startswith(b"PK") or start[8:] == b"{" or start[:1] == b"\x08"


def _describes_export(file: Path) -> bool:
    """Whether a JSON file exists and describes an exported model."""
    try:
        description = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(description, dict) and {"model", "algorithm", "rounds"} <= description.keys()


def write_onnx(path: Path, network: nn.Module, data: Dataset, description: Mapping[str, Any]) -> None:
    """Write a model as an ONNX graph from ``inputs`` to ``outputs``, for any batch size; adapters are merged first.

    The graph expects normalised images, ``(pixel / 255 - mean) / std``; mean and std are in its metadata.

    Args:
        path: the file; its folder is created if necessary.
        network: the model.
        data: the dataset it was trained on.
        description: what the model is, for the metadata.

    Raises:
        UserError: the model cannot be exported, or the file exists and is not an exported model.
    """
    _require_replaceable(path)
    missing = [package for package in ("onnx", "onnxscript") if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"ONNX export needs {' and '.join(missing)}; install with: {INSTALL}")
    network = adapt(merge_adapters(network)).to("cpu", torch.float32).eval()
    inputs = _example_batch(data)
    try:
        with _exporter_silenced():
            program = torch.onnx.export(
                network,
                (inputs,),
                dynamo=True,
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
    except Exception as error:  # the exporter raises many types of errors
        raise UserError(
            f"this model cannot be exported to ONNX: {first_line(error)}; export torch or safetensors instead"
        ) from error
    assert program is not None
    proto = program.model_proto
    if not proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise UserError(
            "this model fixes its batch size, so the graph would accept no other; "
            "use x.shape[0] instead of len(x) in its forward"
        )
    proto.metadata_props.add(key="fedflat", value=json.dumps(description))
    create_folder(path.parent)
    write_atomically(path, proto.SerializeToString())


def write_adapter(folder: Path, network: nn.Module) -> None:
    """Write the adapter of a ``PeftModel`` to a folder, for ``PeftModel.from_pretrained(base, folder)``.

    The folder is created if necessary. Raises a ``UserError`` if the model has no adapter of ``peft``.
    """
    if folder.is_file():
        raise UserError(f"{folder} is a file; expected a folder for {CONFIG_FILE} and {WEIGHTS_FILE}")
    with tempfile.TemporaryDirectory() as temporary:
        save_peft_adapter(network, Path(temporary))
        create_folder(folder)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            write_atomically(folder / name, (Path(temporary) / name).read_bytes())


def _example_batch(data: Dataset) -> Tensor:
    """A batch of two normalised examples; a single one would fix the batch size."""
    inputs = data.test.inputs[:1].expand(2, *data.input_shape)
    mean = torch.tensor(data.mean, dtype=torch.float32)
    std = torch.tensor(data.std, dtype=torch.float32)
    return normalise(torch.as_tensor(inputs), mean, std, torch.float32).contiguous()


@contextmanager
def _exporter_silenced() -> Iterator[None]:
    """Silence the exporter's warnings about other packages and deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
