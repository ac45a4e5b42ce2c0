"""What users bring in Python: data, models, tasks and callbacks, refused in a sentence where they are something else."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from fedflat.data import Dataset
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback


def check_own(data: Any = None, model: Any = None, task: Any = None) -> None:
    """Refuse what is no dataset, no model or no task."""
    if not isinstance(data, Dataset | None):
        raise UserError(
            f"data is {called(data)}; expected the name of a dataset (all of them: fedflat data), or one that fedflat.data.from_arrays, "
            "from_clients or from_torch makes"
        )
    if not isinstance(model, nn.Module | None):
        raise UserError(
            f"model is {called(model)}; expected a torch.nn.Module, or the name of a model (all of them: fedflat models)"
        )
    if task is not None and (isinstance(task, type) or not isinstance(task, Task)):
        raise UserError(
            f"task is {called(task)}; expected an object with metric, loss(output, target) and sums(output, target), "
            "such as fedflat.Classification()"
        )


def as_callbacks(given: Any) -> tuple[Callback, ...]:
    """The callbacks of a list, or one alone."""
    callbacks = tuple(given) if isinstance(given, Iterable) and not isinstance(given, Callback) else (given,)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks are objects of classes derived from fedflat.Callback; this is {callback!r}")
    return callbacks


def as_texts(given: Any) -> list[str]:
    """The texts of several algorithms, or of one alone."""
    texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"algorithms are compared by their texts, such as 'fedavg+sam(rho=0.1)'; this is {text!r}")
    return texts


def as_path(what: str, given: Any, example: str = "runs/first") -> Path:
    """A path from text, or from what is one already."""
    if not isinstance(given, str | PathLike) or given == "":
        raise UserError(f"{what} is {given!r}; expected a path, such as {example!r}")
    return Path(given)


def check_jobs(jobs: Any) -> None:
    """Refuse what is no number of runs at the same time."""
    if jobs is not None and not (isinstance(jobs, int) and jobs >= 1):
        raise UserError(f"jobs={jobs!r} is not possible; expected how many runs to do at the same time, 1 or more")


def called(given: object) -> str:
    """What something is, by the name of its class.

    >>> called(123), called({}), called(dict)
    ('an int', 'a dict', 'the class dict and not one of it')
    """
    if isinstance(given, type):
        return f"the class {given.__name__} and not one of it"
    name = type(given).__name__
    return f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"
