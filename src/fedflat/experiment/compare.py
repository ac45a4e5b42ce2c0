"""Several algorithms on several seeds, each pair on the same split, cohorts and batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedflat.algorithms import algorithm, canonical
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback
from fedflat.experiment.config import Config
from fedflat.experiment.folder import RunFolder
from fedflat.experiment.record import Record, load_record
from fedflat.experiment.run import Run
from fedflat.experiment.stopping import OVER


def compare(
    base: Config,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    **own: Any,
) -> Iterator[Record]:
    """Run every algorithm with every seed; runs already finished in ``out`` are not run again, interrupted ones go on."""
    texts = [canonical(algorithm(text)) for text in algorithms]
    for text in texts:
        if texts.count(text) > 1:
            raise UserError(f"{text} is listed twice in the comparison; list each algorithm once")
    for seed in seeds:
        for text in texts:
            config = base.model_copy(update={"algorithm": text, "seed": seed})
            yield _one(config, out / folder_name(text) / f"seed-{seed}" if out else None, callbacks, own)


def _one(config: Config, path: Path | None, callbacks: tuple[Callback, ...], own: dict[str, Any]) -> Record:
    if path and RunFolder(path).exists:
        found = RunFolder(path).config()
        if found != config:
            raise UserError(f"{path} holds a run with other settings ({_difference(found, config)}); choose another --out or remove it")
        record = load_record(path)
        if record.status in OVER:
            return record
    return Run(config, path, callbacks=callbacks, **own).go()


def folder_name(text: str) -> str:
    """An algorithm's text as a folder's name.

    >>> folder_name("fedmoswa+asam(rho=0.3)")
    'fedmoswa+asam_rho_0.3'
    """
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")


def _difference(one: Config, other: Config) -> str:
    def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        pairs = ((f"{prefix}{k}", v) for k, v in values.items())
        return {k: v for key, value in pairs for k, v in (flat(value, f"{key}.") if isinstance(value, dict) else {key: value}).items()}

    ours, theirs = flat(one.model_dump()), flat(other.model_dump())
    return ", ".join(f"{key}={ours[key]} instead of {theirs[key]}" for key in ours if ours[key] != theirs.get(key))
