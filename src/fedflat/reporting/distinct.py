"""Distinct runs: copies and repetitions of a run are left out, so that its seed counts once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable

from fedflat.experiment.config import Config
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.row import mixed_data, user_settings


def drop_repeated(
    records: Iterable[Record], key: Callable[[Config], Hashable] = Config.model_dump_json
) -> tuple[list[Record], list[tuple[str, str]]]:
    """Drop runs that repeat another one, which would count a seed twice.

    Among repeated runs, one that ended is kept. If several ended, one with flatness measurements is kept, otherwise
    the first.

    Args:
        records: the runs.
        key: runs with equal values of this function and the same user-supplied objects repeat each other. Default: the
            settings and the seed.

    Returns:
        The distinct runs, and (folder, reason) of every dropped one.
    """
    distinct: dict[Hashable, Record] = {}
    dropped: list[tuple[str, str]] = []
    for record in records:
        run_key = key(record.config), str(user_settings(record))
        if run_key not in distinct:
            distinct[run_key] = record
            continue
        first, repeat = distinct[run_key], record
        if _content(record) > _content(first):
            distinct[run_key], first, repeat = record, record, first
        path = run_path(repeat)
        other_data = "; their data differ, so report them separately" if mixed_data([first, repeat]) else ""
        name = path or f"a run of {record.config.algorithm} with seed {record.config.seed}"
        reason = f"{name} repeats {run_path(first) or 'another one'}: the same settings and seed{other_data}"
        dropped.append((path, reason))
    return list(distinct.values()), dropped


def _content(record: Record) -> tuple[bool, bool, bool]:
    """Whether a run ended, measured flatness during training, and has results of ``fedflat flatness`` commands."""
    is_measured = record.folder is not None and any((record.folder.path / "flatness").glob("*"))
    return record.status in ENDED_STATUSES, any("flatness" in entry for entry in record.history), is_measured


def run_path(record: Record) -> str:
    """Return the folder of a run relative to the working directory; empty if it has none."""
    return "" if record.folder is None else relative_paths(str(record.folder.path))


def relative_paths(text: str) -> str:
    """Replace absolute paths in a text by paths relative to the working directory, because reports are shared.

    >>> relative_paths(f"ray://head:6379 {os.getcwd()}/runs (1)/seed-0")
    'ray://head:6379 runs (1)/seed-0'
    """
    return re.sub(r"(?<![\w./)])/(?!/)[^\s,():'\"]+", lambda path: os.path.relpath(path[0]), text)
