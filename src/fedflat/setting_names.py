"""Names in settings: short forms, the names other frameworks use, in-run measurements, and errors for unknown names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedflat.errors import UserError, one_of

SHORT_NAMES = {
    "dataset": "data.dataset",
    "data_dir": "data.dir",
    "partition": "data.partition",
    "clients": "data.clients",
    "validation": "data.validation",
    "augmentation": "data.augmentation",
    "clients_per_round": "federation.clients_per_round",
    "clock": "federation.clock",
    "policy": "federation.policy",
    "privacy": "federation.privacy",
    "rounds": "training.rounds",
    "local_epochs": "training.local_epochs",
    "local_steps": "training.local_steps",
    "batch_size": "training.batch_size",
    "task": "training.task",
    "train": "training.train",
    "lr": "training.lr",
    "lr_decay": "training.lr_decay",
    "weight_decay": "training.weight_decay",
    "clip": "training.clip",
    "eval_every": "evaluation.every",
    "save_every": "evaluation.save_every",
    "flatness": "flatness",
    "patience": "stop.patience",
    "engine": "engine.name",
    "workers": "engine.workers",
    "ray_address": "engine.ray_address",
    "device": "engine.device",
}
"""Short names of common settings, in Python and on the command line, with their full names."""
MAX_COUNT = 10**9
"""Largest integer that a setting or an option accepts, except seeds."""
MAX_SEED = 2**63 - 1
RESUME_SETTINGS = ("data_dir", "engine", "workers", "ray_address", "device", "save_every")
"""Short names of the settings that may change when a run is resumed: where it executes, and which models it saves."""
NUMERIC_SETTINGS = ("lr", "lr_decay", "weight_decay", "batch_size", "local_epochs", "local_steps", "rounds")
"""Short names of the settings that are often mistaken for parameters of an algorithm."""

_FOREIGN = {
    "lr": "learning_rate rate eta step_size local_lr client_lr local_learning_rate client_learning_rate tune_rate",
    "lr_decay": "decay learning_rate_decay rate_decay lr_gamma gamma",
    "batch_size": "batch bs batchsize local_bs local_batch_size train_batch_size client_batch_size",
    "local_epochs": "epochs epoch local_epoch local_ep num_epochs n_epochs client_epochs num_local_epochs",
    "local_steps": "steps local_iterations local_iters num_steps num_local_steps iterations",
    "rounds": "num_rounds n_rounds num_server_rounds comm_rounds comm_round communication_rounds global_rounds",
    "clients": "num_clients n_clients client_num num_users num_partitions num_supernodes client_num_in_total",
    "clients_per_round": "per_round clients_fraction fraction_fit fraction_train frac sample_fraction participation "
    "participation_rate cohort_size num_clients_per_round client_num_per_round min_fit_clients join_ratio",
    "dataset": "data data_name dataset_name",
    "partition": "split partitioner partition_method partition_type alpha dirichlet_alpha non_iid noniid",
    "data.partition_seed": "split_seed",
    "data_dir": "data_folder folder data_root data_path dataset_dir root",
    "validation": "val_fraction validation_split val_ratio validation_fraction",
    "eval_every": "every eval_interval eval_freq eval_frequency test_every frequency_of_the_test evaluate_every",
    "save_every": "keep_every save_interval save_freq checkpoint_freq snapshot_every",
    "weight_decay": "wd l2 l2_reg weightdecay",
    "clip": "clip_grad grad_clip gradient_clip max_grad_norm clipping_norm clip_norm",
    "training.momentum": "local_momentum client_momentum",
    "privacy": "dp differential_privacy epsilon noise_multiplier",
    "federation.dropout": "straggler_prob drop_percent",
    "stop.target": "target target_accuracy",
    "patience": "early_stopping",
    "stop.seconds": "time_limit max_time",
    "engine.precision": "dtype fp16 amp bf16",
    "engine.checkpoint_every": "checkpoint_interval",
    "device": "gpu gpus cuda accelerator",
    "workers": "num_workers n_workers num_cpus",
    "engine": "backend",
    "task": "criterion loss_function objective",
    "model": "arch net network model_name backbone",
    "algorithm": "algo method strategy optimizer optimiser",
    "seed": "random_state random_seed manual_seed",
    "init": "weights checkpoint pretrained initial_parameters",
    "out": "output output_dir out_dir save_dir log_dir logdir",
}
SYNONYMS = {foreign: name for name, names in _FOREIGN.items() for foreign in names.split()}
"""Names used by other frameworks (and by earlier versions), with ours: a short name, or else a full one."""

MEASUREMENTS = {
    "lambda_max": "largest Hessian eigenvalue of the training loss, per model (about 20 Hessian-vector products each)",
    "sharpness": "increase of the training loss after an ascent step of length 0.05, per model (one gradient each)",
    "m_sharpness": "mean sharpness of groups of at most 32 examples, each with its own ascent step (one gradient each)",
    "fisher": "largest eigenvalue and trace of the Gauss-Newton matrix, per model (about 50 products each)",
    "norms": "relative flatness, Fisher-Rao norm, PAC-Bayes sigmas, per model (11 products and about 400 losses each)",
    "layers": "largest Hessian eigenvalue of each weight matrix's block, per model (about 20 products per matrix)",
    "gap": "test minus training loss, per model; the participation gap if some clients never train (forward passes)",
    "drift": "alignment of client updates with the cohort and the momentum, norms of control variates (free)",
    "clients": "lambda_max of each client's model on its own data (about 20 Hessian-vector products per client)",
    "similarity": "overlap of client and global top eigenspaces, CKA of features (about 60 products per client)",
    "classes": "accuracy per class, and on the data of each sampled client (forward passes)",
    "features": "norm of the output features on the data of each sampled client (forward passes)",
    "noise": "L, beta, sigma, sigma_g and gradient disagreement (gradients per client and per example, lambda_max)",
}
"""The available measurements, with their cost."""
DEFAULT_MEASUREMENTS = "lambda_max,drift,gap"


def full_name(name: str) -> str:
    """The full name of a setting that may be abbreviated.

    >>> full_name("lr"), full_name("training.lr")
    ('training.lr', 'training.lr')
    """
    return SHORT_NAMES.get(name, name)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings as pairs (full name, value).

    >>> dict(flat({"rounds": 3, "data": {"dataset": "digits"}, "training.lr": 0.1}))
    {'training.rounds': 3, 'data.dataset': 'digits', 'training.lr': 0.1}
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        else:
            yield full_name(name), value


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings by section, given their full names; the inverse of :func:`flat`.

    >>> nest({"seed": 1, "training.rounds": 3, "training.lr": 0.1})
    {'seed': 1, 'training': {'rounds': 3, 'lr': 0.1}}
    """
    nested: dict[str, Any] = {}
    for full, value in values.items():
        *sections, name = full.split(".")
        section_values = nested
        for section in sections:
            section_values = section_values.setdefault(section, {})
        section_values[name] = value
    return nested


