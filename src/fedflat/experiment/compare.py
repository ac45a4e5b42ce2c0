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
    if not path or not RunFolder(path).exists:
        return Run(config, path, callbacks=callbacks, **own).go()
    difference = _difference(RunFolder(path).config(), config)
    if difference:
        raise UserError(f"{path} holds a run with other settings ({difference}); choose another --out or remove it")
    record = load_record(path)
    return record if record.status in OVER else Run(config, path, callbacks=callbacks, resume=True, **own).go()


def folder_name(text: str) -> str:
    """An algorithm's text as a folder's name.

    >>> folder_name("fedmoswa+asam(rho=0.3)")
    'fedmoswa+asam_rho_0.3'
    """
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")


def _difference(one: Config, other: Config) -> str:
    """The settings in which two configs differ, of those that change results."""

    def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        pairs = ((f"{prefix}{k}", v) for k, v in values.items())
        return {k: v for key, value in pairs for k, v in (flat(value, f"{key}.") if isinstance(value, dict) else {key: value}).items()}

    ours, theirs = flat(one.model_dump()), flat(other.model_dump())
    counts = [key for key in ours if not key.startswith("engine.") or key == "engine.precision"]
    return ", ".join(f"{key}={ours[key]} instead of {theirs[key]}" for key in counts if ours[key] != theirs[key])
