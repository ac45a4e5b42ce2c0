"""Gauss-Newton and empirical Fisher matrices and per-layer curvature, against matrices from their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedflat import flatness
from fedflat.errors import UserError
from fedflat.flatness import Objective, Operator

from .networks import case, true_hessian


def jacobian(name: str) -> tuple[Objective, Tensor, Tensor]:
    """The objective, its outputs [n, classes] and their Jacobian [n, classes, P]; BatchNorm is in evaluation mode."""
    network = case(name)
    objective = network.objective(7)
    network.network.eval()

    def output(w: Tensor) -> Tensor:
        return functional_call(network.network, objective.layout.views(w), (network.inputs,))

    result = objective, output(objective.weights), torch.autograd.functional.jacobian(output, objective.weights)
    network.network.train()
    return result


@pytest.mark.parametrize("name", ["mlp", "batch norm"])
def test_matrices_follow_their_definitions(name: str) -> None:
    objective, output, jacobians = jacobian(name)
    p = output.softmax(1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None]  # Hessian of cross-entropy in the output
    slope = p - F.one_hot(case(name).targets, p.shape[1])
    gradients = torch.einsum("nc,ncp->np", slope, jacobians)
    vectors = torch.randn(3, objective.size, dtype=torch.float64)
    expected = {
        "gauss-newton": torch.einsum("ncp,ncd,ndq->pq", jacobians, curvature, jacobians) / len(p),
        "empirical-fisher": gradients.T @ gradients / len(p),
        "hessian": true_hessian(name),
    }
    for matrix, truth in expected.items():
        torch.testing.assert_close(Operator.of_objective(objective, matrix)(vectors), vectors @ truth)


def test_the_spectrum_of_the_fisher_matrix() -> None:
    network = case("mlp")
    data = (network.inputs, network.targets)
    options = {"matrix": "gauss-newton", "per_layer": True, "lambda_min": False, "trace_draws": 5}
    spectrum = flatness.spectrum(network.network, network.loss, data, 5, **options)
    operator = Operator.of_objective(network.objective(), "gauss-newton")
    matrix = operator(torch.eye(operator.size, dtype=torch.float64))
    assert spectrum.eigenvalues == pytest.approx(torch.linalg.eigvalsh(matrix).flip(0)[:5].tolist(), rel=1e-5)
    assert spectrum.matrix == spectrum.document()["matrix"] == "gauss-newton" and spectrum.lambda_max is not None
    start = 0
    for layer in spectrum.layers:
        block = matrix[start : start + layer.size, start : start + layer.size]
        start += layer.size
        assert layer.lambda_max == pytest.approx(float(torch.linalg.eigvalsh(block)[-1]), rel=1e-5)
        assert abs(layer.trace.value - float(block.trace())) < 3 * layer.trace.half_width + 1e-9
    assert [layer.name for layer in spectrum.layers] == [name for name, _ in network.network.named_parameters()]
    assert len(spectrum.document()["layers"]) == 4 and start == operator.size


def test_a_loss_that_is_linear_in_the_output_has_no_gauss_newton_curvature() -> None:
    model, data = nn.Linear(2, 1), (torch.randn(4, 2), torch.zeros(4))
    linear = Objective(model, lambda output, target: output.mean(), data)
    assert not Operator.of_objective(linear, "gauss-newton")(torch.ones(1, 3)).any()


def test_matrices_that_are_not_defined_are_rejected() -> None:
    objective = case("mlp").objective()
    with pytest.raises(UserError, match="gauss-newton"):
        flatness.spectrum(objective, matrix="gauss-neutron")
    with pytest.raises(UserError, match="only Hessian-vector products can be compiled"):
        flatness.spectrum(objective, matrix="gauss-newton", compile="on")
    with pytest.raises(UserError, match="compile mode 'banana'"):
        flatness.spectrum(objective, matrix="gauss-newton", compile="banana")

    class Mean(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).mean(0, keepdim=True)

    pooled = Objective(Mean(2, 1), lambda output, target: output.mean(), (torch.ones(4, 2), torch.zeros(4)))
    with pytest.raises(UserError, match=r"shape \(1, 1\).*one row per example \(4\)"):
        Operator.of_objective(pooled, "empirical-fisher")(torch.ones(1, 3))
