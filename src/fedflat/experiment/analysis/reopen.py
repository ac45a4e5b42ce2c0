"""Reopen a run for measurements: its problem, its partition and its models.

Users name a model by a reference. ``RUN``, a folder, names the primary model of the run, ``RUN:wima`` its average
``wima``, ``RUN:server@50`` the server model as saved after round 50, and ``RUN:client3@50`` the model of client 3 after
local training in the next round.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedflat.data import Dataset, Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Task
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import build_problem, is_user_supplied, load_data, name_user_objects
from fedflat.experiment.setup.weights import TORCH_SUFFIXES, load_tensors
from fedflat.experiment.store.provenance import normalise_as_in_training, recorded_fingerprints
from fedflat.experiment.store.run_folder import Record, RunFolder, model_file, saved_rounds, snapshot_file
from fedflat.flatness.precision import has_bf16

LISTED_ROUNDS = 8
"""Largest number of saved rounds that an error message lists."""
WEIGHTS_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors")
PRECISIONS = ("float32", "tf32", "float64")
"""Precisions of measurements."""


@dataclass(frozen=True)
class Reference:
    """A reference to a model of a run."""

    run: Path
    """Folder of the run."""
    model: str | None = None
    """Name of the model; None: the primary one."""
    rounds: int | None = None
    """Round after which the model was saved; None: the final model."""

    def __str__(self) -> str:
        model = f":{self.model}" if self.model else ""
        return f"{self.run}{model}{at_round(self.rounds)}"


def at_round(round_number: int | None) -> str:
    """Return the part of a reference that names the round, e.g. ``@50``; empty for the final model."""
    return "" if round_number is None else f"@{round_number}"


def parse_reference(text: str) -> Reference:
    """Parse a reference to a model of a run, ``RUN:MODEL@ROUND``, of which ``:MODEL`` and ``@ROUND`` are optional.

    >>> parse_reference("runs/a:wima(window=50)@20")
    Reference(run=PosixPath('runs/a'), model='wima(window=50)', rounds=20)
    """
    if Path(text).is_dir():  # a folder name may contain any character
        return Reference(Path(text))
    match = re.fullmatch(r"(?P<run>.+?)(:(?P<model>[A-Za-z][^/\\:@]*))?(@(?P<rounds>\d+))?", text, re.DOTALL)
    assert match is not None  # any text is a valid folder name
    return Reference(Path(match["run"]), match["model"], None if match["rounds"] is None else int(match["rounds"]))


def client_of(source: Reference) -> int | None:
    """Return the client's number if a reference names a client's model, otherwise None.

    >>> client_of(Reference(Path("runs/a"), "client3", 50)), client_of(Reference(Path("runs/a"), "wima"))
    (3, None)
    """
    match = re.fullmatch(r"client(\d+)", source.model or "")
    return int(match[1]) if match else None


def is_weights_file(text: str) -> bool:
    """Whether a text names a weights file rather than a run.

    >>> is_weights_file("model.pt"), is_weights_file("runs/fedavg:wima")
    (True, False)
    """
    return Path(text).suffix in WEIGHTS_SUFFIXES and not Path(text).is_dir()


def config_for_measurement(config: Config, device: str | None, precision: str | None) -> Config:
    """Return a run's config with the device and precision of a measurement.

    Args:
        config: the run's config.
        device: ``auto``, ``cpu`` or ``cuda``; default: ``auto``, the best device of this machine.
        precision: ``float32``, ``tf32`` or ``float64``; default: float64 for float64 runs, otherwise float32.
    """
    if precision is None:
        precision = "float64" if config.engine.precision == "float64" else "float32"
    if precision not in PRECISIONS:
        raise one_of("precision", precision, PRECISIONS)
    if device is not None and device not in ("auto", "cpu", "cuda"):
        raise one_of("device", device, ("auto", "cpu", "cuda"))
    return config.changed(engine={"device": device or "auto", "precision": precision})


def on_device(config: Config, device: str) -> Config:
    """Return a run's config with another device; tf32 and bf16 become float32 if it lacks them."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    lacks = {"tf32": not on_gpu, "bf16": not has_bf16("cuda" if on_gpu else "cpu")}
    precision = "float32" if lacks.get(config.engine.precision) else config.engine.precision
    return config.changed(engine={"device": device, "precision": precision})


def reopen(
    record: Record,
    *,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    task: Task | None = None,
    config: Config | None = None,
    method: str = "evaluate",
    with_initial_weights: bool = False,
) -> tuple[Problem, Partition]:
    """Rebuild the problem and the partition of a run.

    Args:
        record: the run.
        dataset, network, task: user-supplied dataset, model and task; needed unless the run was made in this process.
        config: replaces the run's config, e.g. to use another device.
        method: method of ``Result`` to name in error messages.
        with_initial_weights: restore the initial weights as well; otherwise only frozen parameters are restored.
    """
    if dataset is not None and not isinstance(dataset, Dataset):
        raise UserError(f"dataset= is a {type(dataset).__name__}; expected a dataset, e.g. fedflat.data.load('digits')")
    if record.folder is not None:
        record.folder.load_plugins()
    config = config or record.config
    name_of_data = name_user_objects(config, dataset, None).data.dataset
    dataset = record.user_objects.get("data") if dataset is None else dataset
    network = record.user_objects.get("model") if network is None else network
    task = record.user_objects.get("task") if task is None else task
    for user_object, name, argument in ((dataset, config.data.dataset, "dataset"), (network, config.model, "network")):
        if user_object is None and is_user_supplied(name):
            raise _missing_object(record, argument, name, method)
    if not with_initial_weights:
        config = _without_initial_weights(record, config, network)
    if record.folder is not None and name_of_data == record.config.data.dataset:  # not deliberately on other data
        dataset = normalise_as_in_training(record.folder, load_data(config, dataset))
    problem, partition = build_problem(config, dataset, network, task)
    if record.history and not all(problem.task.metric in scores for scores in record.history[-1]["test"].values()):
        raise UserError(
            f"this run used a custom task, not one scored by {problem.task.metric}; pass it again in Python: task=..."
        )
    if record.folder and task is None and (custom_task := recorded_fingerprints(record.folder).get("task")):
        warnings.warn(
            f"the run in {record.folder.path} used a custom task, {custom_task}; without it, loss and metrics are "
            f"those of {type(problem.task).__name__}; pass it again in Python: task=...",
            stacklevel=3,
        )
    return problem, partition


