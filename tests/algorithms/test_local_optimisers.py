"""Local optimisers: torch's optimisers as oracles, identities 144-150, and runs that reject them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.local_optimiser import AdamW, LocalOptimiser, Muon
from fedflat.algorithms.local_optimiser.matrices import by_rank, in_batches, joined, orthogonalised
from fedflat.errors import UserError
from fedflat.experiment.config import parse_config
from fedflat.experiment.setup.engine import training_of
from fedflat.models.layout import Layout
from fedflat.testing import local_context

from ..quadratics import walk
from ..reference import bed, golden_softmax, unit
from ..reference.optimisers import ns5, polar
from .settings import differ, same

ONE = bed(rounds=1).but(cohorts=[[2]], eta=0.1)
GRADIENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fedavg": lambda y: ONE.problem.gradient(2, y),
    "fedprox(mu=0.5)": lambda y: ONE.problem.gradient(2, y) + 0.5 * (y - ONE.x0),
    "fedsam(rho=0.3)": lambda y: ONE.problem.gradient(2, y + 0.3 * unit(ONE.problem.gradient(2, y))),
}


def by_torch(optimiser: Callable[[list[Tensor]], Any], gradient: Callable[..., Any], x0: Any, clip: float) -> Any:
    """Seven steps of an optimiser of torch, with clipped gradients."""
    y = torch.tensor(x0, requires_grad=True)
    steps = optimiser([y])
    for _ in range(7):
        g = gradient(y.detach().numpy())
        y.grad = torch.as_tensor(g * min(1.0, clip / np.linalg.norm(g)))
        steps.step()
    return y.detach().numpy()


@pytest.mark.parametrize("base", GRADIENTS)
@pytest.mark.parametrize(
    ("part", "oracle"),
    [("adamw", torch.optim.AdamW), ("local-adam", torch.optim.Adam)],
)
def test_adam_is_torchs(base: str, part: str, oracle: Callable[..., Any]) -> None:
    """The direction is that of the drift correction and the perturbation, clipped; weight decay is coupled or not."""
    values = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 0.01, "weight_decay": 0.5}
    expected = by_torch(lambda y: oracle(y, **values), GRADIENTS[base], ONE.x0, clip=2.0)
    text = f"{base}+{part}(beta1=0.8,beta2=0.95,eps=0.01)"
    same(walk(text, ONE, descent=Descent(weight_decay=0.5, clip=2.0), quick=True).x[0], expected, atol=1e-12)


def test_muon_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)  # torch orthogonalises in bfloat16
    setting = golden_softmax().but(cohorts=[[0]], eta=0.1, steps=7)
    layout = Layout(("weight", "bias"), ((3, 2), (3,)))
    W, c = (value.clone() for value in layout.views(torch.tensor(setting.x0)).values())
    muon = torch.optim.Muon([W], lr=0.1, momentum=0.95, weight_decay=0.5)
    adam = torch.optim.AdamW([c], lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.5)
    for _ in range(7):
        g = torch.tensor(setting.problem.gradient(0, layout.flatten({"weight": W, "bias": c}).numpy()))
        W.grad, c.grad = layout.views(g).values()
        muon.step()
        adam.step()
    expected = layout.flatten({"weight": W, "bias": c})
    found = walk("fedavg+muon(alpha=1)", setting, descent=Descent(weight_decay=0.5)).x[0]
    same(found, expected, atol=1e-5)  # torch guards against zero norms in another way


def matrices() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape) for shape in ((3, 2), (2, 5), (4, 4), (1, 6))]


@pytest.mark.parametrize("u", matrices(), ids=lambda u: str(u.shape))
def test_144_145_orthogonalisation(u: np.ndarray) -> None:
    """It acts on singular values alone, commutes with transposition and rotations, and ignores the scale."""

    def found(u: np.ndarray, method: Any = "ns5") -> np.ndarray:
        return orthogonalised(torch.tensor(u), method).numpy()

    U, s, V = np.linalg.svd(u, full_matrices=False)
    s = s / (np.linalg.norm(s) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    same(found(u), U @ np.diag(s) @ V, atol=1e-12)
    same(found(u), ns5(u), atol=1e-12)
    same(found(u.T), found(u).T, atol=1e-12)
    same(found(100 * u), found(u), atol=1e-6)
    Q = np.linalg.qr(np.random.default_rng(1).normal(size=(len(u), len(u))))[0]
    same(found(Q @ u), Q @ found(u), atol=1e-12)
    same(found(u, "exact"), polar(u), atol=1e-12)


def test_144_145_146_special_matrices() -> None:
    v = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    same(orthogonalised(v, "ns5"), 0.696436512357 * v / 5, atol=1e-6)
    same(orthogonalised(torch.tensor([[3.0, 1.0], [0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64), "ns5"),
         [[1.028412273, 0.353113213136], [0.0309273664092, 0.613444327044], [-0.322185846727, 0.291258480318]],
         atol=1e-9)  # fmt: skip
    for method in ("ns5", "exact"):
        same(orthogonalised(torch.zeros(2, 3), method), np.zeros((2, 3)))  # type: ignore[arg-type]
    rank_one = torch.outer(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0.6, 0.8]))
    same(orthogonalised(rank_one, "exact"), rank_one / 3, atol=1e-6)
    same(orthogonalised(torch.diag(torch.tensor([1.0, 1e-4])), "exact"), np.eye(2), atol=1e-6)
    several = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 2), (2, 3), (3, 2), (4, 4))]  # as on a GPU
    for method in ("ns5", "exact"):
        for one, together in zip(several, in_batches(several, method), strict=True):  # type: ignore[arg-type]
            same(together, orthogonalised(one, method), atol=1e-12)  # type: ignore[arg-type]


def test_147_fedmuon_and_local_muon() -> None:
    setting, descent = golden_softmax().but(eta=0.1), Descent(weight_decay=0.01)
    first = [
        walk(f"{text}(beta=0.9{more})", setting, descent=descent).x
        for text, more in (("fedmuon", ",gamma=0"), ("local-muon", ""))
    ]
    same(first[0][0], first[1][0], atol=1e-14)
    differ(first[0][1], first[1][1])  # the momentum is kept between rounds
    still = walk("fedmuon(alpha=0,orthogonalise=exact)", setting)
    same([x[:6] for x in still.x], np.tile(setting.x0[:6], (3, 1)))
    differ(still.x[-1][6:], setting.x0[6:])
    assert not still.server[-1]["local_optimiser"]["M"][6:].any()  # only matrices have a momentum


def test_148_adam_without_memory_is_sign_descent() -> None:
    setting = bed(rounds=2, size=2).but(steps=3)
    x = setting.x0
    for cohort, found in zip(
        setting.cohorts, walk("local-adamw(beta1=0,beta2=0,eps=1e-300)", setting, quick=True).x, strict=True
    ):
        ends = []
        for i in cohort:
            y = x
            for _ in range(3):
                y = y - 0.05 * np.sign(setting.problem.gradient(i, y))
            ends.append(y)
        x = np.mean(ends, 0)
        same(found, x, atol=1e-12)


def test_149_released_and_paper_agree_in_the_first_round_only() -> None:
    setting = golden_softmax().but(eta=0.05)
    paper, released, m_only = (
        walk(f"fedadamw{more}", setting).x for more in ("", "(variant=released)", "(m_steps=run)")
    )
    same(paper[0], released[0], atol=1e-14)
    differ(paper[1], released[1])
    differ(m_only[1], released[1])


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_150_the_last_global_update_is_added_whole(decay: float) -> None:
    """With one client and one step, times gamma and the ratio of learning rates."""
    setting = ONE.but(cohorts=[[2]] * 3, steps=1)
    x = walk("fedadamw(beta1=0,beta2=0,gamma=0.4,eps=1e-300)", setting, decay=decay, quick=True).x
    for t, (before, now, after) in enumerate(zip([ONE.x0, *x], x, x[1:], strict=False), 1):
        sign = np.sign(ONE.problem.gradient(2, now))
        same(after, now - 0.1 * decay**t * sign + 0.4 * decay * (now - before), atol=1e-12)


def test_tensors_of_any_rank_are_split_and_joined() -> None:
    for shapes in (((2, 3), (4,), (2, 2, 2)), ((3,), ()), ((2, 2),)):
        layout = Layout(tuple("abc"[: len(shapes)]), shapes)
        vector = torch.arange(float(layout.size))
        pieces, others = by_rank(vector, layout)
        assert [tuple(piece.shape) for piece in pieces] == [
            (shape[0], layout.sizes[j] // shape[0]) for j, shape in enumerate(shapes) if len(shape) > 1
        ]
        assert torch.equal(joined(pieces, others, layout), vector)


@pytest.mark.parametrize(
    ("rows", "shape_factor", "factor"),
    [(8, "matrix", (8 / 6) ** 0.5), (8, "kernel", 3**0.5), (4, "matrix", 1.0)],
)
def test_convolutions_are_matrices(rows: int, shape_factor: Any, factor: float) -> None:
    """One row per output channel, in whichever order the flat vector stores the rest."""
    layout = Layout(("conv",), ((rows, 2, 3, 1),))
    torch.manual_seed(0)
    d, zero = torch.randn(layout.size), torch.zeros(layout.size)
    muon = Muon(beta=0.5, alpha=2.0, shape_factor=shape_factor)
    ctx = local_context(y=zero, z=zero)._replace(layout=layout)
    ctx = ctx._replace(local=muon.begin(ctx, Descent()))
    y, _ = muon.move(d, torch.tensor(0.1), ctx, Descent())
    u = 0.75 * layout.views(d)["conv"].flatten(1)
    same(layout.views(y)["conv"].flatten(1), -0.2 * factor * orthogonalised(u, "ns5"), atol=1e-5)


def test_runs_reject_settings_and_models_that_an_optimiser_cannot_use() -> None:
    biases = SimpleNamespace(layout=Layout(("bias",), ((3,),)))
    matrix = SimpleNamespace(layout=Layout(("weight",), ((3, 2),)))

    def training(text: str, problem: Any, momentum: float = 0.0) -> None:
        wanted = parse_config({"algorithm": text, "training": {"momentum": momentum}})
        training_of(wanted, algorithm(text), 10, problem)

    for text in ("fedavg+adamw", "local-muon", "fedadamw"):
        with pytest.raises(UserError, match=r"own momentum.*set training\.momentum=0"):
            training(text, matrix, momentum=0.9)
    for text in ("fedmuon", "fedavg+muon"):
        with pytest.raises(UserError, match="no trained parameter is a matrix"):
            training(text, biases)
        training(text, matrix)
    training("fedadamw", biases)
    training("fedavg", biases, momentum=0.9)


def test_an_optimiser_without_a_name_is_named_by_its_class() -> None:
    class Own(LocalOptimiser):
        pass

    assert "Own has its own momentum" in str(Own().run_conflict(Descent(momentum=0.5), Layout((), ())))
    assert "scaffold(option=I)+Own" in str(Algorithm(algorithm("scaffold").drift, local_optimiser=Own()).conflict())
    assert "training.lr" in str(AdamW().divergence_hint())
