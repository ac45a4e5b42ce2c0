"""Checks and converts the arguments of the Python API, and builds the config that they describe."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from fedflat.data import Dataset, fixes_clients, from_flower, load
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError, one_of
from fedflat.experiment.callback import Callback
from fedflat.experiment.config import Config, parse_config
from fedflat.experiment.setup.problem import name_user_objects
from fedflat.experiment.store.files import read_yaml
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.registry import loaded_plugins
from fedflat.setting_names import SHORT_NAMES, flat, full_name, parse_flatness, unknown_setting
from fedflat.text import expand_home
from fedflat.yaml_text import load_yaml


def check_user_objects(dataset: Any = None, model: Any = None, task: Any = None) -> None:
    """Check the types of user-supplied objects; None is valid for each."""
    if not isinstance(dataset, Dataset | None):
        raise UserError(
            f"dataset is {describe_type(dataset)}; expected the name of a dataset (list all: fedflat data list), "
            "or the result of fedflat.data.from_arrays, from_clients, from_texts or from_torch"
        )
    if not isinstance(model, nn.Module | None):
        raise UserError(
            f"model is {describe_type(model)}; expected a torch.nn.Module, "
            "or the name of a model (list all: fedflat models)"
        )
    if task is not None and (isinstance(task, type) or not isinstance(task, Task)):
        raise UserError(
            f"task is {describe_type(task)}; expected an object with metric, loss(output, target) and "
            "sums(output, target), such as fedflat.Classification()"
        )


def as_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Convert one callback or several to a tuple; anything else raises a ``UserError``."""
    is_single = isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable)
    several = (callbacks,) if is_single else tuple(callbacks)
    for callback in several:
        if not isinstance(callback, Callback):
            raise UserError(f"{callback!r} is not a callback; expected an instance of a subclass of fedflat.Callback")
    return several


def as_algorithms(algorithms: Any) -> list[str]:
    """Convert one algorithm or several, given as text, to a list; anything else raises a ``UserError``."""
    is_single = isinstance(algorithms, str) or not isinstance(algorithms, Iterable)
    texts = [algorithms] if is_single else list(algorithms)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{text!r} is not an algorithm; expected a text such as 'fedavg+sam(rho=0.1)'")
    return texts


def as_path(argument: str, value: Any, example: str = "runs/first") -> Path:
    """Check and convert a path.

    Args:
        argument: name of the argument that it was passed as, for the error message.
        value: the path.
        example: a valid path, for the error message.
    """
    if not isinstance(value, str | os.PathLike) or value == "":
        raise UserError(f"{argument} is {value!r}; expected a path, such as {example!r}")
    return expand_home(Path(value))


def check_jobs(jobs: Any) -> None:
    """Check the number of concurrent runs."""
    if jobs is not None and not (isinstance(jobs, int) and jobs >= 1):
        raise UserError(f"jobs={jobs!r} is invalid; expected the number of concurrent runs, 1 or more")


def describe_type(value: object) -> str:
    """Describe an object by its class, for error messages.

    >>> describe_type(123), describe_type({}), describe_type(dict)
    ('an int', 'a dict', 'the class dict itself')
    """
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{article} {name}"


def make_config(
    base: str | Path | Config | None = None, settings: dict[str, Any] | None = None, assignments: Sequence[str] = ()
) -> Config:
    """Build a config; ``settings`` and ``assignments`` override the values of ``base``.

    Args:
        base: a YAML file or config to start from; default: the defaults. Its number of clients is not inherited if the
            partition is overridden by one that determines the number, or determined it and the new one does not. The
            plugins of a run's ``config.yaml`` are not loaded, but a warning names them.
        settings: values by short name (``lr``) or full name (``training__lr`` or ``training.lr``).
        assignments: further settings as ``a.b=value``, as on the command line.
    """
    values: dict[str, Any] = {}
    if isinstance(base, Config):
        values = base.model_dump(mode="json")
    elif base is not None:
        if not isinstance(base, str | os.PathLike):
            raise UserError(
                f"base is {describe_type(base)}; expected a YAML file or a config; pass settings as rounds=50"
            )
        in_file: dict[str, str] = {}
        content = read_yaml(Path(base))
        suggest_command(base, content)
        for setting, value in flat(content):
            _check_once(setting, f"{value!r}", in_file)
            _set(values, setting, value)
        _warn_about_plugins(Path(base))
    assigned: dict[str, str] = {}
    for name, value in (settings or {}).items():
        _check_name(name)
        setting = full_name(name).replace("__", ".")
        _check_once(setting, f"{name}={value!r}", assigned)
        _set(values, setting, value)
    for assignment in assignments:
        _check_once(full_name(assignment.partition("=")[0].strip()), assignment, assigned)
        assign(values, assignment)
    given = _given(settings or {}).keys() | assigned.keys()
    if "data.partition" in given and "data.clients" not in given:
        _drop_unsuitable_clients(values["data"])
    return parse_config(values)


def suggest_command(file: object, keys: Collection[str]) -> None:
    """Raise a ``UserError`` if a file has a key of the files that ``tune``, ``discover`` or ``sweep`` read."""
    for key, command in (("tune", "tune"), ("slots", "discover"), ("grid", "sweep"), ("list", "sweep")):
        if key in keys:
            raise UserError(f"{file} has the key {key}; use fedflat {command} FILE")