def suggest_setting(name: str) -> str | None:
    """Return the name in fedflat of a setting that other frameworks call ``name``; None if it is unknown.

    Args:
        name: the name as typed: a keyword, a flag or a full name.

    >>> suggest_setting("learning_rate"), suggest_setting("--per-round"), suggest_setting("training.rate")
    ('lr', 'clients_per_round', 'lr')
    """
    keyword = name.lstrip("-").replace("-", "_").lower()
    without_group = keyword.replace("__", ".").rpartition(".")[2]
    return SYNONYMS.get(keyword) or SYNONYMS.get(without_group)


def unknown_setting(name: str, known: Iterable[str], group: str = "", keyword: bool = False) -> UserError:
    """The error for an unknown setting.

    It suggests fedflat's name if the unknown one is that of another framework, otherwise the nearest valid names.

    Args:
        name: the unknown name.
        known: the valid names in its place.
        group: the group of settings that lacks it, e.g. ``training``; empty at the top level.
        keyword: whether it was a keyword argument, where short names and ``group__name`` are valid.

    >>> str(unknown_setting("rate", ["lr", "rounds"], "training"))
    "training has no setting 'rate'; did you mean lr? (list all: fedflat settings)"
    >>> str(unknown_setting("roundss", ["init_rounds", "seed"])).partition("? ")[0]
    "unknown setting 'roundss'; did you mean rounds or init_rounds"
    >>> str(unknown_setting("precision", ["data.partition", "engine.precision"]))
    "unknown setting 'precision'; did you mean engine.precision? (list all: fedflat settings)"
    """
    # A short name is also unknown within a group that calls the setting differently, e.g. eval_every in evaluation.
    suggestion = suggest_setting(name) or (name if name in SHORT_NAMES else None)
    if suggestion is None:
        known = list(known)
        without_group = [each for each in known if each.endswith(f".{name}")]
        if without_group:
            return one_of("setting", name, without_group, "fedflat settings", group)
        return one_of("setting", name, known if group else {*known, *SHORT_NAMES}, "fedflat settings", group)
    if keyword:
        suggestion = suggestion.replace(".", "__")
    else:  # the full name, or within its group the part after the dot
        suggestion = SHORT_NAMES.get(suggestion, suggestion).removeprefix(f"{group}.")
    return one_of("setting", name, [suggestion], "fedflat settings", group)


