"""Methods with a teacher on softmax regression, where it has logits, and identities 140 to 143 of the specification."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedflat.algorithms.teacher import Teacher
from fedflat.data import Dataset, Examples
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.problem.multilabel import MultiLabel
from fedflat.engines.problem.regression import Regression
from fedflat.engines.problem.task import CustomLoss, Task, require_distillation
from fedflat.errors import UserError
from fedflat.experiment.config import parse_config
from fedflat.experiment.run import Run

from ..quadratics import Value, problem_of, text_of, walk
from ..reference import METHODS, unit
from ..reference.golden_teacher import TEACHER_GOLDEN
from ..reference.softmax import golden_softmax
from .settings import PARTIAL, SETTINGS, differ, same


@pytest.mark.parametrize("name", TEACHER_GOLDEN)
def test_golden_iterates_of_softmax_regression(name: str) -> None:
    method, parameters, first, third = TEACHER_GOLDEN[name]
    setting = golden_softmax()
    trace = setting.run(METHODS[method], **parameters)
    same([trace.x[0], trace.x[2]], [first, third], atol=1e-11)
    engines = LoopEngine(problem_of(setting), workers=1), LaneEngine(problem_of(setting))
    walks = [walk(text_of(method, **parameters), setting, engine=engine) for engine in engines]
    for walked in walks:
        same(walked.x, trace.x, atol=1e-12)
        # Reported is the task's loss, without the teacher's term.
        same([one.loss for one in walked.outcomes], [one.loss for one in walks[0].outcomes], atol=1e-12)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("fedgmt", {"gamma": 0.4, "tau": 1.5, "alpha": 0.3}), ("fedsol", {"tau": 0.5, "rho": 0.4, "adaptive": False})],
)
def test_the_temperature_is_that_of_the_reference(method: str, parameters: dict[str, Any]) -> None:
    setting = golden_softmax()
    found = walk(text_of(method, **parameters), setting).x
    same(found, setting.run(METHODS[method], **parameters).x, atol=1e-12)
    differ(found, walk(text_of(method, **{**parameters, "tau": 3.0}), setting).x, by=1e-4)


def test_143_the_teachers_gradient() -> None:
    """It is 0 at the teacher, and as specified, or the central difference, elsewhere; the loss is the task's."""
    setting = golden_softmax()
    problem, x0 = problem_of(setting), torch.tensor(setting.x0)
    batch = problem.batch(torch.arange(4), {})
    alone = Teacher(x0, 3.0, with_loss=False)
    loss, gradient = problem.loss_and_gradient(torch.zeros(9, dtype=torch.float64), {}, batch, alone)
    expected = [-0.00457538193691, 0.00415166076859, -0.00121407448955, -0.00495454790104, 0.00578945642646]
    expected += [0.000802887132448, -0.00308024377627, 0.000670853356682, 0.00240939041959]
    same(gradient, expected, atol=1e-13)
    assert float(loss) == pytest.approx(np.log(3))
    assert problem.loss_and_gradient(x0, {}, batch, alone)[1].abs().max() < 1e-16
    y = x0 + torch.linspace(-1, 1, 9, dtype=torch.float64)

    def objective(point: Tensor) -> float:
        features = golden_softmax().problem.features[0]
        logits, teachers = (features @ each[:6].view(3, 2).numpy().T + each[6:].numpy() for each in (point, x0))
        own, theirs = (np.exp(z / 2) / np.exp(z / 2).sum(1, keepdims=True) for z in (logits, teachers))
        return float(problem.loss_and_gradient(point, {}, batch)[0]) + 0.7 * float(
            (theirs * np.log(theirs / own)).sum(1).mean()
        )

    steps = 1e-5 * torch.eye(9, dtype=torch.float64)
    differences = [(objective(y + step) - objective(y - step)) / 2e-5 for step in steps]
    same(problem.loss_and_gradient(y, {}, batch, Teacher(x0, 2.0, 0.7))[1], differences, atol=1e-9)


