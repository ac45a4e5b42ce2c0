"""Evaluation of a run's model: on the test set, per class, per client, per domain and under corruptions.

Nothing is retrained, except when clients fine-tune.
"""

from __future__ import annotations

import math
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
from fedflat.engines.problem.task import Task
from fedflat.engines.problem.totals import Totals
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
"""Parts of an evaluation, by name."""

Corruptions = Mapping[str, Mapping[int, Examples]]
Part = dict[str, Any]


class NotAvailable(Exception):
    """A part does not apply to this run; the message says why."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model by part, and the reasons for missing parts."""

    model: str
    metric: str
    parts: dict[str, Part]
    missing: dict[str, str]

    def __getitem__(self, part: str) -> Part:
        """The metrics of one part."""
        if part in self.parts:
            return self.parts[part]
        if part in self.missing:
            raise UserError(f"part '{part}' is not available: {self.missing[part]}")
        raise one_of("part of this evaluation", part, self.parts)

    def document(self) -> dict[str, Any]:
        """All values as JSON-compatible types."""
        return {"model": self.model, "metric": self.metric, "on": _plain(self.parts), "missing": self.missing}

    def frame(self) -> pd.DataFrame:
        """One row per value: the part, the client, class or domain (empty for the whole part), the metric, its
        value.
        """
        import pandas as pd

        rows = []
        for part, figures in self.parts.items():
            rows += [(part, "", name, value) for name, value in figures.items() if not isinstance(value, dict)]
            several = {name: value for name, value in figures.items() if isinstance(value, dict) and name != "each"}
            for member, scores in (several | figures.get("each", {})).items():
                rows += [(part, member, name, value) for name, value in scores.items()]
        return pd.DataFrame(rows, columns=["on", "name", "figure", "value"])


