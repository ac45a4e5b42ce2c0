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
ALPHA_HELP = "concentration: smaller values give clients fewer classes; 0: one class per client"


@dataclass(frozen=True)
class Dirichlet(ClassCountPartitioner):
    """Each client draws q ~ Dir(alpha), then equally many examples with classes from q, without replacement.

    When a class is exhausted, clients that need more examples draw again from q renormalised over the remaining classes
    (Acar et al. 2021).
    """

    sizes: ClassVar[str] = "equal or lognormal"
    citation: ClassVar[str] = "Acar et al. 2021 (FedDyn)"
    examples: ClassVar[tuple[str, ...]] = ("dirichlet(alpha=0.6)", "dirichlet(alpha=0.1)", "dirichlet(alpha=0)")
    alpha: float = param(0.1, ALPHA_HELP, low=0)
    sigma: float = param(0.0, SIGMA_HELP, low=0, high=10)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        sizes = partial(client_sizes, sigma=self.sigma, rng=rng)
        if self.alpha == 0:
            return one_class_each(available, clients, sizes)
        log_priors = log_dirichlet(self.alpha, (clients, len(available)), rng)
        return ration(available, sizes(int(available.sum()), clients), lambda open: softmax(log_priors[:, open]), rng)


@dataclass(frozen=True)
class DirichletReuse(ClassCountPartitioner):
    """As ``dirichlet``, but an exhausted class starts again: some examples are used twice, others never.

    This is the partition in the released code of FedSWA, FL-Simulator, FedLESAM and FedWMSAM.
    """

    disjoint: ClassVar[bool] = False
    sizes: ClassVar[str] = "equal or lognormal"
    citation: ClassVar[str] = "released code of FedSWA, FedWMSAM, FedLESAM and FL-Simulator"
    examples: ClassVar[tuple[str, ...]] = ("dirichlet-reuse(alpha=0.1)",)
    alpha: float = param(0.1, ALPHA_HELP, low=0)
    sigma: float = param(0.0, SIGMA_HELP, low=0, high=10)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        sizes = partial(client_sizes, sigma=self.sigma, rng=rng)
        if self.alpha == 0:
            return one_class_each(available, clients, sizes)
        present = np.flatnonzero(available)
        counts = np.zeros((clients, len(available)), dtype=np.int64)
        priors = softmax(log_dirichlet(self.alpha, (clients, len(available)), rng)[:, present])
        counts[:, present] = rng.multinomial(sizes(int(available.sum()), clients), priors)
        return counts


@dataclass(frozen=True)
class DirichletClasswise(ClassCountPartitioner):
    """Each class is distributed over the clients by a draw from Dir(alpha), so client sizes vary.

    A client that would be empty gets one example of the most frequent class of the largest client.
    """

    sizes: ClassVar[str] = "variable"
    citation: ClassVar[str] = "Yurochkin et al. 2019; Flower's `DirichletPartitioner`"
    examples: ClassVar[tuple[str, ...]] = ("dirichlet-classwise(alpha=0.1)",)
    alpha: float = param(0.1, ALPHA_HELP, low=0)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        if self.alpha == 0:
            return one_class_each(available, clients)
        shares = softmax(log_dirichlet(self.alpha, (len(available), clients), rng))
        cuts = np.rint(np.cumsum(shares, axis=1) * available[:, None]).astype(np.int64)
        cuts[:, -1] = available
        counts = np.diff(cuts, axis=1, prepend=0).T.copy()
        sizes = counts.sum(1)
        for empty in np.flatnonzero(sizes == 0):
            largest = sizes.argmax()
            frequent = counts[largest].argmax()
            counts[[largest, empty], frequent] += (-1, 1)
            sizes[[largest, empty]] += (-1, 1)
        return counts


def ration(
    available: IntArray, sizes: IntArray, priors: Callable[[IntArray], Reals], rng: np.random.Generator
) -> IntArray:
    """Draw class counts for all clients at once; scarce classes are rationed at random, and short clients draw again.

    Args:
        available: number of examples of each class [classes].
        sizes: number of examples of each client [clients].
        priors: maps the indices of the remaining classes to every client's distribution over them [clients, remaining].
        rng: source of randomness.

    Returns:
        Counts [clients, classes] with row sums ``sizes``.
    """
    left, wanted = available.copy(), sizes.copy()
    given = np.zeros((len(sizes), len(available)), dtype=np.int64)
    # A client is short only if a class was exhausted, so there are at most as many iterations as classes.
    while wanted.any():
        open_classes = np.flatnonzero(left)
        asked = rng.multinomial(wanted, priors(open_classes))
        for column in np.flatnonzero(asked.sum(0) > left[open_classes]):
            asked[:, column] = rng.multivariate_hypergeometric(asked[:, column], left[open_classes[column]])
        given[:, open_classes] += asked
        left[open_classes] -= asked.sum(0)
        wanted -= asked.sum(1)
    return given


def one_class_each(available: IntArray, clients: int, sizes: Callable[[int, int], IntArray] = equal_sizes) -> IntArray:
    """Counts [clients, classes] with one class per client; classes have nearly equally many clients.

    Args:
        available: number of examples of each class [classes].
        clients: number of clients.
        sizes: divides the examples of a class among its clients.

    >>> one_class_each(np.array([6, 4]), 3).tolist()
    [[3, 0], [3, 0], [0, 4]]
    """
    present = np.count_nonzero(available)
    if clients < present:
        raise UserError(
            f"alpha=0 gives every client one class, but there are {present} classes and only {clients} clients; "
            f"expected at least {present} clients"
        )
    # A class with m examples has room for m clients: fill first places over all classes, then second places, ...
    class_of_place = np.repeat(np.arange(len(available)), available)
    place = np.concatenate([np.arange(count) for count in available])
    taken = np.lexsort((class_of_place, -available[class_of_place], place))[:clients]
    holders = np.bincount(class_of_place[taken], minlength=len(available))
    counts = np.zeros((clients, len(available)), dtype=np.int64)
    first = 0
    for label in np.flatnonzero(holders):
        counts[first : first + holders[label], label] = sizes(int(available[label]), int(holders[label]))
        first += holders[label]
    return counts


def log_dirichlet(alpha: float | Reals, shape: tuple[int, int], rng: np.random.Generator) -> Reals:
    """Logarithms of unnormalised Dir(alpha) rows, for any alpha above 0, scalar or per class.

    In logarithms no share is zero, so rows can be renormalised over any subset of classes. Gamma variables of a small
    shape a underflow, hence log G(a) = log G(a + 1) + log(U) / a.
    """
    bounded = np.clip(alpha, 1e-300, 1e300)
    logs: Reals = np.log(rng.standard_gamma(bounded + 1, shape)) + np.log1p(-rng.random(shape)) / bounded
    return logs


def softmax(logs: Reals) -> Reals:
    """Rows of shares from rows of logarithms."""
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares: Reals = weights / weights.sum(axis=1, keepdims=True)
    return shares
