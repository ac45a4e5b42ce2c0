"""Evaluation of a run's model: on the test set, per class, per client, per domain and under corruptions.

Nothing is retrained, except when clients fine-tune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.data import (
    CORRUPTIONS,
    DATASETS,
    Dataset,
    Examples,
    Partition,
    canonical_partition,
    data_dir,
    load_corruptions,
)
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Task, Totals, finite_or_none, lower_is_better
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.analysis.fine_tuning import FineTuner, FineTuning
from fedflat.experiment.analysis.reopen import reopen, require_model, state_of
from fedflat.experiment.analysis.scoring import Scorer, Scores, scores_of, spread_over
from fedflat.experiment.config import Config
from fedflat.experiment.store.run_folder import Record, client_statistics

if TYPE_CHECKING:
    import pandas as pd

PARTS = {
    "test": "the whole test set",
    "classes": "each class of the test set",
    "longtail": "head, middle and tail classes of a long-tailed partition",
    "clients": "each training client, on its own training data",
    "unseen": "each held-out client, and the participation gap",
    "domains": "each domain, writer or other group of the test set",
    "corruptions": "the test set under each corruption",
    "fine-tuned": "training clients before and after local fine-tuning, on the rest of their data",
    "fine-tuned-unseen": "held-out clients before and after local fine-tuning",
}
"""The parts of an evaluation by name, with what each is measured on."""
Corruptions = Mapping[str, Mapping[int, Examples]]
"""Corrupted test sets, by corruption and severity."""
Part = dict[str, Any]
"""Metrics by name; ``each`` contains the metrics of every client, class or domain, by its name."""


class NotAvailable(Exception):
    """Raised if a part of an evaluation does not apply to a run; the message says why."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model on several parts, such as the test set or the clients, and why parts are missing."""

    model: str
    """Name of the evaluated model: ``server`` or an average."""
    metric: str
    """Name of the primary metric, e.g. ``accuracy``."""
    parts: dict[str, Part]
    """Metrics by part of the evaluation, e.g. ``test`` or ``clients``."""
    missing: dict[str, str]
    """For each requested part that does not apply to the run, the reason."""

    def __getitem__(self, part: str) -> Part:
        """The metrics of one part."""
        if part in self.parts:
            return self.parts[part]
        if part in self.missing:
            raise UserError(f"part '{part}' is not available: {self.missing[part]}")
        raise one_of("part of this evaluation", part, self.parts)

    def document(self) -> dict[str, Any]:
        """Return all values as JSON-compatible types."""
        return {"model": self.model, "metric": self.metric, "on": _plain(self.parts), "missing": self.missing}

    def to_pandas(self) -> pd.DataFrame:
        """Return all values as a data frame, one row per value.

        The columns are ``on`` (the part), ``name`` (the client, class or domain; empty for the whole part), ``figure``
        (the metric) and ``value``.
        """
        import pandas as pd

        rows = []
        for part, values in self.parts.items():
            rows += [(part, "", name, value) for name, value in values.items() if not isinstance(value, dict)]
            # "each" has the metrics of every client, class or domain; other dictionaries pool several of them.
            pooled = {name: value for name, value in values.items() if isinstance(value, dict) and name != "each"}
            for member, scores in {**pooled, **values.get("each", {})}.items():
                rows += [(part, member, name, value) for name, value in scores.items()]
        return pd.DataFrame(rows, columns=["on", "name", "figure", "value"])


