"""fedflat from Python: run, rounds, compare, sweep, resume, load."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedflat.data import Dataset, from_clients, from_flower
from fedflat.data import load as load_data
from fedflat.data.flower import is_partitioner
from fedflat.data.per_client import Pair
from fedflat.engines.problem.task import CustomLoss, Task
from fedflat.errors import UserError, one_of
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign import compare as comparing
from fedflat.experiment.config import SHORT as SHORT
from fedflat.experiment.config import WHERE, Config, assign, config, read_yaml
from fedflat.experiment.quantities import flatness_values
from fedflat.experiment.rounds import Round
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import custom
from fedflat.experiment.stopping import OVER
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.experiment.user_objects import as_callbacks, as_path, as_texts, called, check_jobs, check_own
from fedflat.reporting.result import Comparison, Result


def make_config(
    base: str | Path | Config | None = None, settings: dict[str, Any] | None = None, assignments: Sequence[str] = ()
) -> Config:
    """A config from a file or another config, with settings by short or full name and ``a.b=value`` assignments on top."""
    values: dict[str, Any] = {}
    if isinstance(base, Config):
        values = base.model_dump(mode="json")
    elif base is not None:
        values = read_yaml(_config_file(base))
    said: dict[str, str] = {}
    for name, value in (settings or {}).items():
        _check_name(name)
        full = SHORT.get(name, name).replace("__", ".")
        _check_once(full, f"{name}={value!r}", said)
        said[full] = f"{name}={value!r}"
        *sections, last = full.split(".")
        inside = values
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise UserError(
                    f"{section} is a group of settings, but here it is {inside!r}; write its settings below it"
                )
        if last == "flatness" and isinstance(value, str):
            value = flatness_values(value)
        together = isinstance(value, dict) and isinstance(inside.get(last), dict)
        inside[last] = {**inside[last], **value} if together else value
    for assignment in assignments:
        _check_once(assignment.partition("=")[0].strip(), assignment, said)
        assign(values, assignment)
    return config(values)


def _check_once(full_name: str, now: str, said: dict[str, str]) -> None:
    """Refuse a setting that was said before under another name."""
    if full_name in said:
        raise UserError(f"{full_name} is given twice, as {said[full_name]} and as {now}; give it once")


def _config_file(base: Any) -> Path:
    if not isinstance(base, str | os.PathLike):
        raise UserError(
            f"base is {called(base)}; expected a YAML file or a config, and settings by their names: rounds=50"
        )
    return Path(base)


def _check_name(name: str) -> None:
    """Refuse a setting that is neither a short name nor a full one, with what comes nearest: its full name, or a part of the word."""
    known = {*SHORT, *Config.model_fields}
    if name in known or "__" in name or "." in name:
        return
    groups = {group: field.annotation for group, field in Config.model_fields.items()}
    full = [f"{group}__{name}" for group, kind in groups.items() if name in getattr(kind, "model_fields", {})]
    near = full or sorted(word for word in known if word in name.split("_"))
    if near:
        raise UserError(
            f"there is no setting '{name}'; did you mean {' or '.join(near)}? (all of them: fedflat settings)"
        )
    raise one_of("setting", name, known, "fedflat settings")


def run(
    algorithm: str | None = None,
    *,
    base: str | Path | Config | None = None,
    out: str | Path | None = None,
    dataset: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    task: Task | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Run one experiment. Settings have short names (``rounds=50``) or full ones (``training__lr_decay=0.998``).

    ``algorithm`` is a text such as ``scaffold+sam(rho=0.1)``, ``base`` a YAML file or a config to start from, ``out`` a new folder for the
    run, without which nothing is kept on disk. ``dataset`` and ``model`` are names or objects of your own, ``task`` is a loss and metrics of
    your own, and ``callbacks`` are told of every round.
    """
    if algorithm is not None:
        settings["algorithm"] = algorithm
    made, own = _prepared(base, dataset, model, task, settings)
    return Result(Run(made, _folder(out), task=task, callbacks=as_callbacks(callbacks), **own).go())


