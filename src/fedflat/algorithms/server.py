"""Server optimisers: move the server model x along q = target - x, towards the target of the drift correction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Slot
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.errors import UserError
from fedflat.registry import Registry
from fedflat.text import param


@dataclass(frozen=True)
class Sgd(Slot):
    """The server takes an SGD step towards the target, with learning rate ``server_lr``.

        x <- x + server_lr q

    - x: server model
    - q: target - x, the vector from the server model to the target
    - target: model that the drift correction computes; by default, the mean of the clients' models after local training

    If ``server_lr`` is above 1, the server steps beyond the target (over-relaxation). FedSWA calls this learning rate
    alpha.

    >>> from torch import tensor
    >>> Sgd(server_lr=1.5).step(tensor([1.0, 2.0]), tensor([0.2, -0.2]), {})
    (tensor([1.3000, 1.7000]), {})
    """

    server_lr: float = param(1.0, "learning rate of the server (alpha in FedSWA)", above=0)

    def step(self, x: Tensor, q: Tensor, state: State) -> tuple[Tensor, State]:
        """Move the server model by one step.

        Args:
            x: server model, shape (P,).
            q: target - x, shape (P,), with the target model from the drift correction (by default the clients' mean);
                plays the role of a negative gradient.
            state: this slot's server state, e.g. its momentum.

        Returns:
            The new model of shape (P,), and the fields of the state that changed.
        """
        return x + self.server_lr * q, {}

    def measure(self, displacement: Tensor) -> State:
        """Return the scalars that ``sends`` declares, which a client computes from its displacement, shape (P,)."""
        return {}

    def aggregate(self, means: CohortMeans, q: Tensor, state: State) -> tuple[Tensor, State]:
        """Move the server model means.x by one step; by default as ``step`` does, which needs no means.

        Args:
            means: averages over the cohort; ``means.mean`` holds those of the scalars that clients measured.
            q: target - x, shape (P,), with the target model from the drift correction.
            state: this slot's server state.
        """
        return self.step(means.x, q, state)

    def divergence_hint(self) -> str | None:
        """Return why a ``server_lr`` above 2 may make a run diverge, or None for smaller values."""
        if self.server_lr <= 2:
            return None
        return f"server_lr={self.server_lr:g} extrapolates far beyond the clients' mean; lower it"


@dataclass(frozen=True)
class Momentum(Sgd):
    """The server takes SGD steps with heavy-ball momentum (FedAvgM; Hsu et al. 2019).

        m <- beta m + q
        x <- x + server_lr m

    - x: server model
    - m: momentum of the server
    - q: target - x, the vector from the server model to the target
    - target: model that the drift correction computes; by default, the mean of the clients' models after local training

    >>> from torch import tensor
    >>> Momentum(beta=0.5).step(tensor([1.0, 2.0]), tensor([0.2, -0.2]), {"m": tensor([0.4, 0.4])})
    (tensor([1.4000, 2.0000]), {'m': tensor([0.4000, 0.0000])})
    """

    beta: float = param(0.9, "momentum coefficient: weight of the previous momentum m", low=0, high=1)

    def on_server(self) -> Fields:
        return (vector("m", sent=False, momentum="descent"),)

    def step(self, x: Tensor, q: Tensor, state: State) -> tuple[Tensor, State]:
        m = self.beta * state["m"] + q
        return x + self.server_lr * m, {"m": m}

    def divergence_hint(self) -> str | None:
        gain = f"{1 / (1 - self.beta):.0f}-fold" if self.beta < 1 else "without bound"
        return f"server momentum beta={self.beta} amplifies displacements {gain}; lower beta or server_lr"


@dataclass(frozen=True)
class Adaptive(Sgd, ABC):
    """Adaptive server optimisers of FedOpt (Reddi et al. 2021, Algorithm 2).

        m <- beta1 m + (1 - beta1) q
        x <- x + server_lr m / (sqrt(v) + tau)

    - x: server model
    - q: target - x, the vector from the server model to the target
    - target: model that the drift correction computes; by default, the mean of the clients' models after local training
    - m, v: first and second moment of q; each subclass updates v in its own way
    """

    server_lr: float = param(0.1, "learning rate of the server", above=0)
    beta1: float = param(0.9, "decay of the first moment m", low=0, high=1)
    tau: float = param(1e-3, "constant added to sqrt(v), which keeps the step finite", above=0, high=1e15)
    v_init: float | None = param(
        None, "initial value of v; if not set, tau^2 (Adam and Yogi with bias_correction: 0)", low=0, high=1e9
    )
    bias_correction: bool = param(False, "whether to correct m and v for starting at 0, as Keras and torch do")
    second_moment_of: Literal["displacement", "momentum"] = param(
        "displacement",
        "whether v averages squares of q (displacement) or, as in one version of the paper, of m (momentum)",
    )

    def __post_init__(self) -> None:
        """Reject decays of 1 with bias correction, which would divide by zero."""
        for name in ("beta1", "beta2"):
            if self.bias_correction and getattr(self, name, 0) == 1:
                raise UserError(f"{name}=1 has no bias correction; use a smaller {name} or bias_correction=false")

    @property
    def start(self) -> float:
        """Initial value of v."""
        return self.tau**2 if self.v_init is None else self.v_init

    def on_server(self) -> Fields:
        """Declare the moments m and v, and the number of rounds t for bias correction; clients receive none of them."""
        return (
            vector("m", sent=False, momentum="descent"),
            vector("v", sent=False, start=self.start),
            scalar("t", sent=False),
        )

    @abstractmethod
    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the new v, given the old one and ``squared``, which is q^2 or m^2; all have shape (P,)."""

    def corrected(self, v: Tensor, t: Tensor) -> Tensor:
        """Return v after ``t`` rounds, corrected for its start at 0; by default unchanged, for a v that is a sum."""
        return v

    def step(self, x: Tensor, q: Tensor, state: State) -> tuple[Tensor, State]:
        m = self.beta1 * state["m"] + (1 - self.beta1) * q
        squared = q**2 if self.second_moment_of == "displacement" else m**2
        v = self.second_moment(state["v"], squared)
        t = state["t"] + 1
        m_hat, v_hat = m, v  # only the uncorrected moments are stored
        if self.bias_correction:
            m_hat, v_hat = m / (1 - self.beta1**t), self.corrected(v, t)
        return x + self.server_lr * m_hat / (v_hat.sqrt() + self.tau), {"m": m, "v": v, "t": t}


@dataclass(frozen=True)
class ExponentialAdaptive(Adaptive, ABC):
    """Adaptive optimisers whose second moment v forgets old rounds."""

    beta2: float = param(0.99, "decay of the second moment v", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction and self.v_init:
            raise UserError(f"bias_correction=true assumes that v starts at 0; remove v_init={self.v_init:g}")

    @property
    def start(self) -> float:
        return 0.0 if self.bias_correction else super().start

    def corrected(self, v: Tensor, t: Tensor) -> Tensor:
        return v / (1 - self.beta2**t)


@dataclass(frozen=True)
class Adam(ExponentialAdaptive):
    """The server takes Adam steps (FedAdam; Reddi et al. 2021, Algorithm 2).

        m <- beta1 m + (1 - beta1) q
        v <- beta2 v + (1 - beta2) q^2
        x <- x + server_lr m / (sqrt(v) + tau)

    - x: server model
    - q: target - x, the vector from the server model to the target
    - target: model that the drift correction computes; by default, the mean of the clients' models after local training
    - m, v: moving averages of q and q^2

    All operations are elementwise.

    >>> from torch import tensor
    >>> state = {"m": tensor([0.0, 0.0]), "v": tensor([0.0, 0.0]), "t": tensor(0.0)}
    >>> adam = Adam(server_lr=0.1, beta1=0.5, beta2=0.75, tau=1.0)
    >>> x, state = adam.step(tensor([1.0, 2.0]), tensor([2.0, -4.0]), state)
    >>> state["m"], state["v"], x  # 1 + 0.1 * 1 / (sqrt(1) + 1)
    (tensor([ 1., -2.]), tensor([1., 4.]), tensor([1.0500, 1.9333]))
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class Yogi(ExponentialAdaptive):
    """The server takes Yogi steps (FedYogi; Reddi et al. 2021, Algorithm 2).

        m <- beta1 m + (1 - beta1) q
        v <- v - (1 - beta2) q^2 sign(v - q^2)
        x <- x + server_lr m / (sqrt(v) + tau)

    - x: server model
    - q: target - x, the vector from the server model to the target
    - target: model that the drift correction computes; by default, the mean of the clients' models after local training
    - m: moving average of q
    - v: second moment, which moves towards q^2 by a step whose size depends on q^2 only

    All operations are elementwise.

    >>> from torch import tensor
    >>> Yogi(beta2=0.75).second_moment(v=tensor([1.0, 5.0]), squared=tensor([4.0, 4.0]))
    tensor([2., 4.])
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * (v - squared).sign()


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """The server takes Adagrad steps (FedAdagrad; Reddi et al. 2021, Algorithm 2).

        m <- beta1 m + (1 - beta1) q
        v <- v + q^2
        x <- x + server_lr m / (sqrt(v) + tau)

    - x: server model
    - q: target - x, the vector from the server model to the target
    - target: model that the drift correction computes; by default, the mean of the clients' models after local training
    - m: moving average of q
    - v: sum of q^2 over all rounds

    All operations are elementwise.

    >>> from torch import tensor
    >>> Adagrad().second_moment(v=tensor([1.0, 5.0]), squared=tensor([4.0, 4.0]))
    tensor([5., 9.])
    """

    beta1: float = param(0.0, "decay of the first moment m", low=0, high=1)

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@dataclass(frozen=True)
class Extrapolation(Sgd):
    """The more the displacements disagree, the larger the server's step (FedExP; Jhunjhunwala et al. 2023).

        eta_s = max(server_lr, mean_S ||D_i||^2 / (2 ||mean_S D_i||^2 + 2 eps))
        x <- x + eta_s q

    - x: server model
    - eta_s: learning rate of the server
    - q: target - x, the vector from the server model to the target
    - target: model that the drift correction computes; by default, the mean of the clients' models after local training
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - mean_S: mean over the round's cohort S, with the weights that displacements have in the run

    Each client sends the scalar ||D_i||^2. Without a drift correction, q is mean_S D_i. The paper evaluates the mean of
    the last two server models, which is the average ``wima(window=2)``.

    >>> from torch import tensor
    >>> from fedflat.testing import cohort_means
    >>> fedexp = Extrapolation(eps=0.0)
    >>> [fedexp.measure(d)["square"].item() for d in (tensor([3.0, 1.0]), tensor([-1.0, 1.0]))]  # their mean is 6
    [10.0, 2.0]
    >>> means = cohort_means(z=[1.0, 2.0], displacement=[1.0, 1.0], mean={"square": 6.0})
    >>> fedexp.aggregate(means, means.displacement, {})  # eta_s = 6 / (2 * 2)
    (tensor([2.5000, 3.5000]), {})
    """

    server_lr: float = param(1.0, "smallest learning rate of the server", above=0)
    eps: float = param(1e-3, "constant that bounds the learning rate if displacements cancel", low=0)
    eps_scale: Literal["one", "cohort"] = param(
        "one", "factor of eps: 1, as in the paper (one), or the size of the cohort, as in the published code (cohort)"
    )
    eps_decay: float = param(
        1.0, "factor by which eps is multiplied before every round; 0.998^2 in the published code", above=0, high=1
    )

    def sends(self) -> Fields:
        return (scalar("square", weighting="aggregation"),)

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if getattr(slots["start"], "server", None) == "average":
            return "FedExP computes its learning rate from displacements; use relaxed(server=displacement)"
        if getattr(slots["drift"], "dual_scope", "all") == "active":
            return "FedExP needs displacements, which dual_scope=active does not upload; use dual_scope=all"
        return None

    def measure(self, displacement: Tensor) -> State:
        return {"square": displacement @ displacement}

    def aggregate(self, means: CohortMeans, q: Tensor, state: State) -> tuple[Tensor, State]:
        eps = self.eps * self.eps_decay ** (means.round + 1)
        if self.eps_scale == "cohort":
            eps *= means.cohort_size
        square_of_mean = means.displacement @ means.displacement
        # If all displacements are zero and eps is 0, the ratio is 0 / 0; fmax ignores NaN.
        ratio = means.mean["square"] / (2 * (square_of_mean + eps))
        return means.x + ratio.fmax(ratio.new_tensor(self.server_lr)) * q, {}

    def asynchronous_conflict(self) -> str | None:
        return "FedExP compares the clients' displacements with their mean, which staleness weights would change"

    def divergence_hint(self) -> str | None:
        return f"FedExP's server learning rate reaches mean |D_i|^2 / (2 eps) with eps={self.eps:g}; raise eps"


SERVERS: Registry[type[Sgd]] = Registry("server optimiser", see="fedflat algorithms", namespace="algorithm parts")
for _name, _optimiser in {
    "sgd": Sgd,
    "momentum": Momentum,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "exp": Extrapolation,
}.items():
    SERVERS.register(_name, _optimiser)
