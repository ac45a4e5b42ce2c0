"""Safetensors files with a header that describes the tensors and has a checksum; any safetensors reader opens them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedflat.errors import UserError
from fedflat.experiment.store.files import DamagedFile, write_atomically

FORMAT = 2
"""Version of the header, which also has a checksum; files of other programs, and exported ones, have neither."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], exclusive: bool = False
) -> None:
    """Write tensors and a header that describes them.

    In the file, the entry ``fedflat`` of the metadata is a JSON object: the values of ``header``, the ``format``, and
    the ``sha256`` of all tensors and of the other values in this object.
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # The values that a reader will see; safetensors stores tensors in an order of its own.
    stored = json.loads(json.dumps({**header, "format": FORMAT, "order": list(contiguous)}))
    stored["sha256"] = checksum(contiguous, stored)
    write_atomically(path, save(contiguous, {"fedflat": json.dumps(stored)}), exclusive)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the header of a safetensors file; the header is empty if fedflat did not write the file.

    Raises:
        DamagedFile: the file is incomplete, or its checksum does not match its content.
        UserError: a newer version of fedflat wrote the file.
        OSError: the file cannot be opened.
    """
    path.open("rb").close()  # raises the actual OSError; safetensors reports every unreadable file as missing
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = json.loads((file.metadata() or {}).get("fedflat", "{}"))
    except (OSError, SafetensorError, ValueError):
        header = None
    if not isinstance(header, dict):
        raise DamagedFile(f"{path} is damaged or not a safetensors file")
    # A file with only one of these entries is damaged.
    if "format" in header or "sha256" in header:
        recorded = header.pop("sha256", None)
        version = header.get("format")
        is_newer = isinstance(version, int) and version > FORMAT
        if checksum(tensors, header) != recorded:
            cause = f" or has a newer format ({version}; this version of fedflat reads {FORMAT})" if is_newer else ""
            raise DamagedFile(f"{path} is damaged{cause}: its checksum does not match its content")
        if is_newer:
            raise UserError(
                f"{path} has format {version}, but this version of fedflat reads format {FORMAT}; "
                "upgrade fedflat with pip install --upgrade fedflat"
            )
    order = header.pop("order", tensors)  # files of other programs have none
    return {name: tensors[name] for name in order}, header


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """The SHA-256 of a header and of the names, types, shapes and bytes of contiguous tensors on the CPU."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