def unknown_parameter(name: str, value: str, known: Iterable[str], owner: str, see: str = "") -> UserError:
    """The error for an unknown parameter of a component, e.g. of an algorithm.

    If ``name`` is a setting of the run instead, such as ``lr``, the message shows how to set it. If other frameworks
    give a setting this name, the message also lists the parameters.

    Args:
        name: the unknown name.
        value: its value, as text.
        known: the valid names.
        owner: the component, e.g. ``fedavg``.
        see: command that lists the valid names.

    >>> str(unknown_parameter("lr", "0.1", ["server_lr"], "fedavg"))
    "fedavg has no parameter 'lr'; it is a setting: use --lr 0.1 (Python: lr=0.1, YAML: 'lr: 0.1')"
    >>> str(unknown_parameter("gamma", "1", ["mu", "server_lr"], "fedprox")).partition(": use")[0]
    "fedprox has no parameter 'gamma' (its parameters: mu, server_lr); lr_decay is a setting"
    """
    setting = name if name in SHORT_NAMES else suggest_setting(name)
    if setting not in NUMERIC_SETTINGS:
        return one_of("parameter", name, known, see, owner)
    hint = "; it" if name == setting else f" (its parameters: {', '.join(sorted(known)) or 'none'}); {setting}"
    flag = f"--{setting.replace('_', '-')} {value}"
    return UserError(
        f"{owner} has no parameter '{name}'{hint} is a setting: "
        f"use {flag} (Python: {setting}={value}, YAML: '{setting}: {value}')"
    )


def parse_measurements(text: str) -> list[str]:
    """Parse the names of measurements, separated by ``,`` or ``+``; ``all`` selects every measurement.

    >>> parse_measurements("drift+gap")
    ['drift', 'gap']
    """
    names = [name for name in re.split(r"[,+\s]+", text) if name]
    if not names:
        raise UserError(f"flatness.what is empty; expected some of {', '.join(MEASUREMENTS)}, or all")
    known = [*MEASUREMENTS, "all"]
    for name in names:
        if name not in known:
            raise one_of("measurement", name, known)
    return list(MEASUREMENTS) if "all" in names else list(dict.fromkeys(names))


def parse_flatness(text: str) -> dict[str, Any]:
    """Parse ``every=50,what=drift+gap`` into settings; ``50`` alone means ``every=50``.

    >>> parse_flatness("every=50,what=lambda_max+drift")
    {'every': 50, 'what': 'lambda_max,drift'}
    """
    values: dict[str, Any] = {}
    for assignment in text.split(","):
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if name.isdecimal() and not equals and not values:
            name, value = "every", name
        elif not value:
            raise UserError(
                f"cannot read '{assignment.strip()}' in --flatness '{text}'; "
                "expected every=50 or every=50,what=lambda_max+drift"
            )
        if value.isdecimal():
            values[name] = int(value)
        elif name == "what":
            values[name] = value.replace("+", ",")
        else:
            values[name] = value
    return values


def forbidden_character(text: str) -> str:
    """Describe characters in ``text`` that no name or path in a config may contain; empty if there are none.

    >>> forbidden_character("a\\0b"), forbidden_character("µ.npz")
    ('a NUL character', '')
    """
    if "\0" in text:
        return "a NUL character"
    # Python reads bytes of a command line that it cannot decode as surrogates, which no UTF-8 file can contain.
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return ""
    try:
        os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return "bytes that are not UTF-8"
    return f"characters that the locale's encoding, {sys.getfilesystemencoding()}, lacks (set PYTHONUTF8=1)"
