"""The curvature of a loss in one call: its largest eigenvalues, its most negative one, its trace, its density."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fedflat.errors import UserError, one_of
from fedflat.flatness.curvature.density import Density, quadrature
from fedflat.flatness.curvature.lanczos import TOLERANCE, Eigenpairs, Ends, Largest, lanczos
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.curvature.power import power
from fedflat.flatness.curvature.trace import DRAWS, check_draws, hutchinson
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.objective import Objective

COUNT = 50
PRODUCTS = 4
"""About how many products Lanczos takes for each of many eigenvalues."""
COMPILE = ("auto", "on", "off")
WORTH = 120.0
"""Seconds of products from which compiling them pays."""
METHODS = ("lanczos", "power")
BY = ("value", "magnitude")


@dataclass(frozen=True)
class Spectrum:
    """What is known of a Hessian's eigenvalues."""

    eigenvalues: tuple[float, ...]
    """The largest, in descending order; by magnitude where they were asked for so."""
    residuals: tuple[float, ...]
    """|H v - lambda v| of each; an eigenvalue lies within that of each number."""
    lambda_min: float | None
    """The smallest eigenvalue: negative curvature, where there is any. Power iteration does not know it."""
    trace: Estimate | None
    density: Density | None
    method: str
    by: str
    converged: bool
    products: int
    """Hessian-vector products, all together."""
    seconds: float
    parameters: int
    examples: int
    loss: float
    precision: str

    @property
    def lambda_max(self) -> float:
        """The largest eigenvalue."""
        return max(self.eigenvalues)

    @property
    def ratio(self) -> float | None:
        """lambda_max / lambda_5, by which Jastrzebski et al. (2020) and Caldarola et al. (2022) describe how the spectrum falls off."""
        ordered = sorted(self.eigenvalues, reverse=True)
        return ordered[0] / ordered[4] if len(ordered) > 4 and ordered[4] else None

    @property
    def negative(self) -> int:
        """How many of the eigenvalues found are negative by more than their uncertainty."""
        low = 0 if self.lambda_min is None or self.lambda_min in self.eigenvalues else int(self.lambda_min < 0)
        return low + sum(value < -residual for value, residual in zip(self.eigenvalues, self.residuals, strict=True))

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("trace", "density")}
        return {
            "lambda_max": self.lambda_max,
            "lambda_max_over_lambda_5": self.ratio,
            **plain,
            "eigenvalues": list(self.eigenvalues),
            "residuals": list(self.residuals),
            "trace": self.trace.document() if self.trace else None,
            "density": self.density.document() if self.density else None,
        }


def spectrum_of(
    objective: Objective,
    count: int | None = None,
    *,
    method: str = "lanczos",
    by: str = "value",
    tolerance: float = TOLERANCE,
    iterations: int = 20,
    trace_draws: int = DRAWS,
    density_draws: int = 0,
    density_steps: int = 80,
    room: int | None = None,
    compile: str = "auto",
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Spectrum:
    """The spectrum of an objective's Hessian at its model's weights.

    ``by`` is ``value`` (the largest, and the smallest one besides) or ``magnitude``. Draws of 0 leave out trace or density.
    ``compile`` is ``on``, ``off`` or ``auto``: products are compiled on a GPU on which they would take more than two minutes.
    """
    if method not in METHODS:
        raise one_of("method for eigenvalues", method, METHODS)
    if by not in BY:
        raise one_of("order of eigenvalues", by, BY)
    count = min(COUNT, objective.size) if count is None else count
    if not 1 <= count <= objective.size:
        raise UserError(
            f"{count} eigenvalues of a model with {objective.size} parameters are not possible; ask for 1 to {objective.size}"
        )
    if trace_draws:
        check_draws(trace_draws)
    begun = time.monotonic()
    tell("checking that the loss is the same twice")
    objective.check()
    products = iterations * count if method == "power" else PRODUCTS * count
    if compile_where_it_pays(objective, compile, products + trace_draws + density_draws * density_steps):
        tell("compiling the Hessian product, for ten seconds to two minutes")
    operator = Operator.of_hessian(objective)

    def progress(products: int, found: int) -> None:
        tell(f"{min(found, count)} of {count} eigenvalues after {products} Hessian products")

    if method == "power":
        pairs = power(operator, count, iterations=iterations, seed=seed, tell=progress)
    else:
        wanted = Largest(count) if by == "magnitude" else Ends(count, 1 if count < objective.size else 0)
        pairs = lanczos(operator, wanted, tolerance=tolerance, room=room, seed=seed, tell=progress)
    trace = None
    if trace_draws:
        known: dict[str, Any] = {"values": pairs.values, "vectors": pairs.vectors} if method == "lanczos" else {}
        trace = hutchinson(
            operator,
            draws=trace_draws,
            seed=seed,
            **known,
            tell=lambda done: tell(f"trace: {done} of {trace_draws} draws"),
        )
    density = None
    if density_draws:
        steps = density_draws * min(density_steps, objective.size)
        density = quadrature(
            operator,
            draws=density_draws,
            steps=density_steps,
            seed=seed,
            tell=lambda done: tell(f"density: {done} of {steps} Hessian products"),
        )
    return _made(objective, operator, pairs, count, method, by, trace, density, time.monotonic() - begun)


def _made(
    objective: Objective,
    operator: Operator,
    pairs: Eigenpairs,
    count: int,
    method: str,
    by: str,
    trace: Estimate | None,
    density: Density | None,
    seconds: float,
) -> Spectrum:
    values, residuals = pairs.values[:count], pairs.residuals[:count]
    if method == "power":
        order = values.abs().argsort(descending=True) if by == "magnitude" else values.argsort(descending=True)
        values, residuals = values[order], residuals[order]
    lowest = float(pairs.values[-1]) if method == "lanczos" and by == "value" else None
    return Spectrum(
        tuple(values.tolist()),
        tuple(residuals.tolist()),
        lowest,
        trace,
        density,
        method,
        by,
        pairs.converged,
        operator.products,
        seconds,
        objective.size,
        objective.examples,
        float(objective.loss()),
        "tf32" if objective.tf32 and objective.device.type == "cuda" else str(objective.dtype).removeprefix("torch."),
    )


def compile_where_it_pays(objective: Objective, compile: str, products: int) -> bool:
    """Compile products where that is asked for; with ``auto``, on a GPU on which so many would take minutes. Whether it does.

    On a CPU, where numbers are the same to the last digit from run to run, nothing may hang on how fast it is at the moment.
    """
    if compile not in COMPILE:
        raise one_of("value of compile", compile, COMPILE)
    if compile == "on" or (
        compile == "auto" and objective.device.type == "cuda" and products * _seconds(objective) > WORTH
    ):
        objective.compile()
        return True
    return False


def _seconds(objective: Objective) -> float:
    """About how long a product takes, from one on the first batch."""
    first = objective.on(objective.batches[:1])
    for _ in range(2):  # the first chooses its kernels
        torch.cuda.synchronize(objective.device)
        begun = time.perf_counter()
        first.hessian_product(None, objective.weights)
        torch.cuda.synchronize(objective.device)
    return (time.perf_counter() - begun) * len(objective.batches)
