"""Adapters of the package ``peft`` (LoRA, DoRA, prompt tuning and others), in its own file format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fedflat.errors import UserError
from fedflat.registry import require_package

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def add_peft_adapters(model: nn.Module, folder: Path) -> nn.Module:
    """Wrap a model in the adapters that a folder describes, and load their weights if the folder has them.

    Args:
        model: the base model, which is changed in place.
        folder: a folder with ``adapter_config.json`` and, to continue training, ``adapter_model.safetensors``.
    """
    peft = require_package("peft", "training.train=peft", extra="text")
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"{folder} has no {CONFIG_FILE}; write it with LoraConfig(...).save_pretrained(folder), or use a saved "
            "adapter"
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = False  # saved adapters are frozen
        network: nn.Module = peft.get_peft_model(model, config)
        has_weights = any((folder / name).is_file() for name in (WEIGHTS_FILE, "adapter_model.bin"))
        differences = _load(peft, network, folder) if has_weights else ""
    except Exception as error:  # the errors of peft have many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the adapter in {folder} does not fit the model: {' '.join(lines[:2]).strip()}") from error
    if differences:
        raise UserError(f"the adapter in {folder} was saved for another model: {differences}; use its base model")
    return network


def _load(peft: Any, network: nn.Module, folder: Path) -> str:
    """Load saved adapters; returns the first trained parameter that they lack or that the model lacks, or nothing."""
    result = peft.set_peft_model_state_dict(network, peft.load_peft_weights(str(folder), device="cpu"))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    # A prompt has another name in the file.
    missing = [name for name in result.missing_keys if name in trained and not name.startswith("prompt_encoder.")]
    unexpected = [name for name in result.unexpected_keys if name != "prompt_embeddings"]
    return f"it lacks {missing[0]}" if missing else f"the model lacks {unexpected[0]}" if unexpected else ""


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is a ``peft.PeftModel``; does not import ``peft``."""
    return any(base.__name__ == "PeftModel" and base.__module__.startswith("peft.") for base in type(model).__mro__)


def save_peft_adapter(model: nn.Module, folder: Path) -> None:
    """Write the active adapter of a ``PeftModel`` to ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        model: the model.
        folder: an existing folder, which may get further files.

    Raises:
        UserError: the model has no such adapter, or training changed parameters that are not part of it.
    """
    if not is_peft_model(model):
        raise UserError(
            f"{type(model).__name__} has no adapter of peft; train with train=peft(path=DIR) or pass a PeftModel, or "
            "export safetensors instead"
        )
    peft = require_package("peft", "the export to peft", extra="text")
    network: Any = model
    name = network.active_adapter
    # Embeddings are frozen; with the default, peft may ask the Hub for their size.
    saved = peft.get_peft_model_state_dict(network, adapter_name=name, save_embedding_layers=False)
    tensors = {tensor.data_ptr() for tensor in saved.values()}
    for key, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.data_ptr() not in tensors and not key.startswith("prompt_encoder."):
            raise UserError(f"{key} was trained but is not part of the adapter; export safetensors instead")
    network.save_pretrained(str(folder), selected_adapters=[name], save_embedding_layers=False)
    if name != "default":  # peft saves other adapters in a subfolder
        for file in (folder / name).iterdir():
            file.replace(folder / file.name)
