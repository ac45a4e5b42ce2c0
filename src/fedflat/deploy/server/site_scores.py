"""Metrics of a model on the data that each site holds out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flwr.app import RecordDict

from fedflat.deploy.flower.wire import BASE, BUFFERS, EXPERIMENT, MODEL, array_record, message_content, numbers_of
from fedflat.deploy.server.nodes import Nodes
from fedflat.deploy.settings import Deployment
from fedflat.deploy.trust.signatures import arrays_digest
from fedflat.display import names_by_reason
from fedflat.engines.round.contract import ModelState

log = logging.getLogger("flwr")
EXAMPLES = "examples"
"""Name of the number of held-out examples among the numbers that a site reports."""


class SiteScores(NamedTuple):
    """What sites answered."""

    scores: dict[int, dict[str, float]]
    """The metrics of each site that answered, by client, and its number of held-out examples as ``examples``."""
    missing: dict[int, str]
    """For every other client that was asked, the reason."""


def ask_for_scores(
    nodes: Nodes,
    experiment: str,
    model: ModelState,
    clients: Iterable[int],
    timeout: float,
    quorum: int | None = None,
    expected: Iterable[str] | None = None,
) -> SiteScores:
    """Send a model to sites and collect its metrics on their held-out data.

    Args:
        nodes: the connected nodes.
        experiment: name of the experiment, which the answers must repeat.
        model: the model to evaluate.
        clients: numbers of the clients to ask.
        timeout: seconds to wait for answers.
        quorum: number of answers that are enough; None to wait for all.
        expected: names of the metrics that a site must report; None accepts any.
    """
    tensors = {MODEL: model.weights}
    if len(model.buffers):
        tensors[BUFFERS] = model.buffers
    arrays = array_record(tensors)
    header = {EXPERIMENT: experiment, BASE: arrays_digest(arrays)}
    contents = {client: message_content(arrays, header) for client in clients}
    scores: dict[int, dict[str, float]] = {}
    needed = None if expected is None else {*expected, EXAMPLES}

    def receive(client: int, records: RecordDict) -> str:
        """Store a site's metrics; returns why they are rejected."""
        numbers = numbers_of(records)
        if needed is not None and (numbers.keys() != needed or not 1 <= numbers[EXAMPLES] < math.inf):
            return f"it reports {', '.join(sorted(numbers)) or 'nothing'}; expected {', '.join(sorted(needed))}"
        scores[client] = numbers
        return ""

    missing, rejected = nodes.ask("evaluate", contents, "score", timeout, receive, quorum)
    return SiteScores(dict(sorted(scores.items())), missing | rejected)


def validate_at_sites(
    nodes: Nodes, experiment: str, model: ModelState, metrics: Iterable[str], deployment: Deployment
) -> dict[str, float] | None:
    """Return the mean of each metric over all connected sites; None if none answers.

    ``metrics`` are the names of the metrics, and the other arguments are those of ``ask_for_scores``.
    """
    present = sorted(nodes.present)
    scores, missing = ask_for_scores(nodes, experiment, model, present, deployment.timeout, deployment.quorum, metrics)
    log_missing_scores(nodes, missing)
    return weighted_means(scores) if scores else None


def log_missing_scores(nodes: Nodes, missing: Mapping[int, str]) -> None:
    """Log in one line which sites have not scored a model, and why; nothing if all have."""
    if missing:
        reasons = names_by_reason(nodes.labelled(missing)).items()
        log.info("fedflat: no scores from %s", "; ".join(f"{names}: {reason}" for reason, names in reasons))


def weighted_means(scores: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over sites, weighted by their held-out examples.

    >>> weighted_means({0: {"accuracy": 0.5, "examples": 30}, 2: {"accuracy": 1.0, "examples": 10}})
    {'accuracy': 0.625}
    """
    total = sum(numbers[EXAMPLES] for numbers in scores.values())
    names = [name for name in next(iter(scores.values())) if name != EXAMPLES]
    return {name: sum(numbers[EXAMPLES] * numbers[name] for numbers in scores.values()) / total for name in names}
