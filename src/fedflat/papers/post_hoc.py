"""Numbers that are measured on the models of a run once it is over: curvature, corruptions, the clients' data, domains.

What was measured is kept in the run's folder, so that neither another cell nor another start measures it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from fedflat.data import Examples, load_corruptions
from fedflat.errors import UserError
from fedflat.experiment.analysis.evaluation import Evaluation, evaluate
from fedflat.experiment.analysis.fixed_sample import Look
from fedflat.experiment.analysis.local_models import replay_at
from fedflat.experiment.analysis.measured import Measured, measured
from fedflat.experiment.config import FlatnessSettings
from fedflat.experiment.store.atomic_files import write_whole
from fedflat.experiment.store.record import Record
from fedflat.flatness import spectrum_of
from fedflat.papers.numbers import ClientEigenvalue, Corrupted, Domains, Eigenvalue, Features, OfModels, OnClients
from fedflat.papers.small import EXAMPLES, corrupted

FILE = "measured.json"
"""In the folder of a run: everything that was measured on its models, by name."""
EVERY_CLIENT = 1_000_000


class Asked(NamedTuple):
    """A number, and the model of the run that it is about."""

    number: OfModels
    model: str


def measure(record: Record, asked: Iterable[Asked], small: bool = False) -> dict[Asked, float | str]:
    """The numbers that are asked for, or a sentence that says why there is none."""
    models = _Models(record, small)
    found: dict[Asked, float | str] = {}
    for one in sorted(
        asked, key=_needed, reverse=True
    ):  # what needs more eigenvalues first, so that the rest finds them
        try:
            found[one] = models.number(one)
        except UserError as reason:
            found[one] = str(reason)
    return found


def _needed(one: Asked) -> int:
    return one.number.needed if isinstance(one.number, Eigenvalue) else 0


class _Models:
    """The models of a run, with what is known of them already."""

    def __init__(self, record: Record, small: bool) -> None:
        self.record, self.small = record, small
        path = self._file
        self.known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}

    @property
    def _file(self) -> Path | None:
        return self.record.folder.path / FILE if self.record.folder else None

    def number(self, asked: Asked) -> float:
        """One number, measured now or before."""
        number, model = asked
        match number:
            case Eigenvalue():
                values = self._spectrum(model, number.needed)["eigenvalues"]
                return float(values[0] if number.over is None else values[0] / values[number.over - 1])
            case ClientEigenvalue():
                return float(max(self._kept("curvature of clients", self._clients)["lambda_max"].values()))
            case Corrupted():
                return float(
                    self._kept(f"severity {number.severity}, {model}", lambda: self._corrupted(number.severity, model))[
                        "mean"
                    ]
                )
            case OnClients():
                return float(self._kept(f"clients, {model}", lambda: self._on("clients", model))["mean"])
            case Features():
                return fmean(self._kept(f"features, {model}", lambda: self._features(model)).values())
            case Domains():
                return self._domains(self._kept(f"domains, {model}", lambda: self._on("domains", model)), number.part)
        raise UserError(f"{number.text} is not measured on models")

    def _kept(
        self, name: str, make: Callable[[], dict[str, Any]], enough: Callable[[dict[str, Any]], bool] = bool
    ) -> dict[str, Any]:
        """What is known under a name, or is measured now and kept."""
        if not enough(self.known.get(name, {})):
            self.known[name] = make()
            if self._file is not None:
                write_whole(self._file, json.dumps(self.known, indent=1) + "\n")
        return dict(self.known[name])

    def _measured(self, model: str) -> Measured:
        return measured(self.record, name=model, device=self.record.config.engine.device)

    def _spectrum(self, model: str, needed: int) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            (objective,) = self._measured(model).objectives(examples=EXAMPLES if self.small else None)
            found = spectrum_of(objective, needed, trace_draws=0)
            return {name: value for name, value in found.document().items() if name not in ("trace", "density")}

        return self._kept(f"spectrum, {model}", make, lambda known: len(known.get("eigenvalues", ())) >= needed)

    def _clients(self) -> dict[str, Any]:
        """The clients of the next round train once more, and their models are looked at on their own data."""
        server = self._measured("server")
        replay = replay_at(server)
        members = replay.members(None)
        return Look(server.problem, server.partition, FlatnessSettings()).local_curvature(
            replay.local_models(members, replay.train(members)), members
        )

    def _features(self, model: str) -> dict[str, Any]:
        """The mean of ||f(x)|| over each client's data."""
        found = self._measured(model)
        return Look(found.problem, found.partition, FlatnessSettings(clients=EVERY_CLIENT)).features(found.state)

    def _on(self, part: str, model: str, **options: Any) -> dict[str, Any]:
        found: Evaluation = evaluate(self.record, model, (part,), **options)
        return {"metric": found.metric, **found[part]}

    def _corrupted(self, severity: int, model: str) -> dict[str, Any]:
        data = self.record.config.data
        if self.small:
            test = self._measured(model).problem.data.test
            images = corrupted(test.take(torch.arange(min(EXAMPLES, len(test)))), severity)
        else:
            images = {name: of[severity] for name, of in load_corruptions(data.dataset, data.dir).items()}
        with_severity: dict[str, dict[int, Examples]] = {
            name: {severity: examples} for name, examples in images.items()
        }
        found = self._on("corruptions", model, corruptions=with_severity)
        return {
            **found,
            "mean": fmean(one[found["metric"]] for one in found["each"].values()),
        }  # of the paper's 19, not of the usual 15

    def _domains(self, found: dict[str, Any], part: str) -> float:
        if part not in found:
            raise UserError(f"no domain of the test set is {part}")
        return float(found[part][found["metric"]])