def _warn_about_plugins(file: Path) -> None:
    """Name the plugins of the run whose ``config.yaml`` is ``file`` that are not loaded.

    They are not loaded here, because settings may come from someone else and must not execute code.
    """
    if file.name != "config.yaml":
        return
    # A plugin may have been imported by the user's script, or loaded from another folder.
    loaded = {Path(path).stem for path in loaded_plugins()} | sys.modules.keys()
    for path in RunFolder(file.parent).plugins():
        if Path(path).stem not in loaded:
            warnings.warn(f"{file} may need the plugin {path}; pass it with --plugin {path}", stacklevel=3)


def _drop_unsuitable_clients(data: dict[str, Any]) -> None:
    """Drop the number of clients, inherited with another partition, if it does not suit the partition in ``data``."""
    inherits = "clients" in data and isinstance(data["partition"], str)
    if inherits and fixes_clients(data["partition"]) != (data["clients"] is None):
        del data["clients"]


def keep_clients(settings: dict[str, Any], clients: int, has_base: bool) -> dict[str, Any]:
    """Add settings with which ``clients`` clients keep their examples, unless these settings are given.

    >>> keep_clients({"federation": {"clients_per_round": 2}}, 20, has_base=False)
    {'partition': 'natural', 'clients': 20, 'federation': {'clients_per_round': 2}}
    """
    defaults: dict[str, Any] = {"partition": "natural", "clients": clients}
    if not has_base:
        defaults["clients_per_round"] = min(Config().federation.clients_per_round, clients)
    given = _given(settings)
    return {name: value for name, value in defaults.items() if full_name(name) not in given} | settings


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings in keyword arguments by full name, including those within groups."""
    return {name.replace("__", "."): value for name, value in flat(settings)}


def prepare(
    algorithm: str | None,
    base: str | Path | Config | None,
    dataset: str | Path | Dataset | None,
    model: str | nn.Module | None,
    task: str | Task | None,
    settings: dict[str, Any],
) -> tuple[Config, dict[str, Any]]:
    """Convert the arguments of ``fedflat.run`` to a config and the user-supplied objects, as arguments of ``Run``.

    A dataset, model or task given as text is a setting. Any other value is a user-supplied object. The natural clients
    of such a dataset keep their examples, unless a base, the partition or another number of clients is given.
    """
    if algorithm is not None:
        as_algorithms([algorithm])
    if isinstance(dataset, os.PathLike):
        dataset = os.fspath(dataset)
    names = {"algorithm": algorithm, "dataset": dataset, "model": model, "task": task}
    settings = settings | {name: value for name, value in names.items() if isinstance(value, str)}
    user_dataset = None if isinstance(dataset, str) else dataset
    user_model = None if isinstance(model, str) else model
    user_task = None if isinstance(task, str) else task
    check_user_objects(user_dataset, user_model, user_task)
    if hasattr(type(settings.get("partition")), "load_partition"):
        # The partition is a Flower partitioner, an object that is applied to the dataset now. The dataset's settings
        # come from a config with another partition, because a config cannot hold the object.
        data = make_config(base, {**settings, "partition": "centralised"}).data
        settings["partition"] = from_flower(settings["partition"], user_dataset or load(data.dataset, data.dir))
    groups = None if user_dataset is None else user_dataset.train.groups
    if groups is not None and base is None:
        clients = len(set(groups.tolist()))
        given = _given(settings)
        if "data.partition" not in given and given.get("data.clients") in (None, clients):
            settings = keep_clients(settings, clients, has_base=False)
    config = name_user_objects(make_config(base, settings), user_dataset, user_model)
    return config, {"data": user_dataset, "model": user_model, "task": user_task}


def assign(values: dict[str, Any], setting: str) -> None:
    """Set ``a.b=value`` or ``short_name=value`` in nested values; a value that is not valid YAML is stored as text."""
    key, equals, text = setting.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"cannot read --set '{setting}'; expected key=value, for example training.lr=0.05")
    try:
        value = load_yaml(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)  # YAML 1.1 reads 1e-3 as a string
    group, name = _group_of(values, full_name(key))
    group[name] = value


def _group_of(values: dict[str, Any], setting: str) -> tuple[dict[str, Any], str]:
    """The group that contains a setting, and the setting's name in that group; missing groups are added."""
    *groups, name = setting.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise UserError(f"{setting}: {group} is {values!r}, but it is a group of settings; set those instead")
    return values, name


def _set(values: dict[str, Any], setting: str, value: Any) -> None:
    """Set ``values["a"]["b"]`` for the full name ``a.b``; a group of settings is merged into the existing one."""
    group, name = _group_of(values, setting)
    if name == "flatness" and isinstance(value, str):
        value = parse_flatness(value)
    if isinstance(value, dict) and isinstance(group.get(name), dict):
        value = {**group[name], **value}
    group[name] = value


def _check_once(setting: str, assignment: str, assigned: dict[str, str]) -> None:
    """Reject a second assignment to a setting, and record the first one in ``assigned``, by the setting's full name."""
    if setting in assigned:
        raise UserError(f"{setting} is given twice, as {assigned[setting]} and as {assignment}; give it once")
    assigned[setting] = assignment


def _check_name(name: str) -> None:
    """Reject an unknown keyword; if it is a setting's name without its group, the error suggests the full name."""
    known = {*SHORT_NAMES, *Config.model_fields}
    if name in known or "__" in name or "." in name:
        return
    with_group = []
    for group, field in Config.model_fields.items():
        if name in getattr(field.annotation, "model_fields", {}):
            with_group.append(f"{group}__{name}")
    if with_group:
        raise one_of("setting", name, with_group, "fedflat settings")
    raise unknown_setting(name, known, keyword=True)
