"""Branches: runs that start from the model of another run, named ``RUN@ROUND`` after its folder and a round.

A branch inherits the server model with its BatchNorm statistics and counters, the number of completed rounds, and all
settings that are not changed. The partition, and the cohorts, batches and learning rates of the remaining rounds, are
therefore those of the original run. The algorithm's server and client state, clients' own statistics, averages, costs
and metrics start anew.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fedflat.algorithms import algorithm
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError
from fedflat.experiment.analysis.reopen import Reference, parse_reference, reopen, require_model, saved_tensors
from fedflat.experiment.analysis.replay import moment_at_checkpoint
from fedflat.experiment.setup.problem import is_user_supplied
from fedflat.experiment.setup.weights import require_finite
from fedflat.experiment.store.checkpoint import checkpoint_rounds
from fedflat.experiment.store.files import create_folder
from fedflat.experiment.store.run_folder import Record, RunFolder, load_record, model_file, saved_rounds, snapshot_file
from fedflat.experiment.store.tensor_files import write_tensors

START_FILE = "start.safetensors"
"""File in the folder of the branches, with a copy of the model that they start from."""
MAX_LISTED = 8
"""Largest number of rounds that an error message lists."""


@dataclass(frozen=True)
class BranchPoint:
    """The model of a run after ``rounds`` rounds."""

    record: Record
    run: Path
    rounds: int

    def settings(self, out: Path) -> dict[str, Any]:
        """The settings of a branch: those of the run, but with initial weights from the copy in ``out``."""
        inherited = self.record.config.model_dump(mode="json")
        return {**inherited, "init": str(out.absolute() / START_FILE), "init_head": "given", "init_rounds": self.rounds}

    def write(self, out: Path) -> None:
        """Copy the model to ``out``, so that the branches no longer depend on the original run."""
        if (out / START_FILE).exists():
            self.check(out)
            return
        tensors = self._tensors()
        require_finite(tensors, f"the model of {self.run} after round {self.rounds}")
        create_folder(out)
        metadata = {
            "model": self.record.config.model,
            "name": "server",
            "rounds": self.rounds,
            "run": str(self.run.absolute()),
        }
        write_tensors(out / START_FILE, tensors, metadata)

    def check(self, out: Path) -> None:
        """Raise a ``UserError`` if the branches in ``out`` started from another model."""
        if not (out / START_FILE).exists():
            return
        tensors, metadata = RunFolder(out).read_tensors(START_FILE)
        if metadata["rounds"] == self.rounds and save(tensors) == save(self._tensors()):
            return
        raise UserError(
            f"the runs in {out} started from {metadata.get('run', 'another model')} at round {metadata['rounds']}, "
            f"not from the current model of {self.run} at round {self.rounds}; "
            "choose another --out, or branch from the same model as before"
        )

    def _tensors(self) -> dict[str, Tensor]:
        """The model's tensors by name, as safetensors requires them: contiguous and on the CPU."""
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self._load().items()}

    def _load(self) -> dict[str, Tensor]:
        """Load the model from a saved model, the final model or the checkpoint, whichever has this round."""
        folder = RunFolder(self.run)
        if self.rounds in saved_rounds(self.run):
            return folder.read_tensors(snapshot_file("server", self.rounds))[0]
        if folder.rounds_in_file(model_file("server")) == self.rounds:
            return folder.read_tensors(model_file("server"))[0]
        problem, _ = reopen(self.record, with_initial_weights=True)
        config = self.record.config
        model: ModelState = moment_at_checkpoint(folder, algorithm(config.algorithm), problem, config).model
        return problem.state_dict(*model)


def branch_point(text: str) -> BranchPoint:
    """The model named by ``RUN@ROUND``; ``RUN`` alone is the run's newest model."""
    # A folder name may contain any character.
    path, separator, rounds = ("", "", text) if Path(text).is_dir() else text.rpartition("@")
    run = Path(path if separator else text)
    source = parse_reference(text)
    if source.model is not None and not run.is_dir():
        raise _not_server(source)
    record = load_record(run)
    if record.config.federation.privacy is not None:
        raise UserError(
            f"{run} is a private run, and a branch would not count the epsilon that it has spent; "
            "start a new run with --privacy, or branch from a run without it"
        )
    if _used_python_objects(record):
        raise UserError(
            f"{run} used Python objects, which a command cannot rebuild; branch it in Python: "
            f"{branch_command(record, run)}"
        )
    RunFolder(run).load_plugins()
    available = branchable_rounds(run)
    if not available:
        raise UserError(f"{run} has no checkpoint or model to branch from yet; let it run first")
    if not separator:
        return BranchPoint(record, run, available[-1])
    if not rounds.isdecimal() or int(rounds) not in available:
        listed = ", ".join(map(str, available[:MAX_LISTED])) + (", ..." if len(available) > MAX_LISTED else "")
        shown = rounds if rounds.isdecimal() else repr(rounds)
        raise UserError(
            f"{run} has no model after round {shown}; it has models after rounds {listed} "
            "(--save-every N saves more of them)"
        )
    return BranchPoint(record, run, int(rounds))


def branch_command(record: Record, run: Path) -> str:
    """The command that branches a run off its last round, in Python if the run used Python objects; for messages."""
    if not _used_python_objects(record):
        return f"fedflat branch {quote(str(run))} ALGORITHM --rounds N"
    return (
        f"fedflat.compare(ALGORITHMS, base='{run / 'config.yaml'}', dataset=..., model=..., "
        f"init='{run / model_file('server')}', init_rounds={record.rounds}, rounds=...)"
    )


def _used_python_objects(record: Record) -> bool:
    return any(map(is_user_supplied, (record.config.model, record.config.data.dataset)))


def _not_server(source: Reference) -> UserError:
    """The error that a reference names another model than the server's, which is the one that branches start from."""
    record = load_record(source.run)
    if source.model == "server":
        return UserError(f"branches always start from the server model; write {replace(source, model=None)}")
    name = require_model(record, str(source.model))
    rounds = record.rounds if source.rounds is None else source.rounds
    file = source.run / (model_file(name) if source.rounds is None else snapshot_file(name, rounds))
    if not file.exists():
        saved_tensors(record, name, source.rounds)  # raises an error that lists the saved rounds
    init = f"--init {quote(str(file))} --set init_rounds={rounds}"
    return UserError(
        f"branches start from the server model, not from {name}; to start from {name}, use "
        f"fedflat run ALGORITHM --config {quote(str(source.run / 'config.yaml'))} {init} --rounds N"
    )


def branchable_rounds(run: Path) -> list[int]:
    """The rounds after which a run can be branched: saved models, the checkpoint and the final model.

    A checkpoint or final model that cannot be read is left out with a warning; it is an error if there is no other.
    """
    folder = RunFolder(run)
    available: set[int | None] = {*saved_rounds(run)}
    errors: list[UserError] = []
    for read_rounds in (partial(checkpoint_rounds, folder), partial(folder.rounds_in_file, model_file("server"))):
        try:
            available.add(read_rounds())
        except UserError as error:
            errors.append(error)
    rounds = sorted(number for number in available if number is not None)
    if errors and not rounds:
        raise errors[0]
    for reason in errors:
        warnings.warn(f"not available for branching: {reason}", stacklevel=2)
    return rounds
