"""Server optimisers: how far the server follows the displacement q = target - x."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.slot import Fields, Slot, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class Sgd(Slot):
    """x <- x + server_lr q; FedSWA's alpha is a server_lr above 1."""

    server_lr: float = param(1.0, "how far the server follows (FedSWA's alpha)", above=0)

    def step(self, x: Tensor, q: Tensor, state: State) -> tuple[Tensor, State]:
        """The new model and the optimiser's new state."""
        return x + self.server_lr * q, {}

    def may_explode(self) -> str:
        return f"server_lr={self.server_lr:g} overshoots what the clients found: lower it" if self.server_lr > 2 else ""


@dataclass(frozen=True)
class Momentum(Sgd):
    """m <- beta m + q, x <- x + server_lr m (FedAvgM; Hsu et al. 2019)."""

    beta: float = param(0.9, "how much of the momentum stays", low=0, high=1)

    def on_server(self) -> Fields:
        return (vector("m", sent=False),)

    def step(self, x: Tensor, q: Tensor, state: State) -> tuple[Tensor, State]:
        m = self.beta * state["m"] + q
        return x + self.server_lr * m, {"m": m}

    def may_explode(self) -> str:
        gain = f"{1 / (1 - self.beta):.0f} times" if self.beta < 1 else "without bound"
        return f"server momentum beta={self.beta} adds up displacements {gain}: lower beta or server_lr"


@dataclass(frozen=True)
class Adaptive(Sgd, ABC):
    """m <- beta1 m + (1 - beta1) q, x <- x + server_lr m / (sqrt(v) + tau) (FedOpt; Reddi et al. 2021, Algorithm 2)."""

    server_lr: float = param(0.1, "how far the server follows", above=0)
    beta1: float = param(0.9, "how much of the momentum stays", low=0, high=1)
    tau: float = param(1e-3, "added to sqrt(v)", above=0)
    v_init: float | None = param(None, "v before the first round; none is tau^2", low=0)
    bias_correction: bool = param(False, "whether m and v are corrected for their start, as in Keras and torch")
    second_moment_of: Literal["displacement", "momentum"] = param(
        "displacement", "what is squared: q, or m as in one version of the paper"
    )

    def on_server(self) -> Fields:
        start = self.tau**2 if self.v_init is None else self.v_init
        return (vector("m", sent=False), vector("v", sent=False, start=start), scalar("t", sent=False))

    @abstractmethod
    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """The new v."""

    def corrected(self, v: Tensor, t: Tensor) -> Tensor:
        """v without the bias of its start; a sum has none."""
        return v

    def step(self, x: Tensor, q: Tensor, state: State) -> tuple[Tensor, State]:
        m = self.beta1 * state["m"] + (1 - self.beta1) * q
        v = self.second_moment(state["v"], (q if self.second_moment_of == "displacement" else m) ** 2)
        t = state["t"] + 1
        m_hat, v_hat = (m / (1 - self.beta1**t), self.corrected(v, t)) if self.bias_correction else (m, v)
        return x + self.server_lr * m_hat / (v_hat.sqrt() + self.tau), {"m": m, "v": v, "t": t}


@dataclass(frozen=True)
class Fading(Adaptive, ABC):
    """Adaptive with a v that is an average over the last rounds."""

    beta2: float = param(0.99, "how much of the second moment stays", low=0, high=1)

    def corrected(self, v: Tensor, t: Tensor) -> Tensor:
        return v / (1 - self.beta2**t)


@dataclass(frozen=True)
class Adam(Fading):
    """v <- beta2 v + (1 - beta2) q^2; m <- beta1 m + (1 - beta1) q; x <- x + server_lr m / (sqrt(v) + tau) (Reddi et al. 2021)."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class Yogi(Fading):
    """FedYogi: v <- v - (1 - beta2) q^2 sign(v - q^2), otherwise as FedAdam (Reddi et al. 2021)."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * (v - squared).sign()


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """FedAdagrad: v <- v + q^2, otherwise as FedAdam with beta1 = 0 (Reddi et al. 2021)."""

    beta1: float = param(0.0, "how much of the momentum stays", low=0, high=1)

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


SERVERS: dict[str, type[Sgd]] = {"sgd": Sgd, "momentum": Momentum, "adam": Adam, "yogi": Yogi, "adagrad": Adagrad}
