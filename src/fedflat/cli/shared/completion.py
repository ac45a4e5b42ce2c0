"""Completion in the shell: components, settings and run folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedflat.cli.shared.command_group import NAMES_FILE
from fedflat.experiment.config import setting_names

MAX_LEVELS = 2
"""Number of folder levels below the typed folder in which to look for runs."""


def complete_algorithm(incomplete: str) -> list[str]:
    """Complete an algorithm or, after a ``+``, a part of it.

    >>> complete_algorithm("fedlesam"), complete_algorithm("fedavg+w")
    (['fedlesam', 'fedlesam-s', 'fedlesam-d'], ['fedavg+wmsam', 'fedavg+wima'])
    """
    return _complete_sum(incomplete, "algorithm", "part")


def complete_dataset(incomplete: str) -> list[str]:
    """Complete the name of a dataset."""
    return _starting_with(incomplete, _names("dataset"))


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a model."""
    return _starting_with(incomplete, _names("model"))


def complete_partition(incomplete: str) -> list[str]:
    """Complete a partition or, after a ``+``, a modifier of it."""
    return _complete_sum(incomplete, "partition", "partition modifier")


def complete_augmentation(incomplete: str) -> list[str]:
    """Complete augmentations joined by ``+``."""
    return _complete_sum(incomplete, "augmentation", "augmentation")


def complete_clock(incomplete: str) -> list[str]:
    """Complete parts of a clock joined by ``+``."""
    return _complete_sum(incomplete, "clock", "clock")


def complete_policy(incomplete: str) -> list[str]:
    """Complete the name of a policy."""
    return _starting_with(incomplete, _names("policy"))


def complete_privacy(incomplete: str) -> list[str]:
    """Complete the name of a privacy mechanism."""
    return _starting_with(incomplete, _names("privacy"))


def complete_assignment(incomplete: str) -> list[str]:
    """Complete the full name of a setting for ``--set``.

    >>> complete_assignment("training.lr")
    ['training.lr=', 'training.lr_decay=']
    """
    return _starting_with(incomplete, (f"{name}=" for name in setting_names()))


def complete_run(incomplete: str) -> list[str]:
    """Complete a run folder, or a folder that contains runs; if there are none, the shell completes files."""
    typed = Path(incomplete)
    is_folder = not incomplete or incomplete.endswith("/")
    parent, prefix = (typed, "") if is_folder else (typed.parent, typed.name)
    folders: list[Path] = []
    if parent.is_dir():
        for child in sorted(parent.iterdir()):
            is_hidden = child.name.startswith(".") and not prefix  # unless the user typed the dot
            if child.is_dir() and child.name.startswith(prefix) and not is_hidden:
                folders += _folders_of_runs(child, MAX_LEVELS)
    return [str(folder) for folder in folders]


SETTING_COMPLETERS = {
    "model": complete_model,
    "data.dataset": complete_dataset,
    "data.partition": complete_partition,
    "data.augmentation": complete_augmentation,
    "federation.clock": complete_clock,
    "federation.policy": complete_policy,
    "federation.privacy": complete_privacy,
}
"""Completion of the settings that name components."""


def completer_for(setting: str, field: FieldInfo) -> object:
    """Return the function that completes the value of a setting's flag.

    It completes the values of a ``Literal``, or the names of components; for other settings, return None.
    """
    if get_origin(field.annotation) is Literal:
        return lambda incomplete: _starting_with(incomplete, get_args(field.annotation))
    return SETTING_COMPLETERS.get(setting)


def _folders_of_runs(folder: Path, levels: int) -> list[Path]:
    """Return a folder and its subfolders down to ``levels`` levels, without those that neither are nor contain runs."""
    if (folder / "config.yaml").exists():
        return [folder]
    below: list[Path] = []
    if levels and os.access(folder, os.R_OK | os.X_OK):
        for child in sorted(path for path in folder.iterdir() if path.is_dir()):
            below += _folders_of_runs(child, levels - 1)
    return [folder, *below] if below else []


def _complete_sum(incomplete: str, first: str, added: str) -> list[str]:
    """Complete the last part of a text whose parts are joined by ``+``.

    Args:
        incomplete: the text so far.
        first: kind of component of the first part, a key of ``NAMES_FILE``.
        added: kind of component of the other parts.
    """
    before, plus, last = incomplete.rpartition("+")
    names = _names(added if plus else first)
    return [f"{before}{plus}{name}" for name in _starting_with(last, names)]


def _names(kind: str) -> list[str]:
    """Names of the built-in components of a kind."""
    return list(json.loads(NAMES_FILE.read_text(encoding="utf-8"))[kind])


def _starting_with(beginning: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(beginning)]
