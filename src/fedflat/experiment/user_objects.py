"""Validation of user-supplied datasets, models, tasks, callbacks and paths."""

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


def check_own(dataset: Any = None, model: Any = None, task: Any = None) -> None:
    """Check the types of user-supplied objects; None is valid for each."""
    if not isinstance(dataset, Dataset | None):
        raise UserError(
            f"dataset is {called(dataset)}; expected the name of a dataset (list all: fedflat data list), or the "
            "result of fedflat.data.from_arrays, from_clients or from_torch"
        )
    if not isinstance(model, nn.Module | None):
        raise UserError(
            f"model is {called(model)}; expected a torch.nn.Module, or the name of a model (list all: fedflat models)"
        )
    if task is not None and (isinstance(task, type) or not isinstance(task, Task)):
        raise UserError(
            f"task is {called(task)}; expected an object with metric, loss(output, target) and sums(output, target), "
            "such as fedflat.Classification()"
        )


def as_callbacks(given: Any) -> tuple[Callback, ...]:
    """A tuple of callbacks, from one or several."""
    callbacks = tuple(given) if isinstance(given, Iterable) and not isinstance(given, Callback) else (given,)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"{callback!r} is not a callback; expected an instance of a subclass of fedflat.Callback")
    return callbacks


def as_texts(given: Any) -> list[str]:
    """A list of algorithm texts, from one or several."""
    texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{text!r} is not an algorithm; expected a text such as 'fedavg+sam(rho=0.1)'")
    return texts


def as_path(argument: str, given: Any, example: str = "runs/first") -> Path:
    """The path given for ``argument``."""
    if not isinstance(given, str | PathLike) or given == "":
        raise UserError(f"{argument} is {given!r}; expected a path, such as {example!r}")
    return Path(given)


def check_jobs(jobs: Any) -> None:
    """Check the number of concurrent runs."""
    if jobs is not None and not (isinstance(jobs, int) and jobs >= 1):
        raise UserError(f"jobs={jobs!r} is invalid; expected the number of concurrent runs, 1 or more")


def called(value: object) -> str:
    """An object described by its class, for messages.

    >>> called(123), called({}), called(dict)
    ('an int', 'a dict', 'the class dict itself')
    """
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"
