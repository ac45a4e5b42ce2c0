"""Models from weights files, opened for the same measurements as the models of runs.

The user names a file of weights, a function that builds the torch module, and a dataset to measure on.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.analysis.reopen import config_for_measurement
from fedflat.experiment.analysis.run_model import RunModel
from fedflat.experiment.config import Config
from fedflat.experiment.make_config import describe_type, make_config
from fedflat.experiment.setup.problem import build_problem, name_user_objects
from fedflat.experiment.store.run_folder import Record
from fedflat.registry import import_file
from fedflat.text import absolute_path


@dataclass(eq=False, repr=False)
class ExternalModel(RunModel):
    """A model from a weights file; its record holds the dataset and no history."""

    file: Path = field(kw_only=True)

    @property
    def label(self) -> str:
        """The path of the weights file."""
        return str(self.file)

    @property
    def description(self) -> str:
        """The name of the weights file."""
        return self.file.name


def external_config(dataset: str, data_dir: Path | None) -> Config:
    """Return a config for measurements on a dataset, all of whose training examples belong to a single client."""
    return make_config(None, {"dataset": dataset, "data_dir": data_dir, "partition": "centralised", "clients": 1})


def open_external_model(
    file: Path, module: nn.Module, config: Config, *, device: str | None = None, precision: str | None = None
) -> ExternalModel:
    """Load weights into a module and open it for measurements.

    Args:
        file: a ``state_dict`` (.pt) or a safetensors file. Code in the file is never executed.
        module: a module of the right architecture, which is copied.
        config: the dataset, from ``external_config``.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``float32`` (default), ``tf32`` or ``float64``.
    """
    config = name_user_objects(config_for_measurement(config, device, precision), None, module)
    problem, partition = build_problem(config.changed(init=file), model=module)
    record = Record(config, history=[], status="finished", reason="", seconds=0.0, models={})
    state = ModelState(*problem.initial_state())
    tf32 = config.engine.precision == "tf32"
    return ExternalModel(record, file.stem, None, problem, partition, state, tf32, file=file)


def build_module(text: str) -> nn.Module:
    """Call the function or class that ``FILE.py:FUNCTION`` names, without arguments, and return its module."""
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise UserError(f"cannot read --module {text!r}; expected FILE.py:FUNCTION, such as model.py:make_model")
    file = absolute_path(path)
    if not file.is_file():
        raise UserError(f"{file} does not exist; expected a Python file that defines {name}")
    definitions = vars(import_file(file, f"fedflat_module_{file.stem}", "module"))
    if not callable(definitions.get(name)):
        functions = [key for key, value in definitions.items() if callable(value) and not key.startswith("_")]
        raise one_of(f"function in {file}", name, functions)
    try:
        inspect.signature(definitions[name]).bind()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} of {file} cannot be called without arguments ({error}); write a function without arguments that "
            f"returns the module, e.g. def make_model(): return {name}(...)"
        ) from None
    try:
        module = definitions[name]()
    except Exception as error:
        raise UserError(f"{name}() of {file} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{name}() of {file} returned {describe_type(module)}; expected a torch.nn.Module")
    return module
