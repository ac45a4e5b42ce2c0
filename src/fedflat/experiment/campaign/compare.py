"""Several algorithms on several seeds, each pair on the same partition, cohorts and batches."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fedflat.algorithms import algorithm, canonical
from fedflat.data import load
from fedflat.engines.cpu.worker_pool import available_cores, can_travel
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RemoteCallback, require_remote
from fedflat.experiment.campaign.processes import Job, in_a_row, side_by_side
from fedflat.experiment.campaign.registered_names import stuck
from fedflat.experiment.config import Config, difference
from fedflat.experiment.setup.problem import device_of
from fedflat.experiment.stopping import OVER
from fedflat.experiment.store.provenance import fingerprints, require_same_inputs
from fedflat.experiment.store.record import Record, load_record
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.models import parameter_count

SMALL = 250_000
"""Numbers of a model up to which several runs side by side are faster than one after another on all cores."""
WORTH_STARTING = 20_000
"""Local steps of all runs together from which on starting processes, which takes seconds, pays for itself."""


class SomeFailed(UserError):
    """Some runs of a comparison could not be done; the others are there."""


def compare(
    base: Config,
    algorithms: Sequence[str],
    seeds: int | Sequence[int],
    out: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    **own: Any,
) -> Iterator[Record]:
    """Run every algorithm with every seed; runs already finished in ``out`` are not run again, interrupted ones go on.

    ``jobs`` runs are done at the same time, as many as there are cores where they are small; records come in the same order always.
    """
    texts = [canonical(algorithm(text)) for text in algorithms]
    for text in texts:
        if texts.count(text) > 1:
            raise UserError(f"{text} is listed twice in the comparison; list each algorithm once")
    configs = [
        base.model_copy(update={"algorithm": text, "seed": seed}) for seed in _plain_seeds(seeds) for text in texts
    ]
    folders = [out / folder_name(c.algorithm) / f"seed-{c.seed}" if out else None for c in configs]
    yield from run_each(configs, folders, callbacks, jobs, **own)


def _plain_seeds(seeds: Any) -> list[int]:
    """Seeds as numbers of Python, from how many there are or from which; whole numbers of NumPy and torch are as good."""
    try:
        found = [int(operator.index(seed)) for seed in _one_by_one(seeds)]
    except TypeError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise UserError(
            f"cannot compare with seeds={seeds!r}; expected how many (3), or which, each once and none below 0 ([0, 1, 2])"
        )
    return found


def _one_by_one(seeds: Any) -> list[Any]:
    # A list first: a tensor with one seed in it also passes for a number, which would be how many.
    try:
        return list(seeds)
    except TypeError:
        return list(range(operator.index(seeds)))


def run_each(
    configs: Sequence[Config],
    folders: Sequence[Path | None],
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    **own: Any,
) -> Iterator[Record]:
    """Run every config in its folder; those already finished there are not run again, interrupted ones go on."""
    now = fingerprints(own)
    begun = [begun_run(config, folder, now) for config, folder in zip(configs, folders, strict=True)]
    records = {number: record for number, record in enumerate(begun) if record and record.status in OVER}
    waiting = [number for number in range(len(configs)) if number not in records]
    todo = [Job(configs[number], folders[number], begun[number] is not None, own) for number in waiting]
    at_once = how_many_at_once([job.config for job in todo], callbacks, jobs, own)
    failures: dict[int, UserError] = {}
    with closing(
        side_by_side(todo, at_once, require_remote(callbacks)) if at_once > 1 else in_a_row(todo, callbacks)
    ) as results:
        for number in range(len(configs)):
            while number not in records and number not in failures:
                done, outcome = next(results)
                if isinstance(outcome, UserError):
                    failures[waiting[done]] = outcome
                else:
                    records[waiting[done]] = outcome
            if number in records:
                yield records[number]
    if failures:
        first, more = min(failures), f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise SomeFailed(f"{Job(configs[first])} could not be run: {failures[first]}{more}")


def begun_run(config: Config, path: Path | None, own: Mapping[str, str] | None = None) -> Record | None:
    """The run that lies in a folder, which must have the same settings and what the user ``brought``; None where there is none yet."""
    if not path or not RunFolder(path).exists:
        return None
    differing = difference(RunFolder(path).config(), config)
    if differing:
        raise UserError(f"{path} holds a run with other settings ({differing}); choose another --out or remove it")
    require_same_inputs(RunFolder(path), own or {})
    return load_record(path)


def how_many_at_once(
    configs: Sequence[Config], callbacks: tuple[Callback, ...], jobs: int | None, own: dict[str, Any]
) -> int:
    """How many runs to do at the same time."""
    runs = len(configs)
    if jobs == 1 or runs < 2:
        return 1
    base = configs[0]
    workers, obstacle = base.engine.workers, ""
    if not all(isinstance(callback, RemoteCallback) for callback in callbacks):
        obstacle = "these callbacks look at runs of this process"
    elif workers is not None and workers > 1:
        obstacle = f"engine.workers={workers} gives a single run several processes"
    elif not can_travel(own):
        obstacle = "data, model or task that the running script defines cannot go to another process"
    elif at_home := stuck(configs):
        obstacle = f"{' and '.join(at_home)}, which the running script defines, cannot go to another process"
    if jobs is None:
        return min(available_cores(), runs) if not obstacle and _are_small(base, runs, own) else 1
    if obstacle:
        raise UserError(f"{jobs} jobs at the same time are not possible: {obstacle}; use 1")
    return min(jobs, runs)


def _are_small(base: Config, runs: int, own: dict[str, Any]) -> bool:
    """Whether runs are too small to keep all cores busy, and together long enough that starting processes pays."""
    if available_cores() < 2 or base.engine.name in ("lanes", "ray") or device_of(base).type != "cpu":
        return False
    data = own.get("data") or load(base.data.dataset, base.data.dir)
    model = own.get("model")
    count = (
        parameter_count(base.model, data.input_shape, data.num_classes)
        if model is None
        else sum(p.numel() for p in model.parameters())
    )
    t = base.training
    per_epoch = math.ceil(len(data.train) / (base.data.clients or base.federation.clients_per_round) / t.batch_size)
    steps = runs * t.rounds * base.federation.clients_per_round * (t.local_steps or t.local_epochs * per_epoch)
    return count <= SMALL and steps >= WORTH_STARTING


def folder_name(text: str) -> str:
    """An algorithm's text as a folder's name.

    >>> folder_name("fedmoswa+asam(rho=0.3)")
    'fedmoswa+asam_rho_0.3'
    """
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")
