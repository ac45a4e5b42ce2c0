"""Label skew by the Dirichlet distribution, in the three partitioners that the literature calls by one name.

In all of them alpha = 0 stands for the limit in which every client has one class (as in Caldarola et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedflat.data.partitioners.partitioner import ByClass, IntArray
from fedflat.data.partitioners.sizes import SIGMA, client_sizes, equal_sizes
from fedflat.errors import UserError
from fedflat.text import param

Reals = npt.NDArray[np.float64]
_ALPHA = "concentration: the smaller, the fewer classes a client has; 0 is one class each"


@dataclass(frozen=True)
class Dirichlet(ByClass):
    """Every client draws q ~ Dir(alpha) and gets equally many examples, their classes drawn from q; every example is used once.

    When a class runs out, those who still want some of it draw again from q renormalised over the classes that are left
    (Acar et al. 2021; a true partition of equal, or lognormal, sizes).
    """

    alpha: float = param(0.1, _ALPHA, low=0)
    sigma: float = param(0.0, SIGMA, low=0, high=10)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """What rationing leaves of everyone's wishes."""
        sizes = partial(client_sizes, sigma=self.sigma, rng=rng)
        if self.alpha == 0:
            return one_class_each(available, clients, sizes)
        log_priors = log_dirichlet(self.alpha, (clients, len(available)), rng)
        return ration(available, sizes(int(available.sum()), clients), lambda open: softmax(log_priors[:, open]), rng)


@dataclass(frozen=True)
class DirichletReuse(ByClass):
    """As ``dirichlet``, but a class that runs out is dealt again from its beginning: some examples are used twice, others never.

    This is what the released code of FedSWA, FL-Simulator, FedLESAM and FedWMSAM does.
    """

    disjoint: ClassVar[bool] = False
    alpha: float = param(0.1, _ALPHA, low=0)
    sigma: float = param(0.0, SIGMA, low=0, high=10)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """What every client draws from its q, whether or not there is that much."""
        sizes = partial(client_sizes, sigma=self.sigma, rng=rng)
        if self.alpha == 0:
            return one_class_each(available, clients, sizes)
        present = np.flatnonzero(available)
        counts = np.zeros((clients, len(available)), dtype=np.int64)
        priors = softmax(log_dirichlet(self.alpha, (clients, len(available)), rng)[:, present])
        counts[:, present] = rng.multinomial(sizes(int(available.sum()), clients), priors)
        return counts


@dataclass(frozen=True)
class DirichletClasswise(ByClass):
    """Every class is divided over the clients by a draw from Dir(alpha), so that clients differ in size.

    A client that would come out empty gets one example of the most frequent class of the client that is largest at that moment.
    """

    alpha: float = param(0.1, _ALPHA, low=0)

    def counts(self, available: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """Each class cut at the cumulated shares of its draw."""
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
    """All clients ask at once, scarce classes are rationed by lot, and who went short asks again.

    ``priors`` gives everyone's distribution over the classes that are still open, [clients, open classes].
    """
    left, wanted = available.copy(), sizes.copy()
    given = np.zeros((len(sizes), len(available)), dtype=np.int64)
    # Someone goes short only when a class has run out, so that there are at most as many turns as classes.
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
    """Every client gets one class; a class is divided by ``sizes`` among its clients, of which classes have equally many, or nearly.

    >>> one_class_each(np.array([6, 4]), 3).tolist()
    [[3, 0], [3, 0], [0, 4]]
    """
    present = np.count_nonzero(available)
    if clients < present:
        raise UserError(
            f"alpha=0 gives every client one class, so that {present} classes need at least {present} clients, not {clients}"
        )
    # A class with m examples has room for m clients: fill first, second, ... places over all classes, large classes first.
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
    """Logarithms of unnormalised rows of Dir(alpha), for any alpha above 0, one for all classes or one for each.

    In logarithms no share is ever zero, so that it can be renormalised over whatever classes are left; log G(a) is
    log G(a + 1) + log(U) / a, since a gamma variable of shape a underflows for small a.
    """
    bounded = np.clip(alpha, 1e-300, 1e300)
    logs: Reals = np.log(rng.standard_gamma(bounded + 1, shape)) + np.log1p(-rng.random(shape)) / bounded
    return logs


def softmax(logs: Reals) -> Reals:
    """Rows of shares from rows of logarithms."""
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares: Reals = weights / weights.sum(axis=1, keepdims=True)
    return shares
