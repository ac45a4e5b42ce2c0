"""Commands that repeat the runs of a report and the report itself."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedflat.experiment.setup.problem import is_user_supplied
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.distinct import relative_paths
from fedflat.reporting.page.gather import Group


def repeat_commands(group: Group, settings: Path, out: str, report_options: Sequence[str]) -> list[str]:
    """Return shell commands that repeat the runs of a group, and the report on them.

    Each combination of differing settings and of seeds needs a command. Paths are relative to the working directory.

    Args:
        group: the runs with one dataset and partition.
        settings: YAML file with the settings of the first run.
        out: folder for the repeated runs.
        report_options: options of ``fedflat report``.

    Returns:
        The commands; empty if the runs used a dataset or model that was passed as a Python object.
    """
    config = group.records[0].config
    if is_user_supplied(config.data.dataset) or is_user_supplied(config.model):
        return []
    algorithms: dict[tuple[tuple[str, ...], str], dict[str, None]] = {}  # by differing settings and seeds
    for labelled in group.rows:
        assignments = tuple(f"{name}={_yaml_value(value)}" for name, value in labelled.settings.items())
        seeds = _seeds_option([record.config.seed for record in labelled.row.records])
        algorithms.setdefault((assignments, seeds), {})[labelled.row.algorithm] = None
    folders = {assignments: f"{out}/{number}" for number, (assignments, _) in enumerate(algorithms, 1)}
    plugins = plugin_options(group.records)
    commands = []
    for (assignments, seeds), names in algorithms.items():
        # Without --out, the command could find the reported runs in the default folder and would not repeat them.
        folder = folders[assignments] if len(folders) > 1 else out
        command = ["fedflat", "compare", *names, "--config", os.path.relpath(settings), "--seeds", seeds]
        command += [word for assignment in assignments for word in ("--set", assignment)]
        command += ["--out", folder, *plugins]
        commands.append(shlex.join(command))
    return [*commands, shlex.join(["fedflat", "report", out, "--out", f"{out}-report", *report_options])]


def plugin_options(records: Iterable[Record]) -> list[str]:
    """Return the options ``--plugin FILE`` for the plugins that runs use, relative to the working directory."""
    plugins = {path: None for record in records if record.folder for path in record.folder.plugins()}
    return [word for path in plugins for word in ("--plugin", os.path.relpath(path))]


def report_options(
    title: str,
    targets: Sequence[float],
    baseline: str | None,
    by: str,
    columns: Sequence[str],
    labels: Mapping[str, str],
    figures: bool,
) -> list[str]:
    """Return the options of ``fedflat report`` for the arguments of ``write_report``; defaults are left out.

    >>> report_options("", [0.9], "fedavg", "last", [], {"mine": "Mine (ours)"}, True)
    ['--target', '0.9', '--baseline', 'fedavg', '--by', 'last', '--label', 'mine=Mine (ours)']
    """
    options = ["--title", title] if title else []
    options += [word for target in targets for word in ("--target", repr(float(target)))]
    options += ["--baseline", baseline] if baseline else []
    options += ["--by", by] if by != "mean_last" else []
    options += ["--columns", ",".join(columns)] if columns else []
    options += [word for row, name in labels.items() for word in ("--label", f"{row}={name}")]
    return options if figures else [*options, "--no-figures"]


def _yaml_value(value: Any) -> str:
    """Write the value of a setting as ``--set`` expects, e.g. ``null``; JSON is also YAML."""
    return relative_paths(json.dumps(value, ensure_ascii=False))


def _seeds_option(seeds: Sequence[int]) -> str:
    """Write ascending seeds as ``--seeds`` expects: a number N for 0 to N - 1, otherwise a list (``3,`` for one)."""
    if seeds == list(range(len(seeds))):
        return str(len(seeds))
    return f"{seeds[0]}," if len(seeds) == 1 else ",".join(map(str, seeds))
