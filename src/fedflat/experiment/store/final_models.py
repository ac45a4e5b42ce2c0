"""The final models of an ended run: whether they can be read, and whether the last checkpoint can replace them."""

from __future__ import annotations

from fedflat.errors import UserError
from fedflat.experiment.store.checkpoint import has_checkpoint
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.run_folder import STATISTICS_FILE, RunFolder, model_file


def _is_model_lost(folder: RunFolder, thorough: bool) -> bool:
    """Whether a final model of an ended run is missing or, if ``thorough``, damaged."""
    try:
        history = folder.metrics()
    except DamagedFile:
        history = []
    files = [model_file(name) for name in (history[-1]["test"] if history else ["server"])]
    if (folder.path / STATISTICS_FILE).exists():
        files.append(STATISTICS_FILE)
    for file in files:
        if not (folder.path / file).exists():
            return True
        try:
            if thorough:
                folder.read_tensors(file)
        except DamagedFile:
            return True
        except UserError:
            return False
    return False


def has_restorable_models(folder: RunFolder, thorough: bool = True) -> bool:
    """Whether a final model of an ended run is lost, and resuming from the checkpoint writes it again.

    With ``thorough``, models are read, and damaged ones count as lost, too.
    """
    if not folder.has_ended or folder.has_real_sites or not has_checkpoint(folder):
        return False
    return _is_model_lost(folder, thorough)
