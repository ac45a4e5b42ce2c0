"""Results to look at: one run, or a comparison of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedflat import models
from fedflat.algorithms import algorithm, canonical
from fedflat.averaging import average_name
from fedflat.data import load
from fedflat.errors import UserError, one_of
from fedflat.experiment.config import Config
from fedflat.experiment.evaluation import PARTS, Evaluation, evaluate
from fedflat.experiment.measured import Measured, measured
from fedflat.experiment.network import network_of
from fedflat.experiment.observation.afterwards import Afterwards, afterwards
from fedflat.experiment.record import Record, load_record, saved_tensors
from fedflat.report.summary import Summary, rounds_to, spread, summarise

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Result:
    """A run: its history, its models, its figures."""

    def __init__(self, record: Record) -> None:
        self.record = record

    @classmethod
    def load(cls, folder: str | Path) -> Result:
        """The result of a run folder."""
        return cls(load_record(Path(folder)))

    @property
    def config(self) -> Config:
        """The run's complete config."""
        return self.record.config

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per evaluation."""
        return self.record.history

    @property
    def status(self) -> str:
        """finished, stopped, diverged or running."""
        return self.record.status

    @property
    def metric(self) -> str:
        """The metric that stands for the run."""
        first = next(iter(self.history[0]["test"].values())) if self.history else {}
        return next((name for name in first if name != "loss"), "loss")

    def summary(self, model: str = "server", metric: str | None = None) -> Summary:
        """A model's figures: last, mean of the last 100 rounds, best."""
        found = summarise(self.history, model, metric or self.metric)
        if found is None:
            raise one_of("evaluated model", model, self.record.evaluated)
        return found

    def frame(self) -> pd.DataFrame:
        """The history as a data frame, a row per evaluation."""
        import pandas as pd

        return pd.json_normalize(self.history)

    def state_dict(self, model: str = "server") -> dict[str, Tensor]:
        """The tensors of one of the run's models."""
        if self.record.folder is None:
            raise UserError("this run was made without a folder, so its models were not kept; give fedflat.run a folder (out=...)")
        if model not in self.record.evaluated:
            raise one_of("model of this run", model, self.record.evaluated)
        return saved_tensors(self.record.folder, model)

    def model(self, name: str = "server", *, merge: bool = False) -> nn.Module:
        """One of the run's models, ready to use; with ``merge``, adapters are added to the weights they belong to."""
        tensors = self.state_dict(name)
        data = load(self.config.data.name, self.config.data.folder)
        fresh = self.config.model_copy(update={"init": None, "init_head": "given"})
        built = network_of(fresh, data.input_shape, data.num_classes)
        built.load_state_dict(tensors)
        return (models.merge_adapters(built) if merge else built).eval()

    def evaluate(self, model: str = "server", on: Iterable[str] = tuple(PARTS), **more: Any) -> Evaluation:
        """How good one of the run's models is, and for whom: test set, classes, clients, domains, corruptions, after fine-tuning.

        ``more`` may be ``fine_tuning``, ``corruptions``, and the ``data``, ``network`` and ``task`` of the run where they are your own.
        """
        return evaluate(self.record, model, on, **more)

    def flatness(self, model: str | None = None, rounds: int | None = None, **more: Any) -> Measured:
        """One of the run's models, to be measured: ``result.flatness("wima").spectrum()``; by default the one that stands for the run.

        ``rounds`` names a model that was kept on the way. ``more`` may be ``device``, ``precision``, and the ``data``, ``network`` and
        ``task`` of the run where they are your own.
        """
        return measured(self.record, name=model, rounds=rounds, **more)

    def look(self, **wanted: Any) -> Afterwards:
        """The run over the rounds that it kept: ``result.look().clients()``, ``.gaps()``, ``.seen()``, ``.constants()``, ``.theory()``.

        ``wanted`` may be ``examples``, ``clients``, ``seed``, and ``data``, ``network`` and ``task`` of the run where they are your own.
        """
        return afterwards(self.record, **wanted)

    def plot(self, metric: str | None = None, over: str = "round") -> Figure:
        """The curve of every evaluated model."""
        return Comparison([self.record]).plot(metric, over)


@dataclass(frozen=True)
class Row:
    """One line of a comparison: an algorithm, and one of its models, over all seeds."""

    algorithm: str
    model: str
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """The algorithm with the one average that this model is, or with none: averages never change what is trained."""
        built = algorithm(self.algorithm)
        trained = canonical(replace(built, averages=()))
        if self.model == "server":
            return trained
        is_average = any(average_name(average) == self.model for average in built.averages)
        return f"{trained}+{self.model}" if is_average else f"{trained} ({self.model})"


class Comparison:
    """Several runs side by side."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        if not self.records:
            raise UserError("there is nothing to compare: no run was found")

    @property
    def metric(self) -> str:
        """The metric that stands for the runs."""
        return next((Result(r).metric for r in self.records if r.history), "accuracy")

    def rows(self) -> list[Row]:
        """Runs that differ in their seed alone, together; a row per evaluated model."""
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            settings = record.config.model_copy(update={"seed": 0, "algorithm": ""}).model_dump_json()
            groups.setdefault(f"{record.config.algorithm}\n{settings}", []).append(record)
        return [
            Row(key.split("\n")[0], model, tuple(records))
            for key, records in groups.items()
            for model in dict.fromkeys(name for record in records for name in record.evaluated)
        ]

    def table(self, targets: Sequence[float] = ()) -> list[dict[str, Any]]:
        """The comparison as plain rows: mean and spread over seeds of every reported figure, and rounds to each target."""
        return [self._line(row, targets) for row in self.rows()]

    def _line(self, row: Row, targets: Sequence[float]) -> dict[str, Any]:
        alive = [r for r in row.records if r.status != "diverged"]
        found = [s for s in (summarise(r.history, row.model, self.metric) for r in alive) if s]
        line: dict[str, Any] = {"algorithm": row.algorithm, "model": row.model, "label": row.label, "seeds": len(row.records)}
        line["diverged"] = len(row.records) - len(alive)
        if found:
            line |= {name: spread([getattr(s, name) for s in found]) for name in ("last", "mean_last", "best")}
            line["mean_count"] = found[0].mean_count
        for target in targets:
            reached = [n for n in (rounds_to(r.history, row.model, self.metric, target) for r in alive) if n is not None]
            line[f"rounds to {target:g}"] = (spread(reached).mean if reached else None, len(reached), len(row.records))
        ends = [r.history[-1] for r in row.records if r.history]
        for cost in ("backward_passes", "bytes_up", "bytes_down", "samples"):
            line[cost] = spread([float(end[cost]) for end in ends]).mean if ends else None
        line["seconds"] = spread([r.seconds for r in row.records]).mean
        return line

    def frame(self) -> pd.DataFrame:
        """All histories in one data frame, with algorithm and seed."""
        import pandas as pd

        frames = [Result(r).frame().assign(algorithm=r.config.algorithm, seed=r.config.seed) for r in self.records]
        return pd.concat(frames, ignore_index=True)

    def plot(self, metric: str | None = None, over: str = "round") -> Figure:
        """Curves of all rows: the mean over seeds, and a band of one standard deviation."""
        from fedflat.report.curves import curves

        return curves([(row.label, [r.history for r in row.records], row.model) for row in self.rows()], metric or self.metric, over)