class Rounds(Iterator[Round]):
    """The rounds of a run, each trained when it is asked for; another loop over it goes on where one was left, until ``close``."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._closed = False
        self._steps = run.steps()
        weakref.finalize(
            self, self._steps.close
        )  # also where a script ends within the loop, before torch is taken apart

    def __next__(self) -> Round:
        if self._closed:
            self._be_over()
        next(self._steps)
        return Round.of(self.run)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per evaluation so far, that before the first round included."""
        return self.run.history

    def close(self) -> None:
        """Leave off: a run with a folder writes its models and can be resumed. The same happens when nothing refers to it any more."""
        self._steps.close()
        self._closed = True

    def result(self) -> Result:
        """The run as a result; rounds that are left are not trained any more."""
        self.close()
        if self.run.record is None:
            raise UserError("no round was trained, so there is no result; go through some rounds first")
        return Result(self.run.record)

    def _be_over(self) -> None:
        """Refuse to go on with a run that has rounds left: an empty loop would look like one that is over."""
        if self.run.record is not None and self.run.record.status in OVER:
            return
        left = f"this run was closed after {self.run.server.rounds} of {self.run.config.training.rounds} rounds"
        if self.run.folder is None or not self.run.folder.exists:
            raise UserError(
                f"{left} and left no folder to go on from; begin it anew, with out=FOLDER if fedflat.resume is to go on with it"
            )
        raise UserError(f"{left}; go on with it by fedflat.resume({str(self.run.folder.path)!r})")


def rounds(
    algorithm: str | None = None,
    model: str | nn.Module | None = None,
    clients_data: Sequence[Pair] | None = None,
    test_data: Pair | None = None,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    base: str | Path | Config | None = None,
    out: str | Path | None = None,
    dataset: str | Dataset | None = None,
    task: Task | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    **settings: Any,
) -> Rounds:
    """One experiment, a round at a time, for a loop of your own: ``for round in fedflat.rounds("fedmoswa", module, clients, test)``.

    ``clients_data`` is a pair (inputs, targets) for each client, which keeps it unless ``partition`` is another than ``natural``, and
    ``test_data`` one for all; instead of them ``dataset`` and ``partition`` name a dataset, as in ``run``. ``loss`` is a function of outputs and
    targets that gives the mean over a batch. It is the same run, so that the same settings give the same model.

    >>> import torch
    >>> clients = [(torch.randn(20, 4) + label, torch.full((20,), label)) for label in (0, 1)]
    >>> for round in rounds("fedavg", torch.nn.Linear(4, 2), clients, rounds=3, workers=1):
    ...     print(round.number, round.cohort)
    1 (0, 1)
    2 (0, 1)
    3 (0, 1)
    """
    if algorithm is not None:
        settings["algorithm"] = algorithm
    if clients_data is not None:
        if dataset is not None:
            raise UserError("clients_data and dataset are two datasets; pass one of them")
        dataset = from_clients(clients_data, test_data)
        settings = {"partition": "natural", "clients": len(clients_data), **settings}
        if base is None:
            settings.setdefault("clients_per_round", min(Config().federation.clients_per_round, len(clients_data)))
    elif test_data is not None:
        raise UserError(
            "test_data belongs to clients_data, which is missing; a dataset by name has a test set of its own"
        )
    if loss is not None:
        if task is not None:
            raise UserError("a task has a loss of its own; pass loss= or task=, not both")
        if not callable(loss):
            raise UserError(
                f"loss is {loss!r}; expected a function of outputs and targets, such as torch.nn.functional.cross_entropy"
            )
        task = CustomLoss(function=loss)
    made, own = _prepared(base, dataset, model, task, settings)
    return Rounds(Run(made, _folder(out), task=task, callbacks=as_callbacks(callbacks), **own))