def evaluate(
    record: Record,
    average: str = "server",
    on: str | Iterable[str] | None = None,
    *,
    rounds: int | None = None,
    fine_tuning: FineTuning | None = None,
    corruptions: Corruptions | None = None,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    task: Task | None = None,
    progress: Callable[[str], None] = lambda part: None,
) -> Evaluation:
    """Evaluate a model of a run.

    Args:
        record: the run.
        average: ``server``, or an average of the run, e.g. ``wima``.
        on: parts to evaluate (see ``PARTS``); default: all that apply.
        rounds: select a model saved after this round; default: the final model.
        fine_tuning: settings of local fine-tuning; default: those of ``FineTuning()``.
        corruptions: corrupted test sets by corruption and severity; default: the dataset's own.
        dataset, network, task: user-supplied dataset, model and task; not needed if the run was made in this process.
        progress: called with the name of each part before it is computed.
    """
    if on is None:
        on = PARTS
    names = [on] if isinstance(on, str) else list(dict.fromkeys(on))
    if not names:
        raise UserError(f"on={on!r} selects nothing to evaluate; expected parts such as {', '.join(list(PARTS)[:3])}")
    for name in names:
        if name not in PARTS:
            raise one_of("evaluation part", name, PARTS)
    model = require_model(record, average)
    problem, partition = reopen(record, dataset=dataset, network=network, task=task)
    state = state_of(record, model, problem, rounds)
    has_statistics = record.config.training.statistics == "own" and problem.buffer_layout.names
    is_final = rounds in (None, record.rounds)
    statistics = {} if not has_statistics else client_statistics(record) if is_final else None
    evaluator = _Evaluator(
        record.config, problem, partition, state, fine_tuning or FineTuning(), corruptions, statistics
    )
    parts, missing = {}, {}
    with torch.random.fork_rng(devices=[]):  # fine-tuning reseeds the caller's generator
        for name in names:
            progress(name)
            compute_part = getattr(evaluator, name.replace("-", "_"))
            try:
                parts[name] = compute_part()
            except NotAvailable as reason:
                missing[name] = str(reason)
    return Evaluation(model, problem.task.metric, parts, missing)


