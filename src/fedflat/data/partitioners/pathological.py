"""A fixed number of classes per client (McMahan et al. 2017), kept exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedflat.data.partitioners.partitioner import ByClass, IntArray
from fedflat.data.partitioners.sizes import equal_sizes
from fedflat.errors import UserError
from fedflat.text import param

ATTEMPTS = 50
"""How many graphs are tried at most; of large ones fewer, since they either nearly all will do or nearly none."""
Graph = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pathological(ByClass):
    """Every client has exactly so many classes, clients are equally large, and every example is used once.

    The usual shards of a sorted list keep these promises only if the shards happen to end where classes do. Here who holds which class
    is drawn at random, with a number of holders per class in proportion to its size; how much of it each gets is a flow in that graph
    from clients to classes, the one whose smallest share is largest. For balanced classes all shares are then equal.
    """

    classes: int = param(2, "how many classes every client has", low=1)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """A random graph of who holds what, and the flow in it."""
        sizes, present = equal_sizes(int(available.sum()), clients), np.flatnonzero(available)
        if not self.classes <= len(present) <= clients * self.classes or self.classes > sizes.min():
            raise UserError(
                f"{clients} clients of {sizes.min()} examples cannot have exactly {self.classes} of {len(present)} classes each; "
                "expected no more than there are, no more than a client has examples, and enough clients to hold them all"
            )
        holders = _holders(available[present], clients, clients * self.classes)
        if holders.sum() == clients * self.classes:
            for _ in range(max(3, min(ATTEMPTS, 5_000_000 // (clients * len(present))))):
                shares = _balanced_shares(_random_graph(holders, clients, self.classes, rng), sizes, available[present])
                if shares is not None:
                    counts = np.zeros((clients, len(available)), dtype=np.int64)
                    counts[:, present] = shares
                    return counts
        raise UserError(
            f"no way was found to give {clients} clients equal sizes and exactly {self.classes} classes each out of classes of "
            f"{available[present].min()} to {available[present].max()} examples; try other numbers, or dirichlet(alpha=0)"
        )


def _holders(available: IntArray, clients: int, places: int) -> IntArray:
    """How many clients hold each class: at least one, at most all, otherwise in proportion to its size (D'Hondt's rule)."""
    rank = np.arange(1, clients + 1)
    claim = np.where(rank <= available[:, None], available[:, None] / rank, 0)
    claim[:, 0] = np.inf
    order = np.argsort(-claim, axis=None, kind="stable")[: min(places, np.count_nonzero(claim))]
    return np.bincount(order // clients, minlength=len(available))


def _random_graph(holders: IntArray, clients: int, degree: int, rng: np.random.Generator) -> Graph:
    """Who holds what, [clients, classes]: ``degree`` classes per client and ``holders`` clients per class."""
    graph = np.zeros((clients, len(holders)), dtype=bool)
    left = holders.copy()
    for client in range(clients):
        with np.errstate(divide="ignore"):
            urgency = np.log(left) + rng.gumbel(size=len(left))
        # Classes that need every client still to come must be taken now; then the rest can always be completed.
        urgency[left == clients - client] = np.inf
        chosen = np.argsort(-urgency, kind="stable")[:degree]
        graph[client, chosen] = True
        left[chosen] -= 1
    return graph


def _balanced_shares(graph: Graph, sizes: IntArray, available: IntArray) -> IntArray | None:
    """Counts along the graph with the given row and column sums and the largest possible smallest count, if there are any."""
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
    """Counts of at least ``least`` along the graph with the given row and column sums, if there are any: a maximum flow."""
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
