"""Several algorithms from one moment of a run: ``RUN@ROUND`` names its model after so many rounds, from which others go on.

Carried over: the server's weights, BatchNorm statistics and counters, the number of rounds behind them, and every setting of the run that
is not set anew. So the partition, cohorts, batches and learning rates of the rounds to come are those the run itself had. Not carried over:
what the run's algorithm keeps on the server and on clients, clients' own statistics, averages, costs and metrics; they start fresh.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError
from fedflat.experiment.analysis.reopen import reopen
from fedflat.experiment.analysis.replay import at_checkpoint
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.experiment.store.checkpoint import CHECKPOINT
from fedflat.experiment.store.record import Record, load_record, model_file, saved_rounds, snapshot_file
from fedflat.experiment.store.run_folder import RunFolder

FILE = "start.safetensors"


@dataclass(frozen=True)
class Start:
    """The model of a run after so many rounds."""

    record: Record
    run: Path
    rounds: int

    def settings(self, out: Path) -> dict[str, Any]:
        """The settings of a run in ``out`` that goes on from here."""
        begun = self.record.config.model_dump(mode="json")
        return {**begun, "init": str(out.absolute() / FILE), "init_head": "given", "init_rounds": self.rounds}

    def write(self, out: Path) -> None:
        """Put the model where those settings look for it, so that the branches do not need the run any more."""
        if (out / FILE).exists():
            self.check(out)
            return
        create_folder(out)
        about = {
            "model": self.record.config.model,
            "name": "server",
            "rounds": self.rounds,
            "run": str(self.run.absolute()),
        }
        write_whole(out / FILE, save(self._whole(), {"fedflat": json.dumps(about)}))

    def check(self, out: Path) -> None:
        """Refuse a folder whose branches began with another model."""
        if not (out / FILE).exists():
            return
        tensors, about = RunFolder(out).read_tensors(FILE)
        # Compared as bytes, since the weights of a run that diverged are not equal to themselves.
        if about["rounds"] == self.rounds and save(tensors) == save(self._whole()):
            return
        known = f"the model that {about['run']} then had" if "run" in about else "another model,"
        raise UserError(
            f"the runs in {out} began with {known} after round {about['rounds']}, and not with the model that {self.run} now has "
            f"after round {self.rounds}; choose another --out, or branch from the same model as before"
        )

    def _whole(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        folder = RunFolder(self.run)
        if self.rounds in saved_rounds(self.run):
            return folder.read_tensors(snapshot_file("server", self.rounds))[0]
        if folder.rounds_of(model_file("server")) == self.rounds:
            return folder.read_tensors(model_file("server"))[0]
        problem, _ = reopen(self.record, as_begun=True)
        model: ModelState = at_checkpoint(folder, _algorithm(self.record), problem, self.record.config).model
        return problem.named(*model)


def start(text: str) -> Start:
    """The start that ``RUN@ROUND`` names; ``RUN`` alone is the last model there is."""
    path, at, rounds = text.rpartition("@")
    run = Path(path if at else text)
    record = load_record(run)
    there = there_rounds(run)
    if not there:
        raise UserError(
            f"{run} has neither a checkpoint nor a model yet, so that nothing can go on from it; let it run first"
        )
    if at and not (rounds.isdigit() and int(rounds) in there):
        known = ", ".join(map(str, there[:8])) + (", ..." if len(there) > 8 else "")
        raise UserError(
            f"{run} has no model after round '{rounds}'; it has those after {known} (runs keep more of them with --save-every N)"
        )
    return Start(record, run, int(rounds) if at else there[-1])


def there_rounds(run: Path) -> list[int]:
    """The rounds after which a run can be branched: where models were kept, at its checkpoint and at its end."""
    folder = RunFolder(run)
    ends = (folder.rounds_of(file) for file in (CHECKPOINT, model_file("server")))
    return sorted({*saved_rounds(run), *(rounds for rounds in ends if rounds is not None)})


def _algorithm(record: Record) -> Any:
    from fedflat.algorithms import algorithm

    return algorithm(record.config.algorithm)
