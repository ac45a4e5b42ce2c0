"""A fixed number of classes per client (McMahan et al. 2017), met exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedflat.data.partitioners.partitioner import ClassCountPartitioner, IntArray, equal_sizes
from fedflat.errors import UserError
from fedflat.text import param

MAX_ATTEMPTS = 50
"""Number of random graphs to try; fewer for large ones, of which nearly all or nearly none are feasible."""
Graph = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pathological(ClassCountPartitioner):
    """Every client has exactly ``classes`` classes, clients are equally large, and every example is used once.

    The usual shards of a sorted list guarantee this only if shards end at class boundaries. Here a random bipartite
    graph decides which client holds which class, with holders in proportion to class size. The counts are a flow in
    that graph that maximises the smallest count; for balanced classes all counts are equal.
    """

    citation: ClassVar[str] = "McMahan et al. 2017"
    examples: ClassVar[tuple[str, ...]] = ("pathological(classes=2)", "pathological(classes=4)")
    classes: int = param(2, "number of classes per client", low=1)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        sizes, present = equal_sizes(int(available.sum()), clients), np.flatnonzero(available)
        if not self.classes <= len(present) <= clients * self.classes or self.classes > sizes.min():
            raise UserError(
                f"{clients} clients of {sizes.min()} examples cannot have exactly {self.classes} of {len(present)} "
                f"classes each; expected at most {min(len(present), sizes.min())} classes per client, "
                "and enough clients to hold all classes"
            )
        holders = _holders(available[present], clients, clients * self.classes)
        if holders.sum() == clients * self.classes:
            for _ in range(max(3, min(MAX_ATTEMPTS, 5_000_000 // (clients * len(present))))):
                shares = _balanced_shares(_random_graph(holders, clients, self.classes, rng), sizes, available[present])
                if shares is not None:
                    counts = np.zeros((clients, len(available)), dtype=np.int64)
                    counts[:, present] = shares
                    return counts
        raise UserError(
            f"cannot give {clients} clients equal sizes and exactly {self.classes} classes each from classes of "
            f"{available[present].min()} to {available[present].max()} examples; "
            "try other numbers, or dirichlet(alpha=0)"
        )


def _holders(available: IntArray, clients: int, places: int) -> IntArray:
    """Number of clients per class: between 1 and all, in proportion to class size (D'Hondt's method)."""
    rank = np.arange(1, clients + 1)
    claim = np.where(rank <= available[:, None], available[:, None] / rank, 0)
    claim[:, 0] = np.inf
    order = np.argsort(-claim, axis=None, kind="stable")[: min(places, np.count_nonzero(claim))]
    return np.bincount(order // clients, minlength=len(available))


def _random_graph(holders: IntArray, clients: int, degree: int, rng: np.random.Generator) -> Graph:
    """Which client holds which class [clients, classes]: ``degree`` per client, ``holders`` per class."""
    graph = np.zeros((clients, len(holders)), dtype=bool)
    left = holders.copy()
    for client in range(clients):
        with np.errstate(divide="ignore"):
            urgency = np.log(left) + rng.gumbel(size=len(left))
        # A class that needs every remaining client must be taken now; then the graph can always be completed.
        urgency[left == clients - client] = np.inf
        chosen = np.argsort(-urgency, kind="stable")[:degree]
        graph[client, chosen] = True
        left[chosen] -= 1
    return graph


def _balanced_shares(graph: Graph, sizes: IntArray, available: IntArray) -> IntArray | None:
    """Counts along the graph with the given margins that maximise the smallest count; None if infeasible."""
    best = None
    low, high = 1, int(min((sizes // graph.sum(1)).min(), (available // graph.sum(0)).min()))
    while low <= high:
        middle = (low + high + 1) // 2
        shares = _shares(graph, sizes, available, middle)
        if shares is None:
            high = middle - 1
        else:
            best, low = shares, middle + 1
    return best


def _shares(graph: Graph, sizes: IntArray, available: IntArray, least: int) -> IntArray | None:
    """Counts of at least ``least`` along the graph with the given row and column sums, as a maximum flow."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = graph.shape
    client, label = np.nonzero(graph)
    start, end = clients + classes, clients + classes + 1
    tails = np.concatenate([np.full(clients, start), client, clients + np.arange(classes)])
    heads = np.concatenate([np.arange(clients), clients + label, np.full(classes, end)])
    supply, demand = sizes - least * graph.sum(1), available - least * graph.sum(0)
    capacity = np.concatenate([supply, supply[client], demand]).astype(np.int32)
    result = maximum_flow(csr_array((capacity, (tails, heads)), shape=(end + 1, end + 1)), start, end)
    if result.flow_value < supply.sum():
        return None
    shares = np.zeros(graph.shape, dtype=np.int64)
    shares[client, label] = result.flow.toarray()[client, clients + label] + least
    return shares
