"""A fixed number of classes per client (McMahan et al. 2017), met exactly."""

from __future__ import annotations

from dataclasses import dataclass

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

    The usual method, dealing shards of the examples sorted by class, guarantees this only if shards end at class
    boundaries. Here classes are assigned to clients at random, large classes to more clients than small ones. The
    number of examples that a client gets of each of its classes is then chosen by a maximum-flow computation that makes
    the smallest of these numbers as large as possible; if all classes are equally large, all these numbers are equal.
    """

    citation = "McMahan et al. 2017"
    examples = ("pathological(classes=2)", "pathological(classes=4)")
    classes: int = param(2, "number of classes per client", low=1)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """Draw class counts [clients, classes] that use each of the ``available`` examples per class once."""
        sizes, present = equal_sizes(int(available.sum()), clients), np.flatnonzero(available)
        available_present, edges = available[present], clients * self.classes
        if not self.classes <= len(present) <= edges or self.classes > sizes.min():
            raise UserError(
                f"{clients} clients of {sizes.min()} examples cannot have exactly {self.classes} of {len(present)} "
                f"classes each; expected at most {min(len(present), sizes.min())} classes per client, "
                "and enough clients to hold all classes"
            )
        clients_per_class = _clients_per_class(available_present, clients, edges)
        attempts = max(3, min(MAX_ATTEMPTS, 5_000_000 // (clients * len(present))))
        if clients_per_class.sum() < edges:
            attempts = 0  # the classes are too small for that many edges, so there is no graph to try
        for _ in range(attempts):
            graph = _random_graph(clients_per_class, clients, self.classes, rng)
            balanced = _balanced_counts(graph, sizes, available_present)
            if balanced is not None:
                counts = np.zeros((clients, len(available)), dtype=np.int64)
                counts[:, present] = balanced
                return counts
        raise UserError(
            f"cannot give {clients} clients equal sizes and exactly {self.classes} classes each from classes of "
            f"{available_present.min()} to {available_present.max()} examples; "
            "try other numbers, or dirichlet(alpha=0)"
        )


def _clients_per_class(available: IntArray, clients: int, edges: int) -> IntArray:
    """Distribute the graph's edges over the classes in proportion to their size, 1 to ``clients`` for each class.

    By D'Hondt's method: the k-th edge of a class with m examples has the quotient m / k, and the edges with the largest
    quotients are chosen. A class cannot have more edges than examples.
    """
    divisors = np.arange(1, clients + 1)
    quotients = np.where(divisors <= available[:, None], available[:, None] / divisors, 0)
    quotients[:, 0] = np.inf  # every class has at least one client
    chosen = np.argsort(-quotients, axis=None, kind="stable")[: min(edges, np.count_nonzero(quotients))]
    return np.bincount(chosen // clients, minlength=len(available))


def _random_graph(
    clients_per_class: IntArray, clients: int, classes_per_client: int, rng: np.random.Generator
) -> Graph:
    """Draw which client holds which class [clients, classes], with the given numbers per class and per client."""
    graph = np.zeros((clients, len(clients_per_class)), dtype=bool)
    needed = clients_per_class.copy()
    for client in range(clients):
        # The largest Gumbel keys are a draw without replacement, in proportion to the clients still needed.
        with np.errstate(divide="ignore"):
            keys = np.log(needed) + rng.gumbel(size=len(needed))
        # A class that needs every remaining client must be taken now; then the graph can always be completed.
        keys[needed == clients - client] = np.inf
        chosen = np.argsort(-keys, kind="stable")[:classes_per_client]
        graph[client, chosen] = True
        needed[chosen] -= 1
    return graph


def _balanced_counts(graph: Graph, sizes: IntArray, available: IntArray) -> IntArray | None:
    """Maximise the smallest count along the graph by bisection; None if no counts are feasible.

    Args:
        graph: which client holds which class [clients, classes].
        sizes: number of examples of each client [clients].
        available: number of examples of each class [classes].
    """
    best = None
    low, high = 1, int(min((sizes // graph.sum(1)).min(), (available // graph.sum(0)).min()))
    while low <= high:
        middle = (low + high + 1) // 2
        counts = _feasible_counts(graph, sizes, available, middle)
        if counts is None:
            high = middle - 1
        else:
            best, low = counts, middle + 1
    return best


def _feasible_counts(graph: Graph, sizes: IntArray, available: IntArray, least: int) -> IntArray | None:
    """Find counts of at least ``least`` along the graph with the given row and column sums; None if there are none.

    Beyond ``least`` per edge, the examples are a maximum flow from a source through clients and classes to a sink.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = graph.shape
    client, label = np.nonzero(graph)
    # Nodes: the clients, the classes, the source, the sink.
    source, sink = clients + classes, clients + classes + 1
    tails = np.concatenate([np.full(clients, source), client, clients + np.arange(classes)])
    heads = np.concatenate([np.arange(clients), clients + label, np.full(classes, sink)])
    supply, demand = sizes - least * graph.sum(1), available - least * graph.sum(0)
    capacity = np.concatenate([supply, supply[client], demand]).astype(np.int32)
    result = maximum_flow(csr_array((capacity, (tails, heads)), shape=(sink + 1, sink + 1)), source, sink)
    if result.flow_value < supply.sum():
        return None
    counts = np.zeros(graph.shape, dtype=np.int64)
    counts[client, label] = result.flow.toarray()[client, clients + label] + least
    return counts
