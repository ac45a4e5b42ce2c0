"""One call that says how good a model of a run is, and for whom: on the test set, by class, client, domain, corruption.

Nothing is trained again, except where clients fine-tune.
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
from fedflat.experiment.store.record import Record, client_statistics

if TYPE_CHECKING:
    import pandas as pd

PARTS = {
    "test": "the whole test set",
    "classes": "each class of the test set",
    "longtail": "classes at the head, in the middle and at the tail, where the partition is long-tailed",
    "clients": "each training client, on the data it trained on",
    "unseen": "each client that never trained, and the participation gap",
    "domains": "each domain, writer or other group of the test set",
    "corruptions": "the test set under each corruption",
    "fine-tuned": "training clients before and after fine-tuning on a share of their data, on the rest of it",
    "fine-tuned-unseen": "unseen clients likewise",
}
"""What a model can be evaluated on, by name."""

Corruptions = Mapping[str, Mapping[int, Examples]]
Part = dict[str, Any]


class NotAvailable(Exception):
    """A run has nothing to evaluate under some name; the message says why."""


@dataclass(frozen=True)
class Evaluation:
    """The figures of one model, as plain values by part; and, for parts that this run cannot have, why not."""

    model: str
    metric: str
    parts: dict[str, Part]
    missing: dict[str, str]

    def __getitem__(self, part: str) -> Part:
        """The figures of one part."""
        if part in self.parts:
            return self.parts[part]
        if part in self.missing:
            raise UserError(f"there is no evaluation on {part}: {self.missing[part]}")
        raise one_of("part of this evaluation", part, self.parts)

    def document(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {"model": self.model, "metric": self.metric, "on": _plain(self.parts), "missing": self.missing}

    def frame(self) -> pd.DataFrame:
        """A row per figure: the part, the client, class or domain within it (empty for all of them), the figure, its value."""
        import pandas as pd

        rows = []
        for part, figures in self.parts.items():
            rows += [(part, "", name, value) for name, value in figures.items() if not isinstance(value, dict)]
            several = {name: value for name, value in figures.items() if isinstance(value, dict) and name != "each"}
            for one, scores in (several | figures.get("each", {})).items():
                rows += [(part, one, name, value) for name, value in scores.items()]
        return pd.DataFrame(rows, columns=["on", "name", "figure", "value"])


def evaluate(
    record: Record,
    model: str = "server",
    on: str | Iterable[str] | None = None,
    *,
    fine_tuning: FineTuning | None = None,
    corruptions: Corruptions | None = None,
    data: Dataset | None = None,
    network: nn.Module | None = None,
    task: Task | None = None,
    progress: Callable[[str], None] = lambda part: None,
) -> Evaluation:
    """Evaluate a model of a run on everything that its data and its partition offer, or ``on`` some of it; each part stands under its own name.

    A run on data, with a model or for a task of the user's own needs them again here (``network`` is the model), unless it was run
    in this process. ``tell`` is called with the name of each part before it is computed.
    """
    wanted = [on] if isinstance(on, str) else list(dict.fromkeys(PARTS if on is None else on))
    for name in wanted:
        if name not in PARTS:
            raise one_of("part to evaluate on", name, PARTS)
    model = require_model(record, model)
    problem, partition = reopen(record, data=data, network=network, task=task)
    state = state_of(record, model, problem)
    evaluator = _Evaluator(
        record.config, problem, partition, state, fine_tuning or FineTuning(), corruptions, client_statistics(record)
    )
    parts, missing = {}, {}
    with torch.random.fork_rng(devices=[]):  # fine-tuning seeds it, and it is the caller's
        for name in wanted:
            progress(name)
            try:
                parts[name] = getattr(evaluator, name.replace("-", "_"))()
            except NotAvailable as reason:
                missing[name] = str(reason)
    return Evaluation(model, problem.task.metric, parts, missing)


class _Evaluator:
    """The parts of an evaluation, each a method by its name."""

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

    # --- the test set ------------------------------------------------------------------------------------------------------------

    def test(self) -> Part:
        """The whole test set, also where the run looked at a sample of it only."""
        return dict(self.scorer.of(self.data.test))

    def classes(self) -> Part:
        """Each class of the test set."""
        return self._spread(self._classes)

    @cached_property
    def _classes(self) -> dict[str, Scores]:
        return {self.data.classes[label]: scores for label, scores in self.scorer.by_class(self.data.test).items()}

    def longtail(self) -> Part:
        """A third of the classes at the head, a third at the tail, by how many training examples the clients have of them."""
        if not len(self.partition.thinned):
            raise NotAvailable(f"the partition {self.partition.text} has no long tail; add +longtail to it")
        labels = np.asarray(self.data.train.targets.cpu())
        counts = np.bincount(
            labels[np.unique(np.concatenate(self.partition.described_clients))], minlength=self.data.num_classes
        )
        order = [self.data.classes[label] for label in np.argsort(-counts, kind="stable")]
        third = max(len(order) // 3, 1)
        each = {}
        for name, some in (("head", order[:third]), ("middle", order[third:-third]), ("tail", order[-third:])):
            tested = {one: self._classes[one] for one in some if one in self._classes}
            if tested:
                each[name] = {self.metric: spread_over(tested, self.metric)["mean"], "classes": len(tested)}
        return {"each": each}

    def domains(self) -> Part:
        """Each group of the test set."""
        if self.data.test.groups is None:
            raise NotAvailable(f"{self.data.name} does not say which domain or writer its test examples come from")
        totals = self._totals_of_domains(np.asarray(self.data.test.groups.cpu()))
        found = self._spread({self._group(group): scores_of(totals[group]) for group in sorted(totals)})
        seen = set() if self.data.train.groups is None else set(self.data.train.groups.tolist())
        for name, groups in (("seen", totals.keys() & seen), ("unseen", totals.keys() - seen)):
            if 0 < len(groups) < len(totals):
                pooled = Totals(self.problem.task)
                for group in sorted(groups):
                    pooled.merge(totals[group])
                found[name] = {**scores_of(pooled), "domains": len(groups)}
        return found

    def _totals_of_domains(self, groups: np.ndarray) -> dict[int, Totals]:
        """Clients that keep their statistics lend them to the test examples of their domain; other domains use those of each batch."""
        lenders = self._lenders() if self.statistics else {}
        rest = np.flatnonzero(~np.isin(groups, list(lenders)))
        totals = self.scorer.by_group(self.data.test, rest) if len(rest) else {}
        for group in set(groups.tolist()) & lenders.keys():
            statistics = torch.stack([self.statistics[number] for number in lenders[group]]).mean(0)
            totals[group] = self._with(statistics).totals(self.data.test, np.flatnonzero(groups == group))
        return totals

    def _lenders(self) -> dict[int, list[int]]:
        """For each group, the training clients that have nothing but it and have taken part."""
        found: dict[int, list[int]] = {}
        if self.data.train.groups is not None:
            for number in self.statistics:
                groups = torch.unique(
                    self.data.train.groups[
                        torch.from_numpy(self.partition.clients[number]).to(self.data.train.groups.device)
                    ]
                )
                if len(groups) == 1:
                    found.setdefault(int(groups), []).append(number)
        return found

    def _with(self, statistics: Tensor) -> Scorer:
        """The model with normalisation statistics that some client kept."""
        own = self.model._replace(buffers=statistics.to(self.model.buffers))
        return Scorer(self.problem, own, batch_statistics=False)

    def corruptions(self) -> Part:
        """Each corruption, averaged over its severities; the mean over corruptions is over those of the benchmark."""
        each: dict[str, dict[str, float]] = {}
        for corruption, severities in self._corruptions().items():
            found = {severity: self.scorer.of(examples)[self.metric] for severity, examples in severities.items()}
            each[corruption] = {self.metric: float(np.mean(list(found.values())))}
            each[corruption] |= {f"severity {severity}": value for severity, value in found.items()}
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
            raise NotAvailable(f"{self.data.name} has no corrupted test images; {' and '.join(sorted(known))} have")
        folder = data_dir(self.config.data.dir)
        if source.missing(folder):
            raise NotAvailable(f"{source.name} is not in {folder}; get it with fedflat data get {source.name}")
        return load_corruptions(self.config.data.dataset, folder, download=False)

    # --- clients -----------------------------------------------------------------------------------------------------------------

    def clients(self) -> Part:
        """Each training client on its own data, or each of the first 1000 where clients are drawn only when asked for."""
        return {"of": len(self.partition.clients), **self._spread(self._clients)}

    @cached_property
    def _clients(self) -> dict[str, Scores]:
        each = {}
        for number, indices in enumerate(self.partition.described_clients):
            scorer = self._with(self.statistics[number]) if number in self.statistics else self.scorer
            each[self._name(number, indices)] = scorer.of(self.data.train, indices)
        return each

    def unseen(self) -> Part:
        """Each unseen client on its own data; the gap is by how much training clients, on theirs, are better on average."""
        self._require_unseen()
        found = self._spread(self._each_client(self.partition.unseen))
        return {"participation_gap": spread_over(self._clients, self.metric)["mean"] - found["mean"], **found}

    def fine_tuned(self) -> Part:
        """Training clients before and after fine-tuning."""
        return self._fine_tuned(self.partition.described_clients, 0)

    def fine_tuned_unseen(self) -> Part:
        """Unseen clients before and after fine-tuning."""
        self._require_unseen()
        return self._fine_tuned(self.partition.unseen, len(self.partition.clients))

    def _fine_tuned(self, clients: Sequence[np.ndarray], first: int) -> Part:
        """``first`` is the number of the first of these clients, by which their random numbers differ from other clients'."""
        wanted, seed = self.wanted, self.config.seed
        chosen = wanted.among([len(indices) for indices in clients], seed)
        if not chosen:
            raise NotAvailable("no client has two examples, one to fine-tune on and one to be scored on")
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
        before_all, after_all = (np.array([one[when] for one in each.values()]) for when in ("before", "after"))
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

    # --- small things ------------------------------------------------------------------------------------------------------------

    def _require_unseen(self) -> None:
        if not self.partition.unseen:
            raise NotAvailable(f"in the partition {self.partition.text} every client trains; add +held-out to it")

    def _each_client(self, clients: Sequence[np.ndarray]) -> dict[str, Scores]:
        return {
            self._name(number, indices): self.scorer.of(self.data.train, indices)
            for number, indices in enumerate(clients)
        }

    def _name(self, number: int, indices: np.ndarray) -> str:
        """A natural client by its name, any other by its number."""
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
    """Nested values without what JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inside) for key, inside in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
