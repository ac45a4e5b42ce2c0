"""Curvature of a loss in one call: largest eigenvalues, smallest eigenvalue, trace and spectral density."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fedflat.errors import UserError, one_of
from fedflat.flatness.curvature.lanczos import TOLERANCE, Eigenpairs, Ends, Largest, lanczos
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.curvature.power import power
from fedflat.flatness.curvature.trace import DRAWS, Density, check_draws, hutchinson, quadrature
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.objective import Objective

COUNT = 50
PRODUCTS = 4
"""Approximate number of Lanczos products per eigenvalue."""
COMPILE = ("auto", "on", "off")
COMPILE_SECONDS = 120.0
"""Total seconds of products above which compilation pays off."""
METHODS = ("lanczos", "power")
BY = ("value", "magnitude")


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a Hessian, with estimates of its trace and density."""

    eigenvalues: tuple[float, ...]
    """The largest eigenvalues in descending order (of magnitude if ``by`` is ``magnitude``)."""
    residuals: tuple[float, ...]
    """|H v - lambda v| of each; the true eigenvalue lies within this distance."""
    lambda_min: float | None
    """The smallest (most negative) eigenvalue; None with power iteration."""
    trace: Estimate | None
    density: Density | None
    method: str
    by: str
    converged: bool
    products: int
    """Total number of Hessian-vector products."""
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
        """lambda_max / lambda_5, the decay measure of Jastrzebski et al. (2020) and Caldarola et al. (2022)."""
        ordered = sorted(self.eigenvalues, reverse=True)
        return ordered[0] / ordered[4] if len(ordered) > 4 and ordered[4] else None

    @property
    def negative(self) -> int:
        """Number of computed eigenvalues that are negative beyond their uncertainty."""
        low = 0 if self.lambda_min is None or self.lambda_min in self.eigenvalues else int(self.lambda_min < 0)
        return low + sum(value < -residual for value, residual in zip(self.eigenvalues, self.residuals, strict=True))

    def document(self) -> dict[str, Any]:
        """All values as JSON-compatible types."""
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
    progress: Callable[[str], None] = lambda text: None,
) -> Spectrum:
    """The spectrum of an objective's Hessian at its weights.

    Args:
        count: number of eigenvalues; default: 50, or all if there are fewer.
        method: ``lanczos`` or ``power``.
        by: ``value`` (the largest eigenvalues and the smallest one) or ``magnitude``.
        tolerance: relative residual for Lanczos.
        iterations: products per eigenvalue for power iteration.
        trace_draws: Hutchinson draws; 0 skips the trace.
        density_draws: random vectors for the density; 0 skips it.
        density_steps: Lanczos steps per random vector.
        room: maximum number of Lanczos vectors in memory.
        compile: ``on``, ``off`` or ``auto`` (on a GPU if the products would take over two minutes).
        seed: seed of all random vectors.
        progress: called with a status line.
    """
    if method not in METHODS:
        raise one_of("eigenvalue method", method, METHODS)
    if by not in BY:
        raise one_of("eigenvalue order", by, BY)
    count = min(COUNT, objective.size) if count is None else count
    if not 1 <= count <= objective.size:
        raise UserError(
            f"cannot compute {count} eigenvalues of a model with {objective.size} parameters; "
            f"expected 1 to {objective.size}"
        )
    if trace_draws:
        check_draws(trace_draws)
    begun = time.monotonic()
    progress("checking that the loss is deterministic")
    objective.check()
    products = iterations * count if method == "power" else PRODUCTS * count
    if compile_where_it_pays(objective, compile, products + trace_draws + density_draws * density_steps):
        progress("compiling the Hessian-vector product (10 s to 2 min)")
    operator = Operator.of_hessian(objective)

    def report(products: int, converged: int) -> None:
        progress(f"{min(converged, count)} of {count} eigenvalues after {products} Hessian-vector products")

    if method == "power":
        pairs = power(operator, count, iterations=iterations, seed=seed, progress=report)
    else:
        wanted = Largest(count) if by == "magnitude" else Ends(count, 1 if count < objective.size else 0)
        pairs = lanczos(operator, wanted, tolerance=tolerance, room=room, seed=seed, progress=report)
    trace = None
    if trace_draws:
        known: dict[str, Any] = {"values": pairs.values, "vectors": pairs.vectors} if method == "lanczos" else {}
        trace = hutchinson(
            operator,
            draws=trace_draws,
            seed=seed,
            **known,
            progress=lambda done: progress(f"trace: {done} of {trace_draws} draws"),
        )
    density = None
    if density_draws:
        steps = density_draws * min(density_steps, objective.size)
        density = quadrature(
            operator,
            draws=density_draws,
            steps=density_steps,
            seed=seed,
            progress=lambda done: progress(f"density: {done} of {steps} Hessian-vector products"),
        )
    return _assemble(objective, operator, pairs, count, method, by, trace, density, time.monotonic() - begun)


def _assemble(
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
    """Compile the objective's products if requested or, with ``auto``, if it pays off on a GPU; returns whether it did.

    On a CPU ``auto`` never compiles: results must not depend on how fast the machine happens to be.
    """
    if compile not in COMPILE:
        raise one_of("compile mode", compile, COMPILE)
    if compile == "on" or (
        compile == "auto" and objective.device.type == "cuda" and products * _seconds(objective) > COMPILE_SECONDS
    ):
        objective.compile()
        return True
    return False


def _seconds(objective: Objective) -> float:
    """Estimated seconds per product, from one product on the first batch."""
    first = objective.on(objective.batches[:1])
    for _ in range(2):  # the first call selects kernels
        torch.cuda.synchronize(objective.device)
        begun = time.perf_counter()
        first.hessian_product(None, objective.weights)
        torch.cuda.synchronize(objective.device)
    return (time.perf_counter() - begun) * len(objective.batches)