def compare(
    algorithms: str | Sequence[str],
    *,
    seeds: int | Sequence[int] = 3,
    base: str | Path | Config | None = None,
    out: str | Path | None = None,
    dataset: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    task: Task | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    jobs: int | None = None,
    **settings: Any,
) -> Comparison:
    """Run several algorithms on the same partitions, cohorts and batches, for several seeds; ``jobs`` of them at a time."""
    check_jobs(jobs)
    made, own = _prepared(base, dataset, model, task, settings)
    texts, told = as_texts(algorithms), as_callbacks(callbacks)
    folder = (
        None if out is None else as_path("out", out).absolute()
    )  # a callback may leave the directory before the next run begins
    return Comparison(comparing.compare(made, texts, seeds, folder, told, jobs, task=task, **own))


def sweep(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    callbacks: Callback | Sequence[Callback] = (),
) -> Comparison:
    """Run every combination of a sweep, from its file or its values, each once; runs that are over in ``out`` are not run again."""
    from fedflat.experiment.campaign.sweep import plan_sweep, run_sweep, slug
    from fedflat.experiment.campaign.sweep_file import read_sweep

    check_jobs(jobs)
    if not isinstance(source, Mapping):
        source = as_path("source", source, "sweep.yaml")
    if out is None:
        if isinstance(source, Mapping):
            raise UserError("a sweep needs a folder for its runs; pass one with out=...")
        out = Path("runs") / slug(source)
    plan = plan_sweep(read_sweep(source), as_path("out", out).absolute())  # as in compare
    found = {done.run.name: done for done in run_sweep(plan, as_callbacks(callbacks), jobs)}
    failed = [done for done in found.values() if done.mistake is not None]
    if failed:
        raise comparing.SomeFailed(
            f"{failed[0].run.name} could not be run: {failed[0].mistake} ({len(failed)} of {len(found)} runs failed)"
        )
    return Comparison(record for run in plan.runs if (record := found[run.name].record) is not None)


def resume(
    folder: str | Path,
    *,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    task: Task | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    **where: Any,
) -> Result:
    """Go on with an interrupted run, to the same end as if it had never been interrupted.

    ``where`` it goes on may be another place: ``workers``, ``engine``, ``device``, ``ray_address`` and ``data_folder``.
    """
    for name in where:
        if name not in WHERE:
            raise one_of("setting that may change when a run is resumed", name, WHERE)
    check_own(dataset, model, task)
    path = as_path("folder", folder)
    found = make_config(RunFolder(path).config(), where)
    if RunFolder(path).is_over:
        return load(path)
    return Result(
        Run(found, path, data=dataset, model=model, task=task, callbacks=as_callbacks(callbacks), resume=True).go()
    )


def load(folder: str | Path) -> Result:
    """A run from its folder."""
    return Result.load(folder)


def _folder(out: str | Path | None) -> Path | None:
    return None if out is None else as_path("out", out)


def _prepared(
    base: str | Path | Config | None,
    dataset: str | Dataset | None,
    model: str | nn.Module | None,
    task: Task | None,
    settings: dict[str, Any],
) -> tuple[Config, dict[str, Any]]:
    """The config, and the user's own objects; names go to the settings, and a partitioner of Flower becomes the text of a partition."""
    settings |= {name: value for name, value in (("dataset", dataset), ("model", model)) if isinstance(value, str)}
    own_data, own_model = None if isinstance(dataset, str) else dataset, None if isinstance(model, str) else model
    check_own(own_data, own_model, task)
    if is_partitioner(settings.get("partition")):
        meant = make_config(base, {**settings, "partition": "centralised"}).data
        settings["partition"] = from_flower(settings["partition"], own_data or load_data(meant.dataset, meant.dir))
    return custom(make_config(base, settings), own_data, own_model), {"data": own_data, "model": own_model}
