"""The file of initial weights of a resumed run, which the checkpoint replaces if the file is gone or has changed."""

from __future__ import annotations

from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import flat_fields
from fedflat.experiment.config import Config
from fedflat.experiment.store.checkpoint import has_checkpoint
from fedflat.experiment.store.provenance import INIT_KEY, changed_weights, fingerprints, recorded_fingerprints
from fedflat.experiment.store.run_folder import RunFolder


def without_lost_weights(config: Config, folder: RunFolder) -> Config:
    """The config to build the problem of a resumed run with, without ``init`` if only the checkpoint has its weights.

    If parameters are frozen, the checkpoint does not have them; reading it then raises an error.

    Args:
        config: the run's config.
        folder: its folder.

    Raises:
        ChangedInputs: the file of initial weights is gone or has changed, and the run still needs it.
    """
    if config.init is None:
        return config
    current = fingerprints({}, config.init).get(INIT_KEY)
    if current is not None and recorded_fingerprints(folder).get(INIT_KEY, current) == current:
        return config
    fields = flat_fields(algorithm(config.algorithm).client_fields()).values()
    # Clients that have not participated yet may start from initial weights or BatchNorm statistics.
    clients_need_it = config.training.statistics == "own" or any(field.start == "model" for field in fields)
    if clients_need_it or not has_checkpoint(folder):
        raise changed_weights(folder, folder.remedy)
    return config.changed(init=None, init_head="given", init_rounds=0)
