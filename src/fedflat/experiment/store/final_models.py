"""The final models of an ended run: whether they can be read, and whether the last checkpoint can replace them."""

from __future__ import annotations

from fedflat.errors import UserError
from fedflat.experiment.store.checkpoint import has_checkpoint
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.run_folder import STATISTICS_FILE, RunFolder, model_file


def unreadable_model(folder: RunFolder) -> UserError | None:
    """The error for the first final model of an ended run that is missing or cannot be read; None if all can be."""
    try:
        history = folder.metrics()
    except DamagedFile:
        history = []
    files = [model_file(name) for name in (history[-1]["test"] if history else ["server"])]
    if (folder.path / STATISTICS_FILE).exists():
        files.append(STATISTICS_FILE)
    for file in files:
        try:
            folder.read_tensors(file)
        except UserError as error:
            return error
    return None


def has_restorable_models(folder: RunFolder) -> bool:
    """Whether a final model of an ended run is missing or damaged, and resuming from the checkpoint writes it again."""
    if not folder.has_ended or folder.has_real_sites or not has_checkpoint(folder):
        return False
    return isinstance(unreadable_model(folder), DamagedFile)
