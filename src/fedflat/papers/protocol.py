"""Protocols of runs: the settings that determine a result, under names that never change, and their hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from functools import cache
from typing import Any

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import SLOTS
from fedflat.experiment.config import Config
from fedflat.setting_names import flat

SETTINGS = {
    "model": "model",
    "initial_weights": "init",
    "dataset": "data.dataset",
    "partition": "data.partition",
    "partition_seed": "data.partition_seed",
    "clients": "data.clients",
    "validation": "data.validation",
    "augmentation": "data.augmentation",
    "clients_per_round": "federation.clients_per_round",
    "sampling": "federation.sampling",
    "weighting": "federation.weighting",
    "aggregation": "federation.aggregation",
    "dropout": "federation.dropout",
    "partial": "federation.partial",
    "trained": "training.train",
    "rounds": "training.rounds",
    "local_epochs": "training.local_epochs",
    "local_steps": "training.local_steps",
    "batch_size": "training.batch_size",
    "lr": "training.lr",
    "lr_decay": "training.lr_decay",
    "weight_decay": "training.weight_decay",
    "momentum": "training.momentum",
    "clip": "training.clip",
    "clip_mode": "training.clip_mode",
    "batchnorm": "training.statistics",
    "eval_every": "evaluation.every",
    "eval_final": "evaluation.final",
    "precision": "engine.precision",
}
"""Full name of a setting by its key in stored protocols. The keys never change, even when settings are renamed."""
ProtocolValues = dict[str, Any]


@cache
def protocol_of(config: Config) -> ProtocolValues:
    """Return the settings that determine a result, except the seed, with every parameter of the algorithm."""
    built = algorithm(config.algorithm)
    slots = {name: getattr(built, name) for name in ("drift", "perturbation", "lr_schedule", "server")}
    # Slots that were added later enter only where they are used, so that the hashes of older results stay the same.
    later = {name: getattr(built, name) for name in SLOTS if name not in slots}
    slots |= {name: part for name, part in later.items() if part != getattr(Algorithm(), name)}
    slots |= {f"average{number}": average for number, average in enumerate(built.averages)}
    parameters = {
        name: {field.name: getattr(slot, field.name) for field in fields(slot)} for name, slot in slots.items()
    }
    values = dict(flat(config.model_dump(mode="json")))
    settings = {key: values[name] for key, name in SETTINGS.items()}
    return {"algorithm": config.algorithm, "parameters": parameters, **settings}


def protocol_hash(protocol: ProtocolValues) -> str:
    """Return a hash of a protocol's values. Parameters of the algorithm enter by position, not by name."""
    values = {key: value for key, value in protocol.items() if key not in ("algorithm", "parameters")}
    values["method"] = protocol["algorithm"].partition("(")[0]
    values["parameters"] = [list(slot.values()) for slot in protocol["parameters"].values()]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