def evaluate(
    record: Record,
    model: str = "server",
    on: str | Iterable[str] | None = None,
    *,
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
        model: name of the model, e.g. ``server`` or ``wima``.
        on: parts to evaluate (see ``PARTS``); default: all that apply.
        fine_tuning: settings of local fine-tuning.
        corruptions: corrupted test sets by corruption and severity; default: the dataset's own.
        dataset, network, task: user-supplied dataset, model and task, unless the run was made in this process.
        progress: called with the name of each part before it is computed.
    """
    wanted = [on] if isinstance(on, str) else list(dict.fromkeys(PARTS if on is None else on))
    for name in wanted:
        if name not in PARTS:
            raise one_of("evaluation part", name, PARTS)
    model = require_model(record, model)
    problem, partition = reopen(record, dataset=dataset, network=network, task=task)
    state = state_of(record, model, problem)
    evaluator = _Evaluator(
        record.config, problem, partition, state, fine_tuning or FineTuning(), corruptions, client_statistics(record)
    )
    parts, missing = {}, {}
    with torch.random.fork_rng(devices=[]):  # fine-tuning reseeds the caller's generator
        for name in wanted:
            progress(name)
            try:
                parts[name] = getattr(evaluator, name.replace("-", "_"))()
            except NotAvailable as reason:
                missing[name] = str(reason)
    return Evaluation(model, problem.task.metric, parts, missing)


class _Evaluator:
    """Computes the parts of an evaluation; one method per part."""

    def __init__(
        self,
        config: Config,
        problem: Problem,
        partition: Partition,
        model: ModelState,
        fine_tuning: FineTuning,
        corruptions: Corruptions | None,
        statistics: Mapping[int, Tensor],
    ) -> None:
        self.config, self.problem, self.partition, self.model = config, problem, partition, model
        self.wanted, self.corrupted = fine_tuning, corruptions
        self.metric = problem.task.metric
        self.scorer = Scorer(problem, model)
        self.statistics = statistics
        self.data = problem.data

    def test(self) -> Part:
        """The whole test set, even if the run evaluated on a sample of it."""
        return dict(self.scorer.of(self.data.test))

    def classes(self) -> Part:
        """Each class of the test set."""
        return self._spread(self._classes)

    @cached_property
    def _classes(self) -> dict[str, Scores]:
        return {self.data.classes[label]: scores for label, scores in self.scorer.by_class(self.data.test).items()}

    def longtail(self) -> Part:
        """Head, middle and tail thirds of the classes, by number of training examples."""
        if not len(self.partition.thinned):
            raise NotAvailable(f"the partition {self.partition.text} is not long-tailed; add +longtail")
        labels = np.asarray(self.data.train.targets.cpu())
        counts = np.bincount(
            labels[np.unique(np.concatenate(self.partition.described_clients))], minlength=self.data.num_classes
        )
        order = [self.data.classes[label] for label in np.argsort(-counts, kind="stable")]
        third = max(len(order) // 3, 1)
        each = {}
        for name, group in (("head", order[:third]), ("middle", order[third:-third]), ("tail", order[-third:])):
            tested = {label: self._classes[label] for label in group if label in self._classes}
            if tested:
                each[name] = {self.metric: spread_over(tested, self.metric)["mean"], "classes": len(tested)}
        return {"each": each}

    def domains(self) -> Part:
        """Each group of the test set."""
        if self.data.test.groups is None:
            raise NotAvailable(f"{self.data.name} has no domain or writer labels for its test examples")
        totals = self._totals_of_domains(np.asarray(self.data.test.groups.cpu()))
        figures = self._spread({self._group(group): scores_of(totals[group]) for group in sorted(totals)})
        seen = set() if self.data.train.groups is None else set(self.data.train.groups.tolist())
        for name, groups in (("seen", totals.keys() & seen), ("unseen", totals.keys() - seen)):
            if 0 < len(groups) < len(totals):
                pooled = Totals(self.problem.task)
                for group in sorted(groups):
                    pooled.merge(totals[group])
                figures[name] = {**scores_of(pooled), "domains": len(groups)}
        return figures

    def _totals_of_domains(self, groups: np.ndarray) -> dict[int, Totals]:
        """Sums per domain. With SiLoBN, a domain uses the mean BatchNorm statistics of its clients, else batch
        statistics.
        """
        owners = self._clients_of_domains() if self.statistics else {}
        rest = np.flatnonzero(~np.isin(groups, list(owners)))
        totals = self.scorer.by_group(self.data.test, rest) if len(rest) else {}
        for group in set(groups.tolist()) & owners.keys():
            statistics = torch.stack([self.statistics[number] for number in owners[group]]).mean(0)
            totals[group] = self._with(statistics).totals(self.data.test, np.flatnonzero(groups == group))
        return totals

    def _clients_of_domains(self) -> dict[int, list[int]]:
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

    def _with(self, statistics: Tensor) -> Scorer:
        """A scorer of the model with a client's BatchNorm statistics."""
        model = self.model._replace(buffers=statistics.to(self.model.buffers))
        return Scorer(self.problem, model, batch_statistics=False)

    def corruptions(self) -> Part:
        """Each corruption, averaged over severities; the mean is over the benchmark's corruptions."""
        each: dict[str, dict[str, float]] = {}
        for corruption, severities in self._corruptions().items():
            values = {severity: self.scorer.of(examples)[self.metric] for severity, examples in severities.items()}
            each[corruption] = {self.metric: float(np.mean(list(values.values())))}
            each[corruption] |= {f"severity {severity}": value for severity, value in values.items()}
        counted = [name for name in each if name in CORRUPTIONS] or list(each)
        mean = float(np.mean([each[name][self.metric] for name in counted]))
        figures: Part = {"mean": mean, "count": len(counted)}
        if self.metric == "accuracy":
            figures = {"mean_corruption_error": 1 - mean, **figures}
        return {**figures, "each": each}

    def _corruptions(self) -> Corruptions:
        if self.corrupted is not None:
            return self.corrupted
        known = {of: source for source in DATASETS.values() if (of := getattr(source, "of", None))}
        source = known.get(self.config.data.dataset)
        if source is None:
            raise NotAvailable(
                f"{self.data.name} has no corrupted test images; available for {' and '.join(sorted(known))}"
            )
        folder = data_dir(self.config.data.dir)
        if source.missing(folder):
            raise NotAvailable(f"{source.name} is not in {folder}; download it with fedflat data get {source.name}")
        return load_corruptions(self.config.data.dataset, folder, download=False)

    def clients(self) -> Part:
        """Each training client on its own data; the first 1,000 of a virtual partition."""
        return {"of": len(self.partition.clients), **self._spread(self._clients)}

    @cached_property
    def _clients(self) -> dict[str, Scores]:
        each = {}
        for number, indices in enumerate(self.partition.described_clients):
            scorer = self._with(self.statistics[number]) if number in self.statistics else self.scorer
            each[self._name(number, indices)] = scorer.of(self.data.train, indices)
        return each

    def unseen(self) -> Part:
        """Each held-out client on its own data, and the participation gap (mean of training minus held-out clients)."""
        self._require_unseen()
        figures = self._spread(self._each_client(self.partition.unseen))
        return {"participation_gap": spread_over(self._clients, self.metric)["mean"] - figures["mean"], **figures}

    def fine_tuned(self) -> Part:
        """Training clients before and after fine-tuning."""
        return self._fine_tuned(self.partition.described_clients, 0)

    def fine_tuned_unseen(self) -> Part:
        """Held-out clients before and after fine-tuning."""
        self._require_unseen()
        return self._fine_tuned(self.partition.unseen, len(self.partition.clients))

    def _fine_tuned(self, clients: Sequence[np.ndarray], first: int) -> Part:
        """Fine-tune some of ``clients``; ``first`` is the number of the first one, which offsets their random
        streams.
        """
        wanted, seed = self.wanted, self.config.seed
        chosen = wanted.among([len(indices) for indices in clients], seed)
        if not chosen:
            raise NotAvailable("no client has two examples, one for fine-tuning and one for evaluation")
        tuner = FineTuner(self.problem, self.config, wanted)
        each = {}
        for number in chosen:
            to_train, rest = wanted.divided(clients[number], seed, first + number)
            tuned = tuner.tuned(self.model, first + number, to_train)
            before, after = (Scorer(self.problem, model).of(self.data.train, rest) for model in (self.model, tuned))
            name = self._name(number, clients[number])
            each[name] = {
                "before": before[self.metric],
                "after": after[self.metric],
                "trained_on": len(to_train),
                "examples": len(rest),
            }
        before_all, after_all = (np.array([scores[when] for scores in each.values()]) for when in ("before", "after"))
        return {
            "before": float(before_all.mean()),
            "after": float(after_all.mean()),
            "gain": float((after_all - before_all).mean()),
            "improved": float((after_all > before_all).mean()),
            "count": len(each),
            "of": len(clients),
            "epochs": wanted.epochs,
            "share": wanted.share,
            "lr": tuner.lr,
            "batch_size": tuner.batch_size,
            "each": each,
        }

    def _require_unseen(self) -> None:
        if not self.partition.unseen:
            raise NotAvailable(f"the partition {self.partition.text} has no held-out clients; add +held-out")

    def _each_client(self, clients: Sequence[np.ndarray]) -> dict[str, Scores]:
        return {
            self._name(number, indices): self.scorer.of(self.data.train, indices)
            for number, indices in enumerate(clients)
        }

    def _name(self, number: int, indices: np.ndarray) -> str:
        """The name of a natural client, otherwise its number."""
        text = canonical_partition(self.partition.text)
        if self.data.train.groups is None or not text.startswith("natural"):
            return str(number)
        name = self._group(int(self.data.train.groups[int(indices[0])]))
        return f"{name} {number}" if "largest=" in text else name

    def _group(self, group: int) -> str:
        return self.data.group_names[group] if self.data.group_names else str(group)

    def _spread(self, each: dict[str, Scores]) -> Part:
        return {**spread_over(each, self.metric), "each": each}


def _plain(value: Any) -> Any:
    """Nested values with non-finite numbers replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inside) for key, inside in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