def test_140_with_a_plain_teacher_fedgmt_is_feddyn(monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(_: Value, output: Tensor, teacher_output: Tensor, target: Tensor, temperature: float) -> Tensor:
        """T = y - e."""
        return 0.5 * (output - teacher_output)[:, 0].square().sum(1).mean() / temperature**2

    monkeypatch.setattr(Value, "distillation", pull)
    for setting in ("partial", "uneven-partial"):
        found = walk("fedgmt(alpha=0,gamma=0.3)".replace(")", f",beta={1 / 0.3})"), SETTINGS[setting]).x
        same(found, SETTINGS[setting].run(METHODS["feddyn"], alpha=0.3).x)


def test_141_without_its_terms_fedgmt_still_adds_the_mean_dual() -> None:
    found = walk("fedgmt(gamma=0,beta=1e14)", PARTIAL, quick=True).x
    same(found, walk("feddyn(alpha=1e-14)", PARTIAL, quick=True).x)
    differ(found, walk("fedavg", PARTIAL, quick=True).x, by=0.5)


def test_142_fedsols_first_step_is_unperturbed() -> None:
    one = PARTIAL.but(steps=1)
    for text in ("fedsol(rho=5)", "fedsol(rho=5,adaptive=false)"):
        assert np.array_equal(walk(text, one).x, walk("fedavg", one).x)


@pytest.mark.parametrize("perturbation", ["sam(rho=0.3)", "sol(rho=0.3,adaptive=false)"])
def test_a_perturbation_of_fedgmt(perturbation: str) -> None:
    """The distillation term belongs to the loss: SAM perturbs along its gradient, and steps take it where they are."""
    problem, x, h = PARTIAL.problem, PARTIAL.x0, np.zeros_like(PARTIAL.problem.b)
    e, found = x, walk(f"fedgmt(gamma=0.4)+{perturbation}", PARTIAL, quick=True).x
    for cohort, expected in zip(PARTIAL.cohorts, found, strict=True):
        ends = []
        for i in cohort:
            y = x
            for _ in range(PARTIAL.steps):
                ascent = problem.A[i] @ (y - x)
                if perturbation.startswith("sam"):
                    ascent = problem.gradient(i, y) + 0.4 * problem.A[i] @ (y - e)
                point = y + 0.3 * unit(ascent)
                y = y - PARTIAL.eta * (problem.gradient(i, point) + 0.4 * problem.A[i] @ (point - e) + h[i] / 10)
            h[i] += y - x
            ends.append(y)
        x = np.mean(ends, 0) + h.mean(0)
        e = 0.95 * e + 0.05 * x
        same(x, expected)


class Compared(Regression):
    """Regression with a term of its own."""

    def distillation(self, output: Tensor, teacher_output: Tensor, target: Tensor, temperature: float) -> Tensor:
        return (output - teacher_output).square().mean() / temperature**2


@pytest.mark.parametrize("text", ["fedgmt", "fedsol"])
def test_tasks_without_logits_are_refused_before_training(text: str) -> None:
    examples = Examples(torch.randn(20, 3), torch.randn(20))
    data = Dataset("numbers", examples, examples, (), kind="vector")

    def run(algorithm: str, task: Task | None = None) -> Run:
        settings = {"data": {"clients": 2, "partition": "iid"}, "engine": {"workers": 1}}
        settings["federation"] = {"clients_per_round": 2}
        training = {"rounds": 1, "local_steps": 2, "batch_size": 5}
        return Run(
            parse_config({"algorithm": algorithm, "model": "mlp", "training": training, **settings}),
            None,
            data=data,
            task=task,
        )

    refusal = "{} compares class probabilities with those of a teacher, but the outputs of {} need not be logits"
    with pytest.raises(UserError, match=re.escape(refusal.format(text, "the task Regression"))):
        run(text)
    for task, name in ((MultiLabel(), "the task MultiLabel"), (CustomLoss(), "a user-supplied loss")):
        with pytest.raises(UserError, match=refusal.format("fedgmt", name)):
            require_distillation(task, "fedgmt")
    assert run(text, Compared()).execute().status == "finished"
    assert run({"fedgmt": "fedgmt(gamma=0)"}.get(text, "fedsol(rho=0)")).execute().status == "finished"
