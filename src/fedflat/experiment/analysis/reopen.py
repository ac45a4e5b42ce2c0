"""Reopen a run for measurements: its problem, its partition and its models."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from fedflat.algorithms import algorithm
from fedflat.averaging import average_name
from fedflat.data import Dataset, Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Task
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import CUSTOM, federation
from fedflat.experiment.setup.weights import fill
from fedflat.experiment.store.run_folder import Record, model_file, saved_rounds, snapshot_file


def reopen(
    record: Record,
    *,
    data: Dataset | None = None,
    network: nn.Module | None = None,
    task: Task | None = None,
    config: Config | None = None,
    call: str = "evaluate",
    as_begun: bool = False,
) -> tuple[Problem, Partition]:
    """The problem and the partition of a run.

    Args:
        record: the run.
        data, network, task: user-supplied dataset, model and task; needed unless the run was made in this process.
        config: replaces the run's config, e.g. to use another device.
        call: method of ``Result`` to name in error messages.
        as_begun: restore the initial weights as well; otherwise only frozen parameters are restored.
    """
    config = config or record.config
    given = {"data": data, "model": network, "task": task}
    own: dict[str, Any] = {what: record.own.get(what) if value is None else value for what, value in given.items()}
    for what, name, argument in (("data", config.data.dataset, "data"), ("model", config.model, "network")):
        if own[what] is None and name.partition(":")[0] == CUSTOM:
            raise UserError(
                f"this run used a custom {what} ({name}); pass it again: fedflat.load(folder).{call}({argument}=...)"
            )
    problem, partition = federation(
        config if as_begun else _without_initial_weights(record, config, own["model"]), **own
    )
    if record.history and not all(problem.task.metric in scores for scores in record.history[-1]["test"].values()):
        raise UserError(
            f"this run used a custom task, not one scored by {problem.task.metric}; pass it again in Python: task=..."
        )
    return problem, partition


def _without_initial_weights(record: Record, config: Config, network: nn.Module | None) -> Config:
    """A config that reads frozen parameters from the run's saved models instead of the initial weights."""
    if network is None and config.training.train == "all":
        return config.model_copy(update={"init": None, "init_head": "given"})
    written = record.folder.path / model_file("server") if record.folder else None
    return (
        config.model_copy(update={"init": written, "init_head": "given"})
        if written is not None and written.exists()
        else config
    )


def require_model(record: Record, name: str) -> str:
    """The full name of a model of a run; ``wima`` matches a single ``wima(window=50)``."""
    return full_name("model of this run", name, record.models or record.evaluated)


def full_name(what: str, name: str, known: Collection[str]) -> str:
    """The known name that equals ``name`` or matches it without parameters; raises a ``UserError`` if not unique."""
    alike = [full for full in known if full == name] or [full for full in known if full.partition("(")[0] == name]
    if len(alike) != 1:
        raise one_of(what, name, known)
    return alike[0]


def primary_model(record: Record) -> str:
    """The model that represents a run: its last average, or ``server`` if there is none (yet)."""
    known = record.models or record.evaluated
    averages = [average_name(average) for average in algorithm(record.config.algorithm).averages]
    return next((name for name in reversed(averages) if name in known), "server")


def state_of(record: Record, name: str, problem: Problem, rounds: int | None = None) -> ModelState:
    """A model of a run by name: the final one, or the one saved after ``rounds``."""
    if rounds is None and name in record.models:
        return ModelState(*(_moved(part, problem) for part in record.models[name]))
    fill(
        problem.model,
        record.config.model,
        written_tensors(record, name, rounds),
        f"model {name} of {record.folder and record.folder.path}",
    )
    return ModelState(*problem.initial())


def written_tensors(record: Record, name: str, rounds: int | None = None) -> dict[str, Tensor]:
    """Saved tensors of a model by name: the final ones, or those saved after ``rounds``."""
    if record.folder is None:
        raise UserError("this run has no folder, so no models were saved; pass out=... to fedflat.run")
    file = model_file(name) if rounds is None else snapshot_file(name, rounds)
    if rounds is not None and not (record.folder.path / file).exists():
        raise UserError(_not_kept(record, name, rounds))
    return record.folder.read_tensors(file)[0]


def _moved(part: Any, problem: Problem) -> Any:
    if isinstance(part, dict):
        return {name: value.to(problem.device) for name, value in part.items()}
    return part.to(problem.device, problem.dtype)


def _not_kept(record: Record, name: str, rounds: int) -> str:
    assert record.folder is not None
    kept = saved_rounds(record.folder.path, name)
    start = f"{record.folder.path} has no {name} model of round {rounds}; "
    if not kept:
        return start + "save models during training with --save-every N (evaluation.save_every)"
    return start + f"saved rounds: {', '.join(map(str, kept[:8]))}{', ...' if len(kept) > 8 else ''}"
