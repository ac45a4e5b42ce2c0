"""fedflat from Python: run, compare, sweep, resume, load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedflat.data import Dataset
from fedflat.engines.task import Task
from fedflat.errors import UserError
from fedflat.experiment import compare as comparing
from fedflat.experiment.callback import Callback
from fedflat.experiment.config import SHORT as SHORT
from fedflat.experiment.config import Config, assign, config, read_yaml
from fedflat.experiment.federation import custom
from fedflat.experiment.folder import RunFolder
from fedflat.experiment.observation.what import flatness_values
from fedflat.experiment.run import Run
from fedflat.experiment.stopping import OVER
from fedflat.report.result import Comparison, Result


def make_config(base: str | Path | Config | None = None, settings: dict[str, Any] | None = None, assignments: Sequence[str] = ()) -> Config:
    """A config from a file or another config, with settings by short or full name and ``a.b=value`` assignments on top."""
    values: dict[str, Any] = {}
    if isinstance(base, Config):
        values = base.model_dump(mode="json")
    elif base is not None:
        values = read_yaml(Path(base))
    for name, value in (settings or {}).items():
        *sections, last = SHORT.get(name, name).replace("__", ".").split(".")
        inside = values
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise UserError(f"{section} is a group of settings, but here it is {inside!r}; write its settings below it")
        if last == "flatness" and isinstance(value, str):
            value = {**inside.get("flatness", {}), **flatness_values(value)}
        inside[last] = value
    for assignment in assignments:
        assign(values, assignment)
    return config(values)


def run(
    algorithm: str | None = None,
    *,
    base: str | Path | Config | None = None,
    out: str | Path | None = None,
    data: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Run one experiment. Settings have short names (``rounds=50``) or full ones (``training__decay=0.998``).

    ``algorithm`` is a text such as ``scaffold+sam(rho=0.1)``, ``base`` a YAML file or a config to start from, ``out`` a new folder for the
    run, without which nothing is kept on disk. ``data`` and ``model`` are names or objects of your own, ``task`` is a loss and metrics of
    your own, and ``callbacks`` are told of every round.
    """
    own = _own(data, model, settings)
    if algorithm is not None:
        settings["algorithm"] = algorithm
    made = custom(make_config(base, settings), own["data"], own["model"])
    return Result(Run(made, Path(out) if out else None, task=task, callbacks=tuple(callbacks), **own).go())


def compare(
    algorithms: Sequence[str],
    *,
    seeds: int | Sequence[int] = 3,
    base: str | Path | Config | None = None,
    out: str | Path | None = None,
    data: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
    jobs: int | None = None,
    **settings: Any,
) -> Comparison:
    """Run several algorithms on the same splits, cohorts and batches, for several seeds; ``jobs`` of them at a time."""
    own = _own(data, model, settings)
    made = custom(make_config(base, settings), own["data"], own["model"])
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    return Comparison(comparing.compare(made, algorithms, chosen, Path(out) if out else None, tuple(callbacks), jobs, task=task, **own))


def sweep(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Comparison:
    """Run every combination of a sweep, from its file or its values, each once; runs that are over in ``out`` are not run again."""
    from fedflat.experiment.sweep import plan_sweep, run_sweep, slug
    from fedflat.experiment.sweep_file import read_sweep

    if out is None:
        if isinstance(source, Mapping):
            raise UserError("a sweep needs a folder for its runs; pass one with out=...")
        out = Path("runs") / slug(source)
    plan = plan_sweep(read_sweep(source), Path(out))
    found = {done.run.name: done for done in run_sweep(plan, tuple(callbacks), jobs)}
    failed = [done for done in found.values() if done.mistake is not None]
    if failed:
        raise comparing.SomeFailed(
            f"{failed[0].run.name} could not be run: {failed[0].mistake} ({len(failed)} of {len(found)} runs failed)"
        )
    return Comparison(record for run in plan.runs if (record := found[run.name].record) is not None)


def resume(
    folder: str | Path,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Go on with an interrupted run, to the same end as if it had never been interrupted."""
    path = Path(folder)
    found = RunFolder(path).config()
    if RunFolder(path).status()["status"] in OVER:
        return load(path)
    return Result(Run(found, path, data=data, model=model, task=task, callbacks=tuple(callbacks), resume=True).go())


def load(folder: str | Path) -> Result:
    """A run from its folder."""
    return Result.load(folder)


def _own(data: str | Dataset | None, model: str | nn.Module | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The user's own objects; names go to the settings instead."""
    if isinstance(data, str):
        settings["data"] = data
    if isinstance(model, str):
        settings["model"] = model
    return {"data": None if isinstance(data, str) else data, "model": None if isinstance(model, str) else model}
