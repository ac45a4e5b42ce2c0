"""Completion in the shell: components, settings and run folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedflat.cli.shared.command_group import NAMES_FILE
from fedflat.experiment.config import setting_names

MAX_LEVELS = 2
"""Number of folder levels below the typed folder in which to look for runs."""


def completer(first: str, added: str | None = None) -> Callable[[str], list[str]]:
    """Return a function that completes a component's name or, in texts joined by ``+``, the name of the last component.

    Args:
        first: kind of the first component, a key of ``NAMES_FILE``.
        added: kind of the components after a ``+``; None for texts without ``+``.

    >>> completer("model")("resnet"), completer("algorithm", "part")("fedavg+w")
    (['resnet18', 'resnet20'], ['fedavg+wmsam', 'fedavg+wima'])
    """

    def complete(incomplete: str) -> list[str]:
        before, plus, last = incomplete.rpartition("+") if added else ("", "", incomplete)
        names = json.loads(NAMES_FILE.read_text(encoding="utf-8"))[added if plus else first]
        return [f"{before}{plus}{name}" for name in _starting_with(last, names)]

    return complete


complete_algorithm = completer("algorithm", "part")
complete_dataset = completer("dataset")
complete_model = completer("model")
complete_partition = completer("partition", "partition modifier")


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
    "data.augmentation": completer("augmentation", "augmentation"),
    "federation.clock": completer("clock", "clock"),
    "federation.policy": completer("policy"),
    "federation.privacy": completer("privacy"),
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


def _starting_with(beginning: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(beginning)]
