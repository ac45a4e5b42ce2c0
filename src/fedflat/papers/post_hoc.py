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
from fedflat.experiment.store.files import write_atomically
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
SPECTRUM = "spectrum, {model}"
"""Name of the measurement of a model's Hessian eigenvalues."""
EVERY_CLIENT = 1_000_000
"""A number of clients that no dataset exceeds."""
SMALL_SAMPLE = {"clients": 10, "examples": 20}
"""At small scale: number of clients whose features are measured, and of examples for a client's curvature."""


class ModelQuery(NamedTuple):
    """A statistic, and the model of a run to measure it on."""

    statistic: ModelStatistic
    model: str


def measure(record: Record, queries: Iterable[ModelQuery], small: bool = False) -> dict[ModelQuery, float | str]:
    """Measure statistics on the models of a run.

    Args:
        record: the finished run.
        queries: the statistics and the models to measure them on.
        small: whether to use few examples and generated corruptions.

    Returns:
        For each query, the measured value, or a text with the reason why it could not be measured.
    """
    measurements = _ModelMeasurements(record, small)
    values: dict[ModelQuery, float | str] = {}
    # Queries for many eigenvalues come first, because queries for fewer can reuse theirs.
    for query in sorted(queries, key=_eigenvalues_needed, reverse=True):
        try:
            values[query] = measurements.value(query)
        except UserError as reason:
            values[query] = str(reason)
    return values


def _eigenvalues_needed(query: ModelQuery) -> int:
    return query.statistic.needed if isinstance(query.statistic, Eigenvalue) else 0


def measured_spectra(record: Record) -> dict[str, dict[str, Any]]:
    """Return the Hessian eigenvalues that ``measure`` has computed, with the training loss at which, by model.

    Eigenvalues of two models can only be compared if their losses are known.
    """
    names = ("loss", "gradient_norm", "eigenvalues", "converged", "examples")
    prefix = SPECTRUM.format(model="")
    return {
        key.removeprefix(prefix): {name: values[name] for name in names}
        for key, values in _ModelMeasurements(record).stored.items()
        if key.startswith(prefix)
    }


class _ModelMeasurements:
    """Statistics measured on the models of a run; measurements are stored in its folder and not repeated."""

    def __init__(self, record: Record, small: bool = False) -> None:
        """Read earlier measurements of a run; with ``small``, new ones use few examples and generated corruptions."""
        self.record, self.small = record, small
        self._file: Path | None = record.folder.path / FILE if record.folder else None
        self.stored: dict[str, Any] = {}
        if self._file is not None and self._file.exists():
            self.stored = json.loads(self._file.read_text(encoding="utf-8"))

    def value(self, query: ModelQuery) -> float:
        """Return the value of a statistic on a model; it is measured only if no stored measurement has it."""
        statistic, model = query
        match statistic:
            case Eigenvalue():
                values = self._spectrum(model, statistic.needed)["eigenvalues"]
                # The largest eigenvalue, or its ratio to the eigenvalue of rank ``over``.
                return float(values[0] if statistic.over is None else values[0] / values[statistic.over - 1])
            case ClientEigenvalue():
                return float(max(self._cached("curvature of clients", self._client_curvature)["lambda_max"].values()))
            case Corrupted(severity=severity):
                name = f"severity {severity}, {model}"
                return float(self._cached(name, lambda: self._evaluate_corrupted(severity, model))["mean"])
            case OnClients():
                return float(self._cached(f"clients, {model}", lambda: self._evaluate("clients", model))["mean"])
            case Features():
                return fmean(self._cached(f"features, {model}", lambda: self._features(model)).values())
            case DomainMetric(part=part):
                domains = self._cached(f"domains, {model}", lambda: self._evaluate("domains", model))
                if part not in domains:
                    raise UserError(f"the test set has no {part} domain")
                return float(domains[part][domains["metric"]])
        raise UserError(f"{statistic.text} cannot be measured on a model")

    def _cached(
        self, name: str, measure: Callable[[], dict[str, Any]], suffices: Callable[[dict[str, Any]], bool] = bool
    ) -> dict[str, Any]:
        """Return a stored measurement, or call ``measure`` and store its result.

        Args:
            name: name of the measurement.
            measure: makes the measurement.
            suffices: whether a stored measurement can be used; by default, any that is not empty.
        """
        if not suffices(self.stored.get(name, {})):
            self.stored[name] = measure()
            if self._file is not None:
                write_atomically(self._file, json.dumps(self.stored, indent=1) + "\n")
        return dict(self.stored[name])

    def _open(self, model: str) -> RunModel:
        return open_model(self.record, name=model, device=self.record.config.engine.device)

    def _spectrum(self, model: str, needed: int) -> dict[str, Any]:
        """Return at least ``needed`` of the largest Hessian eigenvalues of a model's training loss."""

        def measure_spectrum() -> dict[str, Any]:
            """Compute the eigenvalues on all training examples, or on few at small scale."""
            (objective,) = self._open(model).objectives(examples=EXAMPLES if self.small else None)
            document = spectrum_of(objective, needed, trace_draws=0).document()
            return {name: value for name, value in document.items() if name not in ("trace", "density")}

        def suffices(stored: dict[str, Any]) -> bool:
            return len(stored.get("eigenvalues", ())) >= needed

        return self._cached(SPECTRUM.format(model=model), measure_spectrum, suffices)

    def _client_curvature(self) -> dict[str, Any]:
        """Train the next round's cohort from the final model; measure each local model's curvature on its own data."""
        server = self._open("server")
        replay = replay_after(server)
        cohort = replay.clients(None)  # None: the clients that would be sampled
        local_models = replay.local_models(cohort, replay.train(cohort))
        return self._sample(server).local_curvature(local_models, cohort)

    def _features(self, model: str) -> dict[str, Any]:
        """Compute, by client, the mean norm ||f(x)|| of the model's output over the client's examples x."""
        opened = self._open(model)
        return self._sample(opened).features(opened.state)

    def _sample(self, model: RunModel) -> FixedSample:
        """Return a sample of examples and every client, or few of both at small scale."""
        settings = FlatnessSettings(**SMALL_SAMPLE) if self.small else FlatnessSettings(clients=EVERY_CLIENT)
        return FixedSample(model.problem, model.partition, settings)

    def _evaluate(self, part: str, model: str, **options: Any) -> dict[str, Any]:
        """Evaluate a model; return its metrics and, as ``metric``, the name of the primary one.

        Args:
            part: what to evaluate on, as in ``fedflat evaluate --on``: ``clients``, ``domains`` or ``corruptions``.
            model: name of the model.
            options: further arguments of ``evaluate``.
        """
        evaluation: Evaluation = evaluate(self.record, model, (part,), **options)
        return {"metric": evaluation.metric, **evaluation[part]}

    def _evaluate_corrupted(self, severity: int, model: str) -> dict[str, Any]:
        """Evaluate a model on corrupted test images: published ones, or generated ones at small scale."""
        data = self.record.config.data
        if self.small:
            test = self._open(model).problem.data.test
            first_examples = test.take(torch.arange(min(EXAMPLES, len(test))))
            generated = corrupted(first_examples, severity)
            corruptions = {name: {severity: examples} for name, examples in generated.items()}
        else:
            published = load_corruptions(data.dataset, data.dir)
            corruptions = {name: {severity: by_severity[severity]} for name, by_severity in published.items()}
        scores = self._evaluate("corruptions", model, corruptions=corruptions)
        # The paper averages over all 19 corruptions, not over the usual 15.
        return {**scores, "mean": fmean(each[scores["metric"]] for each in scores["each"].values())}
