"""Statistics measured on the models of finished runs: curvature, corruptions, clients' data, domains.

Results are stored in the run's folder, so that nothing is measured twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from fedflat.data import load_corruptions
from fedflat.errors import UserError
from fedflat.experiment.analysis.evaluation import Evaluation, evaluate
from fedflat.experiment.analysis.observer import FixedSample
from fedflat.experiment.analysis.run_model import RunModel, open_model, replay_after
from fedflat.experiment.config import FlatnessSettings
from fedflat.experiment.store.files import write_whole
from fedflat.experiment.store.run_folder import Record
from fedflat.flatness import spectrum_of
from fedflat.papers.numbers import (
    ClientEigenvalue,
    Corrupted,
    DomainMetric,
    Eigenvalue,
    Features,
    ModelStatistic,
    OnClients,
)
from fedflat.papers.small import EXAMPLES, corrupted

FILE = "measured.json"
"""In the folder of a run: all measurements of its models, by name."""
EVERY_CLIENT = 1_000_000


class ModelQuery(NamedTuple):
    """A statistic, and the model of a run to measure it on."""

    statistic: ModelStatistic
    model: str


def measure(record: Record, queries: Iterable[ModelQuery], small: bool = False) -> dict[ModelQuery, float | str]:
    """Measure statistics on the models of a run; where that is impossible, the value is the reason.

    Args:
        record: the finished run.
        queries: what to measure.
        small: whether to use few examples and generated corruptions.
    """
    models = _RunModels(record, small)
    values: dict[ModelQuery, float | str] = {}
    # Most eigenvalues first: the other queries can then reuse them.
    for query in sorted(queries, key=_eigenvalues_needed, reverse=True):
        try:
            values[query] = models.value(query)
        except UserError as reason:
            values[query] = str(reason)
    return values


def _eigenvalues_needed(query: ModelQuery) -> int:
    return query.statistic.needed if isinstance(query.statistic, Eigenvalue) else 0


class _RunModels:
    """The models of a run, with earlier measurements."""

    def __init__(self, record: Record, small: bool) -> None:
        self.record, self.small = record, small
        self._file: Path | None = record.folder.path / FILE if record.folder else None
        self.stored: dict[str, Any] = {}
        if self._file is not None and self._file.exists():
            self.stored = json.loads(self._file.read_text(encoding="utf-8"))

    def value(self, query: ModelQuery) -> float:
        """Value of a statistic on a model; measured at most once, then read from the run's stored measurements."""
        statistic, model = query
        match statistic:
            case Eigenvalue():
                values = self._spectrum(model, statistic.needed)["eigenvalues"]
                return float(values[0] if statistic.over is None else values[0] / values[statistic.over - 1])
            case ClientEigenvalue():
                return float(max(self._cached("curvature of clients", self._clients)["lambda_max"].values()))
            case Corrupted(severity=severity):
                name = f"severity {severity}, {model}"
                return float(self._cached(name, lambda: self._corrupted(severity, model))["mean"])
            case OnClients():
                return float(self._cached(f"clients, {model}", lambda: self._evaluated("clients", model))["mean"])
            case Features():
                return fmean(self._cached(f"features, {model}", lambda: self._features(model)).values())
            case DomainMetric(part=part):
                domains = self._cached(f"domains, {model}", lambda: self._evaluated("domains", model))
                if part not in domains:
                    raise UserError(f"the test set has no {part} domain")
                return float(domains[part][domains["metric"]])
        raise UserError(f"{statistic.text} cannot be measured on a model")

    def _cached(
        self, name: str, make: Callable[[], dict[str, Any]], enough: Callable[[dict[str, Any]], bool] = bool
    ) -> dict[str, Any]:
        """The stored measurement if it is ``enough``, otherwise a new one."""
        if not enough(self.stored.get(name, {})):
            self.stored[name] = make()
            if self._file is not None:
                write_whole(self._file, json.dumps(self.stored, indent=1) + "\n")
        return dict(self.stored[name])

    def _measured(self, model: str) -> RunModel:
        return open_model(self.record, name=model, device=self.record.config.engine.device)

    def _spectrum(self, model: str, needed: int) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            (objective,) = self._measured(model).objectives(examples=EXAMPLES if self.small else None)
            document = spectrum_of(objective, needed, trace_draws=0).document()
            return {name: value for name, value in document.items() if name not in ("trace", "density")}

        return self._cached(f"spectrum, {model}", make, lambda known: len(known.get("eigenvalues", ())) >= needed)

    def _clients(self) -> dict[str, Any]:
        """Curvature of the next cohort's local models, each on its client's data."""
        server = self._measured("server")
        replay = replay_after(server)
        members = replay.clients(None)
        local_models = replay.local_models(members, replay.train(members))
        return FixedSample(server.problem, server.partition, FlatnessSettings()).local_curvature(local_models, members)

    def _features(self, model: str) -> dict[str, Any]:
        """The mean of ||f(x)|| over each client's data."""
        opened = self._measured(model)
        return FixedSample(opened.problem, opened.partition, FlatnessSettings(clients=EVERY_CLIENT)).features(
            opened.state
        )

    def _evaluated(self, part: str, model: str, **options: Any) -> dict[str, Any]:
        evaluation: Evaluation = evaluate(self.record, model, (part,), **options)
        return {"metric": evaluation.metric, **evaluation[part]}

    def _corrupted(self, severity: int, model: str) -> dict[str, Any]:
        data = self.record.config.data
        if self.small:
            test = self._measured(model).problem.data.test
            images = corrupted(test.take(torch.arange(min(EXAMPLES, len(test)))), severity)
        else:
            images = {
                name: by_severity[severity] for name, by_severity in load_corruptions(data.dataset, data.dir).items()
            }
        corruptions = {name: {severity: examples} for name, examples in images.items()}
        scores = self._evaluated("corruptions", model, corruptions=corruptions)
        # The paper averages over all 19 corruptions, not over the usual 15.
        return {**scores, "mean": fmean(each[scores["metric"]] for each in scores["each"].values())}
