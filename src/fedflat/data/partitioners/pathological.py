"""Exactly the given number of classes per client (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedflat.data.partitioners.partitioner import ClassCountPartitioner, IntArray, equal_sizes
from fedflat.errors import UserError
from fedflat.text import param

MAX_ATTEMPTS = 50
"""Number of random assignments to try; fewer for large ones, of which nearly all or nearly none are feasible."""
Assignment = npt.NDArray[np.bool_]
"""Which client holds which class, [clients, classes]."""


@dataclass(frozen=True)
class Pathological(ClassCountPartitioner):
    """Every client has exactly ``classes`` classes, clients are equally large, and every example is used once.

    The usual method sorts the examples by class and gives each client a few contiguous shards; a client then has the
    intended number of classes only if shards end at class boundaries. Here classes are assigned to clients at random,
    large classes to more clients than small ones. The number of examples that a client gets of each of its classes is
    then chosen by a maximum-flow computation that makes the smallest of these numbers as large as possible; if all
    classes are equally large, all these numbers are equal.
    """

    citation = "McMahan et al. 2017"
    examples = ("pathological(classes=2)", "pathological(classes=4)")
    classes: int = param(2, "number of classes per client", low=1)

    def counts(self, examples_per_class: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """Draw which client holds which class, then find counts; draw again if no counts are feasible."""
        sizes = equal_sizes(int(examples_per_class.sum()), clients)
        present = np.flatnonzero(examples_per_class)  # classes that have examples
        present_counts = examples_per_class[present]
        pairs = clients * self.classes  # number of pairs of a client and a class that it holds
        if not self.classes <= len(present) <= pairs or self.classes > sizes.min():
            raise UserError(
                f"{clients} clients of {sizes.min()} examples cannot have exactly {self.classes} of {len(present)} "
                f"classes each; expected at most {min(len(present), sizes.min())} classes per client, "
                "and enough clients to hold all classes"
            )
        clients_per_class = _clients_per_class(present_counts, clients, pairs)
        # Large problems get fewer attempts: each takes longer, and nearly all or nearly none of them succeed.
        attempts = max(3, min(MAX_ATTEMPTS, 5_000_000 // (clients * len(present))))
        if clients_per_class.sum() < pairs:
            attempts = 0  # the classes have too few examples for that many holders, so there is no assignment to try
        for _ in range(attempts):
            assignment = _draw_assignment(clients_per_class, clients, self.classes, rng)
            balanced = _balanced_counts(assignment, sizes, present_counts)
            if balanced is not None:
                counts = np.zeros((clients, len(examples_per_class)), dtype=np.int64)
                counts[:, present] = balanced
                return counts
        raise UserError(
            f"cannot give {clients} clients equal sizes and exactly {self.classes} classes each from classes of "
            f"{present_counts.min()} to {present_counts.max()} examples; "
            "try other numbers, or dirichlet(alpha=0)"
        )


def _clients_per_class(examples_per_class: IntArray, clients: int, pairs: int) -> IntArray:
    """Return how many clients hold each class [classes]: in proportion to its size, at least 1, at most all clients.

    Uses D'Hondt's method, as for seats in a parliament: the k-th holder of a class with m examples has the quotient
    m / k, and the holders with the largest quotients are chosen. A class cannot have more holders than examples.

    Args:
        examples_per_class: number of examples of each class, all above 0 [classes].
        clients: number of clients.
        pairs: total number of holders, i.e. of pairs of a client and a class that it holds.
    """
    divisors = np.arange(1, clients + 1)
    quotients = np.where(divisors <= examples_per_class[:, None], examples_per_class[:, None] / divisors, 0)
    quotients[:, 0] = np.inf  # every class has at least one client
    chosen = np.argsort(-quotients, axis=None, kind="stable")[: min(pairs, np.count_nonzero(quotients))]
    class_of_chosen = chosen // clients  # quotients has one row of length ``clients`` per class
    return np.bincount(class_of_chosen, minlength=len(examples_per_class))


def _draw_assignment(
    clients_per_class: IntArray, clients: int, classes_per_client: int, rng: np.random.Generator
) -> Assignment:
    """Draw which client holds which class, [clients, classes].

    Args:
        clients_per_class: number of clients that hold each class [classes].
        clients: number of clients.
        classes_per_client: number of classes that each client holds.
        rng: source of randomness.
    """
    assignment = np.zeros((clients, len(clients_per_class)), dtype=bool)
    needed = clients_per_class.copy()  # clients that each class still needs
    for client in range(clients):
        # The classes with the largest keys (log weight + Gumbel noise) are a random draw without replacement, with
        # probabilities in proportion to the weights, here the numbers of clients still needed.
        with np.errstate(divide="ignore"):
            keys = np.log(needed) + rng.gumbel(size=len(needed))
        # A class that needs every remaining client must be taken now; then the assignment can always be completed.
        keys[needed == clients - client] = np.inf
        chosen = np.argsort(-keys, kind="stable")[:classes_per_client]
        assignment[client, chosen] = True
        needed[chosen] -= 1
    return assignment


def _balanced_counts(assignment: Assignment, sizes: IntArray, examples_per_class: IntArray) -> IntArray | None:
    """Find counts [clients, classes] whose smallest non-zero entry is as large as possible, by bisection.

    Returns None if no counts have the given row and column sums.

    Args:
        assignment: which client holds which class [clients, classes].
        sizes: number of examples of each client [clients].
        examples_per_class: number of examples of each class [classes].
    """
    best = None
    # The smallest entry is at most the mean entry of any client or class.
    low, high = 1, int(min((sizes // assignment.sum(1)).min(), (examples_per_class // assignment.sum(0)).min()))
    while low <= high:
        middle = (low + high + 1) // 2
        counts = _feasible_counts(assignment, sizes, examples_per_class, middle)
        if counts is None:
            high = middle - 1
        else:
            best, low = counts, middle + 1
    return best


def _feasible_counts(
    assignment: Assignment, sizes: IntArray, examples_per_class: IntArray, least: int
) -> IntArray | None:
    """Find how many examples of each class every client gets, [clients, classes]; None if it is impossible.

    Row sums are the clients' sizes, and column sums the classes' sizes. Every client gets ``least`` examples of each
    class it holds. The remaining examples are distributed as a maximum flow: from a source to the clients, from each
    client to the classes it holds, and from the classes to a sink. Capacities are the numbers of remaining examples,
    so a flow that fills all clients is a solution.

    Args:
        assignment: which client holds which class [clients, classes].
        sizes: number of examples of each client, the row sums [clients].
        examples_per_class: number of examples of each class, the column sums [classes].
        least: smallest count for a class that a client holds.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = assignment.shape
    client, label = np.nonzero(assignment)  # one entry per pair of a client and a class it holds
    # Examples that each client still needs, and that remain of each class, after ``least`` per pair.
    needed, remaining = sizes - least * assignment.sum(1), examples_per_class - least * assignment.sum(0)
    # Nodes of the graph: the clients, the classes, the source, the sink.
    client_nodes, class_nodes = np.arange(clients), clients + np.arange(classes)
    source, sink = clients + classes, clients + classes + 1
    # Edges: source to clients, clients to their classes, classes to sink.
    tails = np.concatenate([np.full(clients, source), client, class_nodes])
    heads = np.concatenate([client_nodes, class_nodes[label], np.full(classes, sink)])
    capacity = np.concatenate([needed, needed[client], remaining]).astype(np.int32)
    result = maximum_flow(csr_array((capacity, (tails, heads)), shape=(sink + 1, sink + 1)), source, sink)
    if result.flow_value < needed.sum():  # some clients cannot be filled
        return None
    counts = np.zeros(assignment.shape, dtype=np.int64)
    counts[client, label] = result.flow.toarray()[client, class_nodes[label]] + least
    return counts
