"""Label skew by the Dirichlet distribution: three partitioners that the literature calls by one name.

In all of them ``alpha=0`` is the limit of one class per client (as in Caldarola et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedflat.data.partitioners.partitioner import SIGMA_HELP, ClassCountPartitioner, IntArray, client_sizes, equal_sizes
from fedflat.errors import UserError
from fedflat.text import param

Reals = npt.NDArray[np.float64]
Priors = Callable[[IntArray], Reals]
"""Maps the indices of some classes to every client's distribution over them [clients, classes]."""
ALPHA_HELP = "concentration: smaller values give clients fewer classes; 0: one class per client"


@dataclass(frozen=True)
class Dirichlet(ClassCountPartitioner):
    """Each client draws class probabilities q ~ Dir(alpha), then its examples according to q, without replacement.

    All clients get the same number of examples (or lognormal numbers, with ``sigma``). When a class is exhausted,
    clients that need more examples draw again from q renormalised over the remaining classes (Acar et al. 2021).
    """

    sizes = "equal or lognormal"
    citation = "Acar et al. 2021 (FedDyn)"
    examples: ClassVar[tuple[str, ...]] = ("dirichlet(alpha=0.6)", "dirichlet(alpha=0.1)", "dirichlet(alpha=0)")
    alpha: float = param(0.1, ALPHA_HELP, low=0, positional=True)
    sigma: float = param(0.0, SIGMA_HELP, low=0, high=10)

    def counts(self, examples_per_class: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        draw_sizes = partial(client_sizes, sigma=self.sigma, rng=rng)  # (examples, clients) -> size of each client
        if self.alpha == 0:
            return one_class_per_client(examples_per_class, clients, draw_sizes)
        log_priors = log_dirichlet(self.alpha, (clients, len(examples_per_class)), rng)
        sizes = draw_sizes(int(examples_per_class.sum()), clients)
        draw = draw_class_counts if self.disjoint else draw_reused_classes
        # Every client's class distribution q is renormalised over the remaining classes.
        return draw(examples_per_class, sizes, lambda remaining: softmax(log_priors[:, remaining]), rng)


@dataclass(frozen=True)
class DirichletReuse(Dirichlet):
    """Like ``dirichlet``, but the examples of an exhausted class are assigned again: some go to several clients.

    The clients together get as many examples as the training set has; since some are assigned several times, others go
    to no client.

    This is the partition in the released code of FedSWA, FL-Simulator, FedLESAM and FedWMSAM.
    """

    disjoint = False
    citation = "released code of FedSWA, FedWMSAM, FedLESAM and FL-Simulator"
    examples = ("dirichlet-reuse(alpha=0.1)",)


@dataclass(frozen=True)
class DirichletClasswise(ClassCountPartitioner):
    """The examples of each class are distributed over the clients in proportions drawn from Dir(alpha).

    The number of examples therefore varies between clients.

    A client that would be empty gets one example of the most frequent class of the largest client.
    """

    sizes = "variable"
    citation = "Yurochkin et al. 2019; Flower's `DirichletPartitioner`"
    examples = ("dirichlet-classwise(alpha=0.1)",)
    alpha: float = param(0.1, ALPHA_HELP, low=0)

    def counts(self, examples_per_class: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        if self.alpha == 0:
            return one_class_per_client(examples_per_class, clients)
        shares = softmax(log_dirichlet(self.alpha, (len(examples_per_class), clients), rng))
        # The examples of each class are cut at rounded positions, so that every example is used.
        cuts = np.rint(np.cumsum(shares, axis=1) * examples_per_class[:, None]).astype(np.int64)
        cuts[:, -1] = examples_per_class
        counts = np.diff(cuts, axis=1, prepend=0).T.copy()
        sizes = counts.sum(1)
        for empty in np.flatnonzero(sizes == 0):  # move one example from the largest client to the empty one
            largest = sizes.argmax()
            most_frequent = counts[largest].argmax()
            for client, change in ((largest, -1), (empty, 1)):
                counts[client, most_frequent] += change
                sizes[client] += change
        return counts


def draw_class_counts(
    examples_per_class: IntArray, sizes: IntArray, priors: Priors, rng: np.random.Generator
) -> IntArray:
    """Draw class counts for all clients at once, without using more examples than there are.

    Scarce classes are rationed at random among the clients that drew them; clients left short draw again.

    Args:
        examples_per_class: number of examples of each class [classes].
        sizes: number of examples of each client [clients].
        priors: every client's distribution over the remaining classes.
        rng: source of randomness.

    Returns:
        Counts [clients, classes] with row sums ``sizes``.
    """
    unused, missing = examples_per_class.copy(), sizes.copy()
    counts = np.zeros((len(sizes), len(examples_per_class)), dtype=np.int64)
    # A client is short only if a class was exhausted, so there are at most as many iterations as classes.
    while missing.any():
        remaining = np.flatnonzero(unused)
        drawn = rng.multinomial(missing, priors(remaining))
        for column in np.flatnonzero(drawn.sum(0) > unused[remaining]):
            # The clients drew more examples of this class than are left: choose which of them get one.
            drawn[:, column] = rng.multivariate_hypergeometric(drawn[:, column], unused[remaining[column]])
        counts[:, remaining] += drawn
        unused[remaining] -= drawn.sum(0)
        missing -= drawn.sum(1)
    return counts


def draw_reused_classes(
    examples_per_class: IntArray, sizes: IntArray, priors: Priors, rng: np.random.Generator
) -> IntArray:
    """Like ``draw_class_counts``, but a class may be drawn more often than it occurs."""
    present = np.flatnonzero(examples_per_class)  # classes without examples are never drawn
    counts = np.zeros((len(sizes), len(examples_per_class)), dtype=np.int64)
    counts[:, present] = rng.multinomial(sizes, priors(present))
    return counts


def one_class_per_client(
    examples_per_class: IntArray, clients: int, split_class: Callable[[int, int], IntArray] = equal_sizes
) -> IntArray:
    """Return counts [clients, classes] with one class per client: the limit of Dir(alpha) as alpha approaches 0.

    Clients are spread over the classes as evenly as possible.

    Args:
        examples_per_class: number of examples of each class [classes].
        clients: number of clients.
        split_class: divides a number of examples among a number of clients.

    >>> one_class_per_client(np.array([6, 4]), 3).tolist()
    [[3, 0], [3, 0], [0, 4]]
    """
    present = np.count_nonzero(examples_per_class)
    if clients < present:
        raise UserError(
            f"alpha=0 gives every client one class, but there are {present} classes and only {clients} clients; "
            f"use at least {present} clients: --clients {present}, in Python clients={present}"
        )
    # A class with m examples has m slots for clients, ranked 0 to m - 1. Clients take all slots of rank 0, then those
    # of rank 1, and so on; within a rank, larger classes come first.
    class_of_slot = np.repeat(np.arange(len(examples_per_class)), examples_per_class)
    rank_of_slot = np.concatenate([np.arange(count) for count in examples_per_class])
    used_slots = np.lexsort((class_of_slot, -examples_per_class[class_of_slot], rank_of_slot))[:clients]
    clients_per_class = np.bincount(class_of_slot[used_slots], minlength=len(examples_per_class))
    counts = np.zeros((clients, len(examples_per_class)), dtype=np.int64)
    first = 0
    for label in np.flatnonzero(clients_per_class):
        last = first + clients_per_class[label]
        counts[first:last, label] = split_class(int(examples_per_class[label]), int(clients_per_class[label]))
        first = last
    return counts


def log_dirichlet(alpha: float | Reals, shape: tuple[int, int], rng: np.random.Generator) -> Reals:
    """Draw rows from Dir(alpha), as logarithms of unnormalised shares; ``softmax`` turns them into shares.

    In logarithms no share is zero, so rows can be renormalised over any subset of classes. A gamma variable G(a) with a
    small shape parameter a underflows, hence log G(a) = log G(a + 1) + log(U) / a with U uniform.

    Args:
        alpha: concentration above 0, a scalar or one per column.
        shape: number of rows, and entries per row.
        rng: source of randomness.
    """
    bounded = np.clip(alpha, 1e-300, 1e300)
    log_gamma = np.log(rng.standard_gamma(bounded + 1, shape))
    log_uniform = np.log1p(-rng.random(shape))  # 1 - random() is never 0
    logs: Reals = log_gamma + log_uniform / bounded
    return logs


def softmax(logs: Reals) -> Reals:
    """Convert rows of logarithms to rows of shares that sum to 1."""
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares: Reals = weights / weights.sum(axis=1, keepdims=True)
    return shares
