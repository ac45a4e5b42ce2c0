"""Curvature of a loss in one call: largest eigenvalues, smallest eigenvalue, trace and spectral density."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedflat.display import html_values
from fedflat.errors import UserError, one_of
from fedflat.flatness.curvature.lanczos import TOLERANCE, Ends, Largest, lanczos
from fedflat.flatness.curvature.layers import LayerCurvature, layer_curvatures
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.curvature.power import power
from fedflat.flatness.curvature.trace import DRAWS, Density, check_draws, estimate_trace, lanczos_quadrature
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.objective import Objective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNT = 50
"""Default number of eigenvalues."""
PRODUCTS = 4
"""Approximate number of Hessian-vector products that Lanczos needs per eigenvalue."""
COMPILE = ("auto", "on", "off")
COMPILE_SECONDS = 120.0
"""Total seconds of products above which compilation pays off."""
METHODS = ("lanczos", "power")
BY = ("value", "magnitude")
MATRIX_NAMES = {
    "hessian": "Hessian",
    "gauss-newton": "Gauss-Newton matrix",
    "empirical-fisher": "empirical Fisher matrix",
}
"""Names of the matrices in headings and figures."""


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The largest eigenvalues of a Hessian, the smallest one (``lambda_min``), and estimates of trace and density."""

    eigenvalues: tuple[float, ...]
    """The largest eigenvalues in descending order (of magnitude if ``by`` is ``magnitude``)."""
    residuals: tuple[float, ...]
    """Norm of H v - lambda v for each eigenvalue lambda, with eigenvector v: a bound on the eigenvalue's error."""
    lambda_min: float | None
    """The smallest (most negative) eigenvalue; None if it was not computed."""
    lambda_min_residual: float | None
    """Norm of H v - lambda_min v, with eigenvector v; None if ``lambda_min`` was not computed."""
    trace: Estimate | None
    """Estimated trace; None if it was not requested."""
    density: Density | None
    """Estimated density of all eigenvalues; None if it was not requested."""
    method: str
    """Method that computed the eigenvalues: ``lanczos`` or ``power``."""
    by: str
    """Order of the eigenvalues: ``value`` or ``magnitude``."""
    converged: bool
    """Whether every residual is below the tolerance."""
    products: int
    """Total number of Hessian-vector products that were computed."""
    seconds: float
    """Wall-clock time of the computation in seconds."""
    parameters: int
    """Number of parameters P of the model."""
    examples: int
    """Number of examples over which the loss is averaged."""
    loss: float
    """Mean loss at the weights."""
    gradient_norm: float
    """l2 norm of the gradient of the mean loss at the weights; near 0 at a minimum."""
    precision: str
    """Precision of matrix products: ``tf32``, ``float32`` or ``float64``."""
    matrix: str = "hessian"
    """The matrix: ``hessian``, ``gauss-newton`` or ``empirical-fisher``; other fields call it H."""
    layers: tuple[LayerCurvature, ...] = ()
    """Curvature of each parameter; empty if it was not requested."""

    @property
    def lambda_max(self) -> float | None:
        """The largest eigenvalue; None if all computed ones are negative and were chosen by magnitude."""
        return self._largest[0] if self._largest else None

    @property
    def ratio(self) -> float | None:
        """The largest eigenvalue divided by the fifth largest, which shows how fast the spectrum decays.

        Used by Jastrzebski et al. (2020) and Caldarola et al. (2022). None if the five largest eigenvalues were not
        computed or the fifth is 0.
        """
        return self._largest[0] / self._largest[4] if len(self._largest) > 4 and self._largest[4] else None

    @property
    def _largest(self) -> list[float]:
        """The eigenvalues that are certain to be the largest ones of the Hessian, in descending order."""
        values = sorted(self.eigenvalues, reverse=True)
        if (self.by == "value" and self.method == "lanczos") or len(values) == self.parameters:
            return values
        # By magnitude, values above a negative one may be missing.
        return [value for value in values if value > 0]

    @property
    def unconverged(self) -> str:
        """Describe the eigenvalue with the largest residual relative to its tolerance; empty if all have converged."""
        if self.converged:
            return ""
        values, residuals = list(self.eigenvalues), list(self.residuals)
        names = [f"lambda_{number}" for number in range(1, len(values) + 1)]
        relative = [residual / abs(value) if value else 0.0 for value, residual in zip(values, residuals, strict=True)]
        if self.lambda_min is not None and self.lambda_min_residual is not None:
            names.append("lambda_min")
            relative.append(self.lambda_min_residual / max(map(abs, values)))  # its tolerance is relative to lambda_max
            values.append(self.lambda_min)
            residuals.append(self.lambda_min_residual)
        worst = relative.index(max(relative))
        residual = f"{residuals[worst]:.2g} (relative: {relative[worst]:.2g})"
        return f"{names[worst]} = {values[worst]:.4g} has a residual of {residual}"

    @property
    def negative(self) -> int:
        """Number of computed eigenvalues that are negative by more than their uncertainty."""
        count = sum(value < -residual for value, residual in zip(self.eigenvalues, self.residuals, strict=True))
        # lambda_min is usually not among ``eigenvalues``, which are the largest ones.
        if self.lambda_min is not None and self.lambda_min not in self.eigenvalues:
            count += self.lambda_min < -(self.lambda_min_residual or 0.0)
        return count

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self._overview().items() if value is not None)
        return f"Spectrum({values})"

    def _repr_html_(self) -> str:
        return html_values(f"Spectrum of the {MATRIX_NAMES[self.matrix]}", self._overview())

    def _overview(self) -> dict[str, str | None]:
        """Return the main values by name, formatted; None for values that were not computed."""
        return {
            "lambda_max": None if self.lambda_max is None else f"{self.lambda_max:.4g}",
            "lambda_min": None if self.lambda_min is None else f"{self.lambda_min:.4g}",
            "trace": None if self.trace is None else f"{self.trace.value:.4g} ± {self.trace.half_width:.2g}",
            "eigenvalues": f"{len(self.eigenvalues)} of {self.parameters:,}",
            "examples": f"{self.examples:,}",
            "converged": "yes" if self.converged else f"no: {self.unconverged}",
        }

    def plot(self, name: str = "model") -> Figure:
        """Draw the eigenvalues in descending order and, if it was computed, the density; ``name`` is in the legend."""
        from fedflat.reporting.figures.spectrum import spectrum_picture

        return spectrum_picture({name: [self]})

    def document(self) -> dict[str, Any]:
        """Return all fields, ``lambda_max`` and ``ratio`` as JSON-compatible types."""
        return {
            "lambda_max": self.lambda_max,
            "lambda_max_over_lambda_5": self.ratio,
            **vars(self),
            "eigenvalues": list(self.eigenvalues),
            "residuals": list(self.residuals),
            "trace": self.trace.document() if self.trace else None,
            "density": self.density.document() if self.density else None,
            "layers": [asdict(layer) for layer in self.layers],
        }


