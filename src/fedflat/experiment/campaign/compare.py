"""Compare algorithms over seeds; all runs with one seed share the partition, cohorts and batches."""

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
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RemoteCallback, require_remote
from fedflat.experiment.campaign.processes import RunJob, in_sequence, side_by_side
from fedflat.experiment.campaign.registered_names import unsendable_names
from fedflat.experiment.config import Config, describe_difference
from fedflat.experiment.setup.problem import device_of
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.provenance import fingerprints, require_same_inputs
from fedflat.experiment.store.run_folder import Record, RunFolder, load_record
from fedflat.models import parameter_count
from fedflat.processes import available_cores, can_travel

SMALL = 250_000
"""Largest number of parameters for which parallel runs beat sequential ones that use all cores."""
WORTH_STARTING = 20_000
"""Local steps, over all runs, from which the seconds to start processes pay off."""


class SomeFailed(UserError):
    """Some runs of a comparison failed; the records of the others have been returned."""


def compare(
    base: Config,
    algorithms: Sequence[str],
    seeds: int | Sequence[int],
    out: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    **user_objects: Any,
) -> Iterator[Record]:
    """Run every algorithm with every seed.

    Args:
        base: settings that all runs share.
        algorithms: algorithms as text, e.g. ``"fedsam(rho=0.1)"``.
        seeds: number of seeds (0, 1, ...), or the seeds themselves.
        out: folder for the runs. Finished runs in it are loaded, interrupted ones resumed.
        callbacks: callbacks of all runs.
        jobs: runs at the same time; by default one per core if runs are small, otherwise one.
        user_objects: user-supplied ``data``, ``model`` and ``task``.

    Yields:
        One record per run, by seed and then by algorithm, whatever the order in which runs finish.
    """
    texts = [canonical(algorithm(text)) for text in algorithms]
    for text in texts:
        if texts.count(text) > 1:
            raise UserError(f"the comparison lists {text} twice; list each algorithm once")
    configs = [
        base.model_copy(update={"algorithm": text, "seed": seed}) for seed in _seed_numbers(seeds) for text in texts
    ]
    folders = [out / folder_name(c.algorithm) / f"seed-{c.seed}" if out else None for c in configs]
    yield from run_each(configs, folders, callbacks, jobs, **user_objects)


def _seed_numbers(seeds: Any) -> list[int]:
    """Seeds as Python integers, from their number or a sequence; NumPy and torch integers are accepted."""
    try:
        numbers = [int(operator.index(seed)) for seed in _listed(seeds)]
    except TypeError:
        numbers = []
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise UserError(
            f"cannot compare with seeds={seeds!r}; expected their number (3) or distinct seeds of 0 or more ([0, 1, 2])"
        )
    return numbers


def _listed(seeds: Any) -> list[Any]:
    try:
        return list(seeds)  # first, since a tensor that holds a single seed also passes as a number of seeds
    except TypeError:
        return list(range(operator.index(seeds)))


def run_each(
    configs: Sequence[Config],
    folders: Sequence[Path | None],
    callbacks: tuple[Callback, ...] = (),
    jobs: int | None = None,
    **user_objects: Any,
) -> Iterator[Record]:
    """Run every config in its folder and yield the records in order.

    Finished runs are loaded, interrupted ones resumed. Raises ``SomeFailed`` at the end if parallel runs failed.
    """
    description = fingerprints(user_objects)
    existing = [existing_run(config, folder, description) for config, folder in zip(configs, folders, strict=True)]
    records = {index: record for index, record in enumerate(existing) if record and record.status in ENDED_STATUSES}
    waiting = [index for index in range(len(configs)) if index not in records]
    jobs_to_do = [RunJob(configs[i], folders[i], existing[i] is not None, user_objects) for i in waiting]
    at_once = how_many_at_once([job.config for job in jobs_to_do], callbacks, jobs, user_objects)
    failures: dict[int, UserError] = {}
    if at_once > 1:
        running = side_by_side(jobs_to_do, at_once, require_remote(callbacks))
    else:
        running = in_sequence(jobs_to_do, callbacks)
    with closing(running) as results:
        for index in range(len(configs)):
            while index not in records and index not in failures:
                job, outcome = next(results)
                if isinstance(outcome, UserError):
                    failures[waiting[job]] = outcome
                else:
                    records[waiting[job]] = outcome
            if index in records:
                yield records[index]
    if failures:
        first, more = min(failures), f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise SomeFailed(f"{RunJob(configs[first])} failed: {failures[first]}{more}")


def existing_run(config: Config, path: Path | None, user_objects: Mapping[str, str] | None = None) -> Record | None:
    """The run in a folder, or None if there is none.

    Raises:
        UserError: the run there has other settings or other user-supplied objects (described by ``user_objects``).
    """
    if not path or not RunFolder(path).exists:
        return None
    differing = describe_difference(RunFolder(path).config(), config)
    if differing:
        raise UserError(f"{path} holds a run with other settings ({differing}); choose another --out or remove it")
    require_same_inputs(RunFolder(path), user_objects or {})
    return load_record(path)


def how_many_at_once(
    configs: Sequence[Config], callbacks: tuple[Callback, ...], jobs: int | None, user_objects: dict[str, Any]
) -> int:
    """Number of runs to do at the same time; a ``UserError`` if ``jobs`` asks for more than is possible."""
    runs = len(configs)
    if jobs == 1 or runs < 2:
        return 1
    base = configs[0]
    workers, obstacle = base.engine.workers, ""
    local_callbacks = [callback for callback in callbacks if not isinstance(callback, RemoteCallback)]
    if local_callbacks:
        obstacle = f"{type(local_callbacks[0]).__name__} is not a RemoteCallback and needs the run in this process"
    elif workers is not None and workers > 1:
        obstacle = f"engine.workers={workers} already gives each run several processes"
    elif not can_travel(user_objects):
        obstacle = "the running script defines the data, model or task, which other processes cannot import"
    elif local := unsendable_names(configs):
        obstacle = f"the running script defines {' and '.join(local)}, which other processes cannot import"
    if jobs is None:
        return min(available_cores(), runs) if not obstacle and _are_small(base, runs, user_objects) else 1
    if obstacle:
        raise UserError(f"cannot do {jobs} runs at the same time: {obstacle}; use 1 job")
    return min(jobs, runs)


def _are_small(base: Config, runs: int, user_objects: dict[str, Any]) -> bool:
    """Whether a run is too small to use all cores and the runs together are long enough to start processes for."""
    if available_cores() < 2 or base.engine.name in ("lanes", "ray") or device_of(base).type != "cpu":
        return False
    data = user_objects.get("data") or load(base.data.dataset, base.data.dir)
    model = user_objects.get("model")
    parameters = (
        parameter_count(base.model, data.input_shape, data.num_classes)
        if model is None
        else sum(p.numel() for p in model.parameters())
    )
    t = base.training
    per_epoch = math.ceil(len(data.train) / (base.data.clients or base.federation.clients_per_round) / t.batch_size)
    steps = runs * t.rounds * base.federation.clients_per_round * (t.local_steps or t.local_epochs * per_epoch)
    return parameters <= SMALL and steps >= WORTH_STARTING


def folder_name(text: str) -> str:
    """An algorithm as a folder name.

    >>> folder_name("fedmoswa+asam(rho=0.3)")
    'fedmoswa+asam_rho_0.3'
    """
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")
