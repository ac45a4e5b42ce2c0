"""Measures of a single model that can be logged during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedflat.flatness import Objective, norms_of, sharpness_of, spectrum_of
from fedflat.flatness.curvature.lanczos import Ends, lanczos
from fedflat.flatness.curvature.layers import diagonal_blocks
from fedflat.flatness.curvature.operator import Operator

RHO = 0.05
"""Radius of the sharpness measurement."""
TOLERANCE, MAX_PRODUCTS = 1e-2, 100
"""Relative residual at which Lanczos stops, and its maximum number of Hessian-vector products."""
GROUP_SIZE = 32
"""Largest number of examples per group of m-sharpness."""


def _fisher(objective: Objective, seed: int) -> dict[str, float | None]:
    options: dict[str, Any] = {"matrix": "gauss-newton", "lambda_min": False, "tolerance": TOLERANCE, "seed": seed}
    spectrum = spectrum_of(objective, 1, **options)
    trace = spectrum.trace.value if spectrum.trace else None
    return {"fisher_lambda_max": spectrum.lambda_max, "fisher_trace": trace}


def _norms(objective: Objective, seed: int) -> dict[str, float | None]:
    norms = norms_of(objective, draws=10, directions=5, seed=seed)  # a third and half of the defaults, to save time
    return {
        "relative_flatness": norms.relative_flatness.value,
        "fisher_rao": norms.fisher_rao,
        "pac_bayes_sigma": norms.sigma,
        "magnitude_sigma": norms.magnitude_sigma,
    }


def _layers(objective: Objective, seed: int) -> dict[str, float | None]:
    shapes = dict(zip(objective.layout.names, objective.layout.shapes, strict=True))
    eigenvalues: dict[str, float | None] = {}
    for name, block in diagonal_blocks(Operator.of_hessian(objective), objective.layout).items():
        if len(shapes[name]) > 1:  # a weight matrix or a filter
            pairs = lanczos(block, Ends(1), tolerance=TOLERANCE, max_products=MAX_PRODUCTS, seed=seed)
            eigenvalues[f"lambda_max of {name}"] = float(pairs.values[0])
    return eigenvalues


def _m_sharpness(objective: Objective, seed: int) -> dict[str, float | None]:
    return {"m_sharpness": sharpness_of(objective, rho=RHO, m=GROUP_SIZE, seed=seed).value}


MODEL_MEASURES: dict[str, Callable[[Objective, int], dict[str, float | None]]] = {
    "m_sharpness": _m_sharpness,
    "fisher": _fisher,
    "norms": _norms,
    "layers": _layers,
}
"""Functions that measure a model, given its objective and a seed, by the names that ``flatness.what`` accepts."""