def spectrum_of(
    objective: Objective,
    count: int | None = None,
    *,
    matrix: str = "hessian",
    method: str = "lanczos",
    by: str = "value",
    lambda_min: bool = True,
    tolerance: float = TOLERANCE,
    iterations: int = 20,
    trace_draws: int = DRAWS,
    trace_estimator: str = "hutchinson",
    density_draws: int = 0,
    density_steps: int = 80,
    per_layer: bool = False,
    room: int | None = None,
    compile: str = "auto",
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Spectrum:
    """Compute the spectrum of an objective's Hessian, or of another curvature matrix, at its weights.

    Args:
        objective: the loss as a function of the weights.
        count: number of eigenvalues; default: 50, or all if there are fewer.
        matrix: ``hessian``, ``gauss-newton`` (for cross-entropy, the Fisher matrix) or ``empirical-fisher``.
        method: ``lanczos`` or ``power``.
        by: ``value`` (the largest eigenvalues) or ``magnitude`` (those of largest magnitude).
        lambda_min: whether Lanczos by value also computes the smallest eigenvalue.
        tolerance: residual at which Lanczos accepts an eigenvalue, relative to its magnitude; for lambda_min, relative
            to the largest magnitude.
        iterations: maximum number of products per eigenvalue of power iteration.
        trace_draws: number of products for the trace; 0 skips it.
        trace_estimator: ``hutchinson`` or ``hutch++``; both estimate only the trace outside the computed
            eigenvectors.
        density_draws: number of random vectors for the spectral density; 0 skips it.
        density_steps: Lanczos steps per random vector of the density.
        per_layer: whether to also compute the largest eigenvalue and the trace of each parameter's diagonal block.
        room: maximum number of Lanczos vectors in memory.
        compile: ``on``, ``off`` or ``auto`` (on a GPU if the products would take over two minutes); Hessian only.
        seed: seed of all random vectors.
        progress: called with a status line.
    """
    options = ("eigenvalue method", method, METHODS), ("eigenvalue order", by, BY), ("compile mode", compile, COMPILE)
    for option, value, known in options:
        if value not in known:
            raise one_of(option, value, known)
    count = min(COUNT, objective.size) if count is None else count
    if count != int(count) or not 1 <= count <= objective.size:
        raise UserError(
            f"cannot compute {count} eigenvalues of a model with {objective.size} parameters; "
            f"expected an integer from 1 to {objective.size}"
        )
    check_draws(trace_draws or DRAWS, trace_estimator, "trace_draws", or_none="0 for no trace, or ")
    start = time.monotonic()
    progress("checking that the loss is deterministic")
    objective.check()
    products_per_eigenvalue = iterations if method == "power" else PRODUCTS
    expected_products = products_per_eigenvalue * count + trace_draws + density_draws * density_steps
    operator = Operator.of_objective(objective, matrix)
    if matrix != "hessian" and compile == "on":
        raise UserError(f"only Hessian-vector products can be compiled; use compile=auto or off with {matrix}")
    if matrix == "hessian" and compile_if_worthwhile(objective, compile, expected_products):
        progress("compiling the Hessian-vector product (10 s to 2 min)")

    def report(products: int, converged: int) -> None:
        progress(f"{min(converged, count)} of {count} eigenvalues after {products} Hessian-vector products")

    if method == "power":
        pairs = power(operator, count, iterations=iterations, seed=seed, progress=report)
    else:
        low = int(lambda_min and count < objective.size)  # all eigenvalues include the smallest one
        wanted = Largest(count) if by == "magnitude" else Ends(high=count, low=low)
        pairs = lanczos(operator, wanted, tolerance=tolerance, room=room, seed=seed, progress=report)
    trace = density = None
    if trace_draws:
        is_accurate = method == "lanczos"  # deflation needs eigenvectors more accurate than those of power iteration
        trace = estimate_trace(
            operator,
            draws=trace_draws,
            estimator=trace_estimator,
            seed=seed,
            values=pairs.values if is_accurate else None,
            vectors=pairs.vectors if is_accurate else None,
            progress=lambda products: progress(f"trace: {products} of {trace_draws} draws"),
        )
    if density_draws:
        total = density_draws * min(density_steps, objective.size)
        density = lanczos_quadrature(
            operator,
            draws=density_draws,
            steps=density_steps,
            seed=seed,
            progress=lambda products: progress(f"density: {products} of {total} Hessian-vector products"),
        )
    layers: tuple[LayerCurvature, ...] = ()
    if per_layer:
        layers = layer_curvatures(
            operator,
            objective.layout,
            tolerance=tolerance,
            draws=trace_draws or DRAWS,
            seed=seed,
            progress=lambda name: progress(f"curvature of {name}"),
        )
    values, residuals = pairs.values[:count], pairs.residuals[:count]
    if method == "power":  # Lanczos returns them in order
        order = (values.abs() if by == "magnitude" else values).argsort(descending=True)
        values, residuals = values[order], residuals[order]
    has_smallest = method == "lanczos" and by == "value" and lambda_min  # after the largest ones
    return Spectrum(
        tuple(values.tolist()),
        tuple(residuals.tolist()),
        lambda_min=float(pairs.values[-1]) if has_smallest else None,
        lambda_min_residual=float(pairs.residuals[-1]) if has_smallest else None,
        trace=trace,
        density=density,
        method=method,
        by=by,
        converged=pairs.converged,
        products=operator.products,
        seconds=time.monotonic() - start,
        parameters=objective.size,
        examples=objective.examples,
        loss=float(objective.loss()),
        gradient_norm=float(objective.gradient().norm()),
        precision=objective.precision,
        matrix=matrix,
        layers=layers,
    )


def compile_if_worthwhile(objective: Objective, compile: str, products: int) -> bool:
    """Compile the objective's products if requested or, with ``auto``, if it pays off on a GPU; returns whether it did.

    On a CPU ``auto`` never compiles: results must not depend on how fast the machine happens to be.

    Args:
        objective: the loss whose Hessian-vector products may be compiled.
        compile: ``on``, ``off`` or ``auto``.
        products: number of products that will be computed.
    """
    should_compile = compile == "on"
    if compile == "auto" and objective.device.type == "cuda":
        should_compile = products * _seconds_per_product(objective) > COMPILE_SECONDS
    if should_compile:
        objective.compile()
    return should_compile


def _seconds_per_product(objective: Objective) -> float:
    """Estimate the seconds of one Hessian-vector product over all data on a GPU, by timing the first batch."""
    first_batch = objective.with_data(objective.batches[:1])
    for _ in range(2):  # the first call selects kernels; the second is timed
        torch.cuda.synchronize(objective.device)
        start = time.perf_counter()
        first_batch.hessian_product(None, objective.weights)  # at the weights (None), times any vector
        torch.cuda.synchronize(objective.device)
    return (time.perf_counter() - start) * len(objective.batches)