class _Evaluator:
    """Computes the parts of an evaluation; each entry of ``PARTS`` has a method of its name."""

    def __init__(
        self,
        config: Config,
        problem: Problem,
        partition: Partition,
        model: ModelState,
        fine_tuning: FineTuning,
        corrupted_sets: Corruptions | None,
        statistics: Mapping[int, Tensor] | None,
    ) -> None:
        self.config, self.problem, self.partition, self.model = config, problem, partition, model
        self.fine_tuning, self.corrupted_sets = fine_tuning, corrupted_sets
        self.metric, self.lower_is_better = problem.task.metric, lower_is_better(problem.task)
        self.scorer = Scorer(problem, model)
        self._statistics = statistics  # None: they have changed since and are lost
        self.data = problem.data

    @property
    def statistics(self) -> Mapping[int, Tensor]:
        """The clients' own BatchNorm statistics (SiLoBN) by client; empty if clients have none."""
        if self._statistics is None:
            raise NotAvailable("clients' own BatchNorm statistics are saved only after the last round")
        return self._statistics

    def test(self) -> Part:
        """The whole test set, even if the run evaluated on a sample of it."""
        return dict(self.scorer.scores(self.data.test))

    def classes(self) -> Part:
        """Metrics of each class of the test set, and their statistics over classes."""
        if not self.data.classes:
            raise NotAvailable(f"{self.data.name} has no classes: its targets are numbers")
        return self._with_spread(self._class_scores)

    @cached_property
    def _class_scores(self) -> dict[str, Scores]:
        """Metrics of each class of the test set, by the name of the class."""
        by_label = self.scorer.scores_by_class(self.data.test)
        return {self.data.classes[label]: scores for label, scores in by_label.items()}

    def longtail(self) -> Part:
        """The mean metric of the most frequent, middle and rarest third of the classes.

        A class is frequent if clients have many training examples of it.
        """
        if not len(self.partition.dropped):  # longtail removed no example
            raise NotAvailable(f"the partition {self.partition.text} is not long-tailed; add +longtail")
        labels = np.asarray(self.data.train.targets.cpu())
        counts = np.bincount(labels[self.partition.trained_on], minlength=self.data.num_classes)
        by_frequency = [self.data.classes[label] for label in np.argsort(-counts, kind="stable")]
        third = max(len(by_frequency) // 3, 1)
        groups = {
            "head": by_frequency[:third],
            "middle": by_frequency[third:-third],
            "tail": by_frequency[-third:],
        }
        thirds = {}
        for name, group in groups.items():
            scores = {label: self._class_scores[label] for label in group if label in self._class_scores}
            if scores:  # with few classes, the middle is empty
                thirds[name] = {self.metric: spread_over(scores, self.metric)["mean"], "classes": len(scores)}
        return {"each": thirds}

    def domains(self) -> Part:
        """Metrics of each domain of the test set, and pooled over domains with (seen) and without training examples."""
        if self.data.test.groups is None:
            raise NotAvailable(f"{self.data.name} has no domain or writer labels for its test examples")
        totals = self._totals_by_domain(np.asarray(self.data.test.groups.cpu()))
        part = self._with_spread({self._group_name(group): scores_of(totals[group]) for group in sorted(totals)})
        training_groups = set() if self.data.train.groups is None else set(self.data.train.groups.tolist())
        seen, unseen = totals.keys() & training_groups, totals.keys() - training_groups
        for name, groups in (("seen", seen), ("unseen", unseen)):
            if 0 < len(groups) < len(totals):  # a pool of all domains would repeat the test set
                pooled = Totals(self.problem.task)
                for group in sorted(groups):
                    pooled.merge(totals[group])
                part[name] = {**scores_of(pooled), "domains": len(groups)}
        return part

    def _totals_by_domain(self, groups: np.ndarray) -> dict[int, Totals]:
        """The task's sums over the test examples of each domain, given the domain of each example [examples].

        If clients keep their own BatchNorm statistics (SiLoBN), a domain is evaluated with the mean statistics of its
        clients; a domain without clients, with the statistics of each batch.
        """
        clients = self._clients_by_domain() if self.statistics else {}
        without_clients = np.flatnonzero(~np.isin(groups, list(clients)))
        totals = self.scorer.totals_by_group(self.data.test, without_clients) if len(without_clients) else {}
        for group in set(groups.tolist()) & clients.keys():
            statistics = torch.stack([self.statistics[client] for client in clients[group]]).mean(0)
            scorer = self._scorer_with(statistics)
            totals[group] = scorer.totals(self.data.test, np.flatnonzero(groups == group))
        return totals

    def _clients_by_domain(self) -> dict[int, list[int]]:
        """For each domain, the clients with their own BatchNorm statistics whose data come only from that domain."""
        clients: dict[int, list[int]] = {}
        domains = self.data.train.groups
        if domains is not None:
            for client in self.statistics:
                indices = torch.from_numpy(self.partition.clients[client]).to(domains.device)
                client_domains = torch.unique(domains[indices])
                if len(client_domains) == 1:
                    clients.setdefault(int(client_domains), []).append(client)
        return clients

    def _scorer_with(self, statistics: Tensor) -> Scorer:
        """Return a scorer of the model with the given BatchNorm statistics [buffers]."""
        model = self.model._replace(buffers=statistics.to(self.model.buffers))
        return Scorer(self.problem, model, batch_statistics=False)

    def corruptions(self) -> Part:
        """The metric under each corruption, averaged over severities, and its mean over corruptions.

        The mean covers only the benchmark's standard corruptions, unless the test sets contain none of them.
        """
        by_corruption: dict[str, dict[str, float]] = {}
        for corruption, severities in self._corrupted_test_sets().items():
            values = {severity: self.scorer.scores(examples)[self.metric] for severity, examples in severities.items()}
            by_corruption[corruption] = {self.metric: float(np.mean(list(values.values())))}
            by_corruption[corruption] |= {f"severity {severity}": value for severity, value in values.items()}
        counted = [name for name in by_corruption if name in CORRUPTIONS] or list(by_corruption)
        mean = float(np.mean([by_corruption[name][self.metric] for name in counted]))
        part: Part = {"mean_corruption_error": 1 - mean} if self.metric == "accuracy" else {}
        return {**part, "mean": mean, "count": len(counted), "each": by_corruption}

    def _corrupted_test_sets(self) -> Corruptions:
        """The given corrupted test sets, or those published for the dataset."""
        if self.corrupted_sets is not None:
            return self.corrupted_sets
        published = {}
        for candidate in DATASETS.values():
            original = getattr(candidate, "of", None)  # the dataset that it corrupts
            if original:
                published[original] = candidate
        source = published.get(self.config.data.dataset)
        if source is None:
            raise NotAvailable(
                f"{self.data.name} has no corrupted test images; available for {' and '.join(sorted(published))}"
            )
        folder = data_dir(self.config.data.dir)
        if source.missing(folder):
            raise NotAvailable(f"{source.name} is not in {folder}; download it with fedflat data get {source.name}")
        return load_corruptions(self.config.data.dataset, folder, download=False)

    def clients(self) -> Part:
        """Metrics of each training client on its own data; only the first 1,000 clients of a virtual partition."""
        return {"of": len(self.partition.clients), **self._with_spread(self._client_scores)}

    @cached_property
    def _client_scores(self) -> dict[str, Scores]:
        """Metrics of each training client on its own data, with its own BatchNorm statistics if it has any."""
        by_client = {}
        for number, indices in enumerate(self.partition.summarised_clients):
            scorer = self._scorer_with(self.statistics[number]) if number in self.statistics else self.scorer
            by_client[self._client_name(number, indices)] = scorer.scores(self.data.train, indices)
        return by_client

    def unseen(self) -> Part:
        """Metrics of each held-out client on its own data, and the participation gap.

        The gap is the mean metric of the training clients minus that of the held-out clients.
        """
        self._require_unseen()
        by_client = {}
        for number, indices in enumerate(self.partition.unseen):
            by_client[self._client_name(number, indices)] = self.scorer.scores(self.data.train, indices)
        part = self._with_spread(by_client)
        return {"participation_gap": spread_over(self._client_scores, self.metric)["mean"] - part["mean"], **part}

    def fine_tuned(self) -> Part:
        """Metrics of training clients before and after fine-tuning."""
        return self._fine_tune(self.partition.summarised_clients, first_number=0)

    def fine_tuned_unseen(self) -> Part:
        """Metrics of held-out clients before and after fine-tuning."""
        self._require_unseen()
        # Held-out clients are numbered after the training clients.
        return self._fine_tune(self.partition.unseen, first_number=len(self.partition.clients))

    def _fine_tune(self, clients: Sequence[np.ndarray], first_number: int) -> Part:
        """Fine-tune some clients, each on a part of its data, and evaluate each on the rest.

        Args:
            clients: the positions of each client's examples in the training set.
            first_number: the number of the first client; a client's number selects its random stream.

        Returns:
            Means over clients of the metric ``before`` and ``after`` and of the ``gain``; the fraction of clients that
            ``improved``; the number of fine-tuned clients (``count``, out of ``of``); the settings; and ``each``, the
            values of every client.
        """
        settings, seed, train = self.fine_tuning, self.config.seed, self.data.train
        chosen = settings.choose_clients([len(indices) for indices in clients], seed)
        if not chosen:
            raise NotAvailable("no client has two examples, one for fine-tuning and one for evaluation")
        tuner = FineTuner(self.problem, self.config, settings)
        by_client = {}
        for index in chosen:
            number = first_number + index
            tuning_part, evaluation_part = settings.divide(clients[index], seed, number)
            tuned_model = tuner.fine_tune(self.model, number, tuning_part)
            by_client[self._client_name(index, clients[index])] = {
                "before": self.scorer.scores(train, evaluation_part)[self.metric],
                "after": Scorer(self.problem, tuned_model).scores(train, evaluation_part)[self.metric],
                "trained_on": len(tuning_part),
                "examples": len(evaluation_part),
            }
        before = np.array([scores["before"] for scores in by_client.values()])
        after = np.array([scores["after"] for scores in by_client.values()])
        gain = before - after if self.lower_is_better else after - before
        return {
            "before": float(before.mean()),
            "after": float(after.mean()),
            "gain": float(gain.mean()),
            "improved": float((gain > 0).mean()),
            "count": len(by_client),
            "of": len(clients),
            "epochs": settings.epochs,
            "share": settings.share,
            "lr": tuner.lr,
            "batch_size": tuner.batch_size,
            "each": by_client,
        }

    def _require_unseen(self) -> None:
        if not self.partition.unseen:
            raise NotAvailable(f"the partition {self.partition.text} has no held-out clients; add +held-out")

    def _client_name(self, number: int, indices: np.ndarray) -> str:
        """A client's number; for a natural partition, the name of its group, e.g. of the writer or domain."""
        text = canonical_partition(self.partition.text)
        if self.data.train.groups is None or not text.startswith("natural"):
            return str(number)
        name = self._group_name(int(self.data.train.groups[int(indices[0])]))
        are_divided = "largest=" in text or "clients=" in text  # several clients may share a group
        return f"{name} {number}" if are_divided else name

    def _group_name(self, group: int) -> str:
        return self.data.group_names[group] if self.data.group_names else str(group)

    def _with_spread(self, scores: dict[str, Scores]) -> Part:
        return {**spread_over(scores, self.metric, self.lower_is_better), "each": scores}


def _plain(value: Any) -> Any:
    """Nested values with non-finite numbers replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return finite_or_none(value) if isinstance(value, float) else value
