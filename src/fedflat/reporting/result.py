"""The result of a run: its history, models and measurements."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedflat import models
from fedflat.data import Dataset
from fedflat.display import html_table, shown_metric, with_unit
from fedflat.engines.problem.task import Task, is_error
from fedflat.engines.problem.token_model import adapt
from fedflat.errors import UserError, one_of
from fedflat.experiment.analysis.evaluation import Corruptions, Evaluation, evaluate
from fedflat.experiment.analysis.fine_tuning import FineTuning
from fedflat.experiment.analysis.post_hoc import PostHoc, post_hoc
from fedflat.experiment.analysis.reopen import full_name, reopen, require_model, saved_tensors, state_of
from fedflat.experiment.analysis.run_model import RunModel, open_model, with_statistics
from fedflat.experiment.config import Config
from fedflat.experiment.make_config import as_path
from fedflat.experiment.setup.problem import build_network, is_user_supplied, load_data
from fedflat.experiment.setup.weights import load_tensors, require_finite
from fedflat.experiment.store.provenance import input_metadata, recorded_metadata
from fedflat.experiment.store.run_folder import Record, load_record, model_file
from fedflat.reporting.comparison import Comparison
from fedflat.reporting.tables.summary import Summary, summarise

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Result:
    """A run: its history, models and measurements.

    A run has the trained model, ``server``, and averages of it over rounds, such as ``wima(window=50)``. The results of
    one of them, the primary model, are reported as those of the run. Models are compared by the primary metric
    (``metric``).
    """

    def __init__(self, record: Record) -> None:
        self.record = record

    def __repr__(self) -> str:
        summaries = [f"{name} {shown_metric(summary.last, self.metric)}" for name, summary in self._summaries().items()]
        return f"Result({self._title()}; last {with_unit(self.metric)}: {', '.join(summaries) or 'none'})"

    def _repr_html_(self) -> str:
        """Return an HTML table of the evaluated models, which notebooks show."""
        best = "at_best_validation" if self.config.data.validation else "best"
        columns = ("model", f"last {with_unit(self.metric)}", "mean of the last evaluations", best.replace("_", " "))
        rows = []
        for name, summary in self._summaries().items():
            last, mean, chosen = (
                shown_metric(getattr(summary, key), self.metric) for key in ("last", "mean_last", best)
            )
            rows.append((name, last, f"{mean} (n={summary.mean_count})", chosen))
        return html_table(self._title(), columns, rows)

    def _title(self) -> str:
        """Name the algorithm, dataset and seed, and state how far the run got."""
        config = self.config
        rounds = f"{self.status} after {self.record.rounds} of {config.training.rounds} rounds"
        return f"{config.algorithm} on {config.data.dataset}, seed {config.seed}: {rounds}"

    def _summaries(self) -> dict[str, Summary]:
        """Return the summaries of the primary metric by model; models without finite values are left out."""
        names = self.record.evaluated
        summaries = {name: summarise(self.history, name, self.metric, self.lower_is_better) for name in names}
        return {name: summary for name, summary in summaries.items() if summary is not None}

    @classmethod
    def load(cls, folder: str | Path) -> Result:
        """Load the result of a run from its folder."""
        return cls(load_record(as_path("folder", folder)))

    @property
    def config(self) -> Config:
        """The run's complete config."""
        return self.record.config

    @property
    def history(self) -> list[dict[str, Any]]:
        """The run's evaluations in order: one dictionary each, with round, metrics and costs."""
        return self.record.history

    @property
    def status(self) -> str:
        """State of the run: ``running``, ``paused``, ``finished``, ``stopped`` or ``diverged``."""
        return self.record.status

    @property
    def metric(self) -> str:
        """Name of the primary metric, e.g. ``accuracy``."""
        return self.record.metric

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of the primary metric are better, as for ``rmse``."""
        return self.record.lower_is_better

    def summary(self, average: str = "server", metric: str | None = None) -> Summary:
        """Summarise a model's metric on the test set: last value, mean of the last 10 % of evaluations, and best.

        Args:
            average: an evaluated average, e.g. ``wima``; default: ``server``, the server model.
            metric: name of a metric; default: the primary one.
        """
        name = full_name("evaluated model", average, self.record.evaluated)
        metric, metrics = metric or self.metric, self.history[-1]["test"][name]
        if metric not in metrics:
            raise one_of("metric", metric, metrics)
        is_lower_better = self.lower_is_better if metric == self.metric else is_error(metric)
        summary = summarise(self.history, name, metric, is_lower_better)
        if summary is None:
            raise UserError(f"{metric} of {name} was never finite in this run")
        return summary

    def to_pandas(self) -> pd.DataFrame:
        """Return the history as a data frame, one row per evaluation."""
        import pandas as pd

        return pd.json_normalize(self.history)

    def state_dict(self, average: str = "server", *, rounds: int | None = None) -> dict[str, Tensor]:
        """Return the parameters and buffers of a model by name, as a torch state dict.

        Args:
            average: ``server``, or an average of the run, e.g. ``wima``.
            rounds: select a model saved after this round; default: the final model.
        """
        model = require_model(self.record, average)
        if self.record.folder is not None or rounds is not None:
            return saved_tensors(self.record, model, rounds)
        problem, _ = reopen(self.record)  # a run without a folder has its models in memory
        tensors = problem.state_dict(*state_of(self.record, model, problem))
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def model(
        self,
        average: str = "server",
        *,
        rounds: int | None = None,
        merge: bool = False,
        dataset: Dataset | None = None,
        network: nn.Module | None = None,
    ) -> nn.Module:
        """Return a model of the run as a module in evaluation mode.

        If clients kept their own BatchNorm statistics (SiLoBN), those of the module are estimated on the training data.

        Args:
            average: ``server``, or an average of the run, e.g. ``wima``.
            rounds: select a model saved after this round.
            merge: whether to merge low-rank adapters (LoRA) into the weights.
            dataset, network: needed if the run used a custom one and was made in another process.
        """
        if self.record.folder is not None:
            self.record.folder.load_plugins()
        name = require_model(self.record, average)
        tensors = self._tensors(name, rounds, dataset, network)
        network = network or self.record.user_objects.get("model")
        if network is None and is_user_supplied(self.config.model):
            raise UserError(
                f"this run used a user-supplied model ({self.config.model}); pass it again: result.model(network=...)"
            )
        # The tensors below replace all weights, so the run's initial weights are not loaded.
        config = self.config.changed(init=None, init_head="given")
        if network is None:
            data = self._dataset(dataset)
            network = build_network(config, data.input_shape, data.num_outputs)
        else:
            network = build_network(config, (), 0, network)  # input shape and classes are not needed for a given module
        load_tensors(network, self.config.model, tensors, f"model {name} of this run")
        return adapt(models.merge_adapters(network) if merge else network).eval()

    def export(
        self,
        path: str | Path,
        average: str = "server",
        *,
        format: str | None = None,
        rounds: int | None = None,
        dataset: Dataset | None = None,
        network: nn.Module | None = None,
    ) -> Path:
        """Write a model to a file that other tools can read.

        Args:
            path: output file; for ``peft``, a folder.
            average: ``server``, or an average of the run, e.g. ``wima``.
            format: ``torch``, ``safetensors``, ``onnx`` or ``peft`` (the adapter); default: from the file extension.
            rounds: select a model saved after this round.
            dataset, network: needed if the run used a custom one and was made in another process.
        """
        from fedflat.experiment.store.export import format_of, write_adapter, write_onnx, write_state

        path = as_path("path", path, "model.pt")
        kind, model = format_of(path, format), require_model(self.record, average)
        metadata: dict[str, Any] = {"model": self.config.model, "name": model, "algorithm": self.config.algorithm}
        metadata |= {"data": self.config.data.dataset, "rounds": self._rounds_of(model) if rounds is None else rounds}
        folder = self.record.folder  # its statistics are those of training; the dataset may have changed since
        metadata |= recorded_metadata(folder) if folder else input_metadata(self._dataset(dataset))
        if kind == "peft":
            write_adapter(path, self.model(model, rounds=rounds, dataset=dataset, network=network))
        elif kind == "onnx":
            module = self.model(model, rounds=rounds, dataset=dataset, network=network)
            write_onnx(path, module, self._dataset(dataset), metadata)
        else:
            tensors = self._tensors(model, rounds, dataset, network)
            require_finite(tensors, f"the model {model} of this run")
            write_state(path, tensors, kind, metadata)
        return path

    def _tensors(
        self, name: str, rounds: int | None, dataset: Dataset | None, network: nn.Module | None
    ) -> dict[str, Tensor]:
        """Return the tensors of the model ``name``, final or saved after round ``rounds``, by their names.

        If clients kept their own BatchNorm statistics (SiLoBN), those of the model are estimated on the training data,
        for which a user-supplied ``dataset`` or ``network`` is needed if the run was made in another process.
        """
        if self.config.training.statistics == "averaged":  # saved with the server's model
            return self.state_dict(name, rounds=rounds)
        problem, partition = reopen(self.record, dataset=dataset, network=network, method="export")
        state = state_of(self.record, name, problem, rounds)
        return problem.state_dict(*with_statistics(problem, state, partition.trained_on))

    def _rounds_of(self, model: str) -> int:
        """Return the number of rounds after which the final ``model`` was saved; it need not have been evaluated."""
        written = self.record.folder.rounds_in_file(model_file(model)) if self.record.folder else None
        return self.record.rounds if written is None else written

    def _dataset(self, dataset: Dataset | None) -> Dataset:
        """Return the run's dataset: the given one, the user-supplied one, or the one that the config names."""
        dataset, name = dataset or self.record.user_objects.get("data"), self.config.data.dataset
        if dataset is None and is_user_supplied(name):
            raise UserError(f"this run used a user-supplied dataset ({name}); pass it again: dataset=...")
        return load_data(self.config, dataset)

    def evaluate(
        self,
        average: str = "server",
        on: str | Iterable[str] | None = None,
        *,
        rounds: int | None = None,
        fine_tuning: FineTuning | None = None,
        corruptions: Corruptions | None = None,
        dataset: Dataset | None = None,
        network: nn.Module | None = None,
        task: Task | None = None,
    ) -> Evaluation:
        """Evaluate a model on the test set, per class, client and domain, under corruptions, and after fine-tuning.

        Args:
            average: ``server``, or an average of the run, e.g. ``wima``.
            on: parts to evaluate, e.g. ``classes`` or ``clients``; default: all that apply.
            rounds: select a model saved after this round; default: the final model.
            fine_tuning: settings of local fine-tuning; default: those of ``FineTuning()``.
            corruptions: corrupted test sets by corruption and severity; default: the dataset's own.
            dataset, network, task: needed if the run used custom ones and was made in another process.
        """
        return evaluate(
            self.record,
            average,
            on,
            rounds=rounds,
            fine_tuning=fine_tuning,
            corruptions=corruptions,
            dataset=dataset,
            network=network,
            task=task,
        )

    def flatness(
        self,
        average: str | None = None,
        rounds: int | None = None,
        *,
        device: str | None = None,
        precision: str | None = None,
        dataset: Dataset | None = None,
        network: nn.Module | None = None,
        task: Task | None = None,
    ) -> RunModel:
        """Open a model for flatness measurements, e.g. ``result.flatness("wima").spectrum()``.

        Args:
            average: ``server``, or an average of the run; default: the average listed last in the
                algorithm, or the server model if there is none.
            rounds: select a model saved after this round.
            device: ``auto`` (default), ``cpu`` or ``cuda``.
            precision: ``float32``, ``tf32`` or ``float64``; default: float64 for float64 runs, else float32.
            dataset, network, task: needed if the run used custom ones and was made in another process.
        """
        user_objects: dict[str, Any] = {"dataset": dataset, "network": network, "task": task}
        return open_model(self.record, name=average, rounds=rounds, device=device, precision=precision, **user_objects)

    def post_hoc(
        self,
        *,
        examples: int = 500,
        clients: int = 10,
        seed: int = 0,
        dataset: Dataset | None = None,
        network: nn.Module | None = None,
        task: Task | None = None,
    ) -> PostHoc:
        """Return an object whose methods, such as ``clients()`` and ``gaps()``, measure the run's saved models.

        Args:
            examples: number of training examples to measure on.
            clients: number of clients to measure individually.
            seed: seed of both samples.
            dataset, network, task: needed if the run used custom ones and was made in another process.
        """
        settings: dict[str, Any] = {"examples": examples, "clients": clients, "seed": seed}
        return post_hoc(self.record, dataset=dataset, network=network, task=task, **settings)

    def plot(self, metric: str | None = None, over: str = "round") -> Figure:
        """Plot a metric (default: the primary one) of every evaluated model over rounds or a cost such as bytes."""
        return Comparison([self.record]).plot(metric, over)
