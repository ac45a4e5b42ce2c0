"""The names that shell completion offers, and the summaries of commands that the help lists."""

from __future__ import annotations

import json
from typing import Any

import typer

from fedflat.algorithms.composition import parts
from fedflat.algorithms.named import NAMED
from fedflat.cli.application import app
from fedflat.data import AUGMENTATIONS, DATASETS, PARTITION_MODIFIERS, PARTITIONERS
from fedflat.models import MODELS
from fedflat.privacy import MECHANISMS
from fedflat.timing import CLOCK_PARTS, POLICIES

FILE = "../src/fedflat/cli/shared/completion_names.json"
"""Path relative to docs/. Completion cannot read the registries, because they import torch, which takes seconds."""


def pages() -> dict[str, str]:
    """Return the file of names."""
    registries = {
        "algorithm": NAMED,
        "part": parts(),
        "dataset": DATASETS,
        "model": MODELS,
        "partition": PARTITIONERS,
        "partition modifier": PARTITION_MODIFIERS,
        "augmentation": AUGMENTATIONS,
        "clock": CLOCK_PARTS,
        "policy": POLICIES,
        "privacy": MECHANISMS,
    }
    names: dict[str, object] = {kind: [*registry] for kind, registry in registries.items()}
    commands: Any = typer.main.get_command(app)
    names["command"] = {name: command.help.split("\n\n")[0] for name, command in commands.commands.items()}
    return {FILE: json.dumps(names, indent=1) + "\n"}
