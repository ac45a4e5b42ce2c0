"""A run taken up again to be looked at: the problem and the partition it was about, and any of its models."""

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
from fedflat.experiment.store.record import Record, model_file, saved_rounds, snapshot_file


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
    """The problem and the partition of a run; its network holds what is frozen, and ``as_begun`` all that the run started from.

    Where data, model or task were the user's own they are needed again, unless the run was made in this process; ``call`` is the method of
    a result that a sentence names for it. ``config`` stands in for the run's own, for example to use another device.
    """
    config = config or record.config
    given = {"data": data, "model": network, "task": task}
    own: dict[str, Any] = {what: record.own.get(what) if value is None else value for what, value in given.items()}
    for what, name, argument in (("data", config.data.dataset, "data"), ("model", config.model, "network")):
        if own[what] is None and name.partition(":")[0] == CUSTOM:
            raise UserError(
                f"this run used {what} of your own ({name}); pass it again in Python: fedflat.load(folder).{call}({argument}=...)"
            )
    problem, partition = federation(config if as_begun else _without_the_start(record, config, own["model"]), **own)
    if record.history and not all(problem.task.metric in scores for scores in record.history[-1]["test"].values()):
        raise UserError(
            f"this run was not scored by {problem.task.metric} but for a task of your own; pass it again in Python: task=..."
        )
    return problem, partition


def _without_the_start(record: Record, config: Config, network: nn.Module | None) -> Config:
    """A config that does not need the weights a run started from: what of them is frozen lies in the models that the run has written."""
    if network is None and config.training.train == "all":
        return config.model_copy(update={"init": None, "init_head": "given"})
    written = record.folder.path / model_file("server") if record.folder else None
    return (
        config.model_copy(update={"init": written, "init_head": "given"})
        if written is not None and written.exists()
        else config
    )


def require_model(record: Record, name: str) -> str:
    """The full name of a model of a run: ``wima`` is enough where there is one ``wima(window=50)``; others are refused."""
    return full_name("model of this run", name, record.models or record.evaluated)


def full_name(what: str, name: str, known: Collection[str]) -> str:
    """The one of the known names that is meant, in full or without its parameters."""
    alike = [full for full in known if full == name] or [full for full in known if full.partition("(")[0] == name]
    if len(alike) != 1:
        raise one_of(what, name, known)
    return alike[0]


def primary_model(record: Record) -> str:
    """The model whose figures stand for a run: its last average, or the server's own where there is none (yet)."""
    known = record.models or record.evaluated
    averages = [average_name(average) for average in algorithm(record.config.algorithm).averages]
    return next((name for name in reversed(averages) if name in known), "server")


def state_of(record: Record, name: str, problem: Problem, rounds: int | None = None) -> ModelState:
    """A model of a run by its name: as it was in the end, or as it was kept after so many rounds."""
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
    """The tensors of a model as a run has written them: in the end, or after so many rounds."""
    if record.folder is None:
        raise UserError(
            "this run was made without a folder, so that no models were kept on the way; give fedflat.run a folder (out=...)"
        )
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
    start = f"{record.folder.path} has not kept {name} after round {rounds}; "
    if not kept:
        return start + "runs keep models on the way with --save-every N (evaluation.save_every)"
    return start + f"it has rounds {', '.join(map(str, kept[:8]))}{', ...' if len(kept) > 8 else ''}"