def resume_command(folder: RunFolder) -> str:
    """The command that continues a run, in Python if the run needs user-supplied objects; for messages."""
    config = folder.config()
    needed = {
        "dataset": is_user_supplied(config.data.dataset),
        "model": is_user_supplied(config.model),
        "task": "task" in recorded_fingerprints(folder),
    }
    arguments = "".join(f", {name}=..." for name, is_needed in needed.items() if is_needed)
    if not arguments or folder.has_real_sites:
        return folder.resume_command
    return f"fedflat.resume('{folder.path}'{arguments}) in Python"


def _missing_object(record: Record, argument: str, name: str, method: str) -> UserError:
    """Return the error that a run needs its own dataset or network (``argument``), which its config calls ``name``."""
    if record.folder is not None and record.folder.has_real_sites:
        call = f"fedflat.load('{record.folder.path}').{method}"
        return UserError(
            f"the run in {record.folder.path} was trained at real sites, and their training data stay there; measure "
            f"it on the server's own data in Python, with the hooks of its project: {call}(dataset=held_out()), and "
            "network=model() if the project has its own model"
        )
    flag = ", or --module FILE.py:FUNCTION where a command has it" * (argument == "network" and method == "flatness")
    return UserError(
        f"this run used a user-supplied {argument} ({name}); "
        f"pass it again: fedflat.load(folder).{method}({argument}=...){flag}"
    )


def _without_initial_weights(record: Record, config: Config, network: nn.Module | None) -> Config:
    """Return a config that does not read the file of initial weights, which may be gone.

    Frozen parameters are read from the run's saved server model; without one, the config stays unchanged.
    """
    if network is None and config.training.train == "all":  # nothing is frozen
        return config.changed(init=None, init_head="given")
    saved_model = record.folder.path / model_file("server") if record.folder else None
    if saved_model is None or not saved_model.exists():
        return config
    return config.changed(init=saved_model, init_head="given")


def require_model(record: Record, name: str) -> str:
    """Return the full name of a model of a run: ``wima`` becomes ``wima(window=50)`` if the run has only that one."""
    known = record.models or record.evaluated or ("server", *record.averages)  # without any evaluation: by the config
    return full_name("model of this run", name, known)


def full_name(kind: str, name: str, known: Collection[str]) -> str:
    """Complete a name without parameters: ``wima`` becomes ``wima(window=50)`` if only that one is known.

    Args:
        kind: what the names denote, for the error message.
        name: a name, with or without parameters.
        known: valid names; a ``UserError`` lists them unless exactly one matches.
    """
    if name in known:
        return name
    matches = [candidate for candidate in known if candidate.partition("(")[0] == name]
    if len(matches) != 1:
        raise one_of(kind, name, known)
    return matches[0]


def primary_model(record: Record) -> str:
    """Return the name of the model that represents a run: its last average, or ``server`` if there is none (yet)."""
    known = record.models or record.evaluated
    return next((name for name in reversed(record.averages) if name in known), "server")


def state_of(record: Record, name: str, problem: Problem, after_round: int | None = None) -> ModelState:
    """Load a model of a run onto the problem's device: the final one, or the one saved after a round.

    Warns if it is the final model of a diverged run.
    """
    device, dtype = problem.device, problem.dtype
    if after_round is None and record.status == "diverged":
        warnings.warn(f"{record.display_name} diverged ({record.reason}); using its final model", stacklevel=2)
    if after_round is None and name in record.models:
        weights, buffers, integer_buffers = record.models[name]
        on_device = {key: tensor.to(device) for key, tensor in integer_buffers.items()}
        return ModelState(weights.to(device, dtype), buffers.to(device, dtype), on_device)
    source = f"model {name} of {record.folder and record.folder.path}"
    load_tensors(problem.model, record.config.model, saved_tensors(record, name, after_round), source)
    return ModelState(*problem.initial_state())  # reads the network, into which the weights were just loaded


def saved_tensors(record: Record, name: str, after_round: int | None = None) -> dict[str, Tensor]:
    """Read the saved tensors of a model: the final ones, or those saved after a round."""
    folder = record.folder
    if folder is None:
        raise UserError("this run has no folder, so no models were saved; pass out=... to fedflat.run")
    file = model_file(name) if after_round is None else snapshot_file(name, after_round)
    if after_round is not None and not (folder.path / file).exists():
        saved = saved_rounds(folder.path, name)
        hint = "save models during training with --save-every N (evaluation.save_every)"
        if saved:
            more = ", ..." if len(saved) > LISTED_ROUNDS else ""
            hint = f"saved rounds: {', '.join(map(str, saved[:LISTED_ROUNDS]))}{more}"
        raise UserError(f"{folder.path} has no {name} model of round {after_round}; {hint}")
    return folder.read_tensors(file)[0]
