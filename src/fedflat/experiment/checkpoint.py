"""What a run goes on from: where its last checkpoint lies, and whether all that belongs to it is still there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedflat.errors import UserError
from fedflat.experiment.config import Config, config, difference
from fedflat.experiment.folder import RunFolder
from fedflat.experiment.rows import Rows

CHECKPOINT = "checkpoint/state.safetensors"


def last_checkpoint(folder: RunFolder, settings: Config, frozen: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors of the last checkpoint and what is said about them, None without one; refused where it is of another run.

    ``frozen`` is the fingerprint of the model's frozen part. Checkpoints of earlier versions did not tell of settings.
    """
    if not (folder.path / CHECKPOINT).exists():
        return None
    saved, about = folder.read_tensors(CHECKPOINT)
    now = settings.lasting()
    differing = difference(config(now), config(about.get("settings", now)))
    if differing:
        raise UserError(
            f"{folder.path / 'config.yaml'} was changed since the run began ({differing}); "
            "put it back as it was, or run the new settings in a folder of their own"
            f" (fedflat run --config {folder.path / 'config.yaml'} with another --out)"
        )
    if about.get("frozen", "") != frozen:
        raise UserError(
            f"the frozen part of the model is not that with which the run in {folder.path} began; "
            "put its first weights back where they were, or pass the same model again"
        )
    return saved, about


def require_rows(folder: RunFolder, stores: Mapping[str, Rows], about: Mapping[str, Any]) -> None:
    """Refuse to go on where rows are lost that a checkpoint counted; those of earlier versions did not count."""
    for name, store in stores.items():
        found = store.readable(about["rounds"])
        needed = about.get("rows", {}).get(name, found)
        if found != needed:
            raise UserError(
                f"{folder.path / 'state' / name} has lost rows: it has {found}, and the run's checkpoint needs {needed}; "
                f"put the folder back as it was, {folder.anew}"
            )


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those tensors of a checkpoint whose names begin alike, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
