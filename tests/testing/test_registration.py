"""User-defined components: registered in Python and by an installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
from torch import nn

import fedflat
from fedflat.algorithms.composition import PART_REGISTRIES, parts, registered
from fedflat.algorithms.drift import DRIFTS, Drift
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.named import NAMED
from fedflat.algorithms.perturbation.sam import Sam
from fedflat.averaging import AVERAGES, Ema, average_name
from fedflat.errors import UserError
from fedflat.models import ModelSpec, canonical_model
from fedflat.registry import Registry
from tests.time_limits import scaled

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Own(Scaffold):
    """SCAFFOLD under another name."""


@dataclass(frozen=True)
class Half(Ema):
    """An EMA under another name."""

    decay: float = 0.5


@dataclass(frozen=True)
class Incomplete(Drift):
    """A drift correction whose parameter has no default."""

    beta: float


@dataclass(frozen=True)
class OwnModel(ModelSpec):
    """A linear classifier of digits."""

    bias: bool = True

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes, self.bias))


@pytest.fixture(autouse=True)
def unregister(restore_registries: None) -> None:
    """Leave no names behind."""


def test_an_algorithm_gets_a_name() -> None:
    with pytest.raises(UserError, match=r"Own.*fedflat\.register"):
        fedflat.canonical(fedflat.Algorithm(Own(), Sam(0.1)))
    fedflat.register("own", fedflat.Algorithm(Own()))
    assert fedflat.algorithm("own") == fedflat.Algorithm(Own())
    assert (
        fedflat.canonical(fedflat.algorithm("own(cv_weight=0.5)+sam(rho=0.1)+wima"))
        == "own(cv_weight=0.5)+sam(rho=0.1)+wima"
    )
    result = fedflat.run("own", rounds=1, clients=4, clients_per_round=2, local_steps=1, workers=1)
    assert result.config.algorithm == "own"
    averaged = fedflat.Algorithm(Own(), Sam(0.1), averages=(Ema(),))
    fedflat.register("own-averaged", averaged)
    for text in ("own-averaged", "own-averaged+wima"):
        assert fedflat.canonical(fedflat.algorithm(text)) == text
    assert fedflat.canonical(fedflat.Algorithm(Own(), Sam(0.1))) == "own+sam(rho=0.1)"


def test_a_class_becomes_a_part() -> None:
    fedflat.register("own-part", Own)
    assert fedflat.algorithm("fedsam+own-part(cv_weight=0.5)") == fedflat.Algorithm(Own(cv_weight=0.5), Sam(0.05))
    fedflat.register("own-part", Own)  # registering the same class again has no effect
    assert registered() == {"own-part": Own}


def test_a_registered_average_runs_end_to_end(tmp_path: Path) -> None:
    fedflat.register("half", Half)
    assert average_name(Half()) == "half" and average_name(Half(0.25)) == "half(decay=0.25)"
    result = fedflat.run(
        "fedavg+half", rounds=2, clients=4, clients_per_round=2, local_steps=1, workers=1, out=tmp_path / "run"
    )
    assert set(result.history[-1]["test"]) == {"server", "half"}
    assert fedflat.canonical(fedflat.algorithm("fedavg+half(decay=0.25)")) == "fedavg+half(decay=0.25)"


def test_a_model_is_registered_like_an_algorithm() -> None:
    fedflat.register("own-model", OwnModel)
    assert canonical_model("Own_Model(bias=false)") == "own-model(bias=false)"
    result = fedflat.run(
        "fedavg", model="own-model", rounds=1, clients=4, clients_per_round=2, local_steps=1, workers=1
    )
    assert len(result.history) > 0
    with pytest.raises(UserError, match="model 'cnn' is already registered"):
        fedflat.register("cnn", OwnModel)
    fedflat.register("fedavg", OwnModel)  # models and algorithms are never confused


def test_an_unregistered_average_is_rejected_by_name() -> None:
    with pytest.raises(UserError, match="Half"):
        fedflat.canonical(fedflat.Algorithm(averages=(Half(),)))


@pytest.mark.parametrize(
    ("name", "component", "meaning"),
    [
        ("scaffold", fedflat.Algorithm(Own()), "'scaffold'"),
        ("Scaffold", Own, "'Scaffold'"),
        ("swa", fedflat.Algorithm(Own()), "'swa'.*average"),
        ("swa", Own, "'swa'.*average"),
        ("fedavg", Own, "'fedavg'.*algorithm"),
        ("Own Name", fedflat.Algorithm(), "'Own Name'"),
        ("my part", Own, "'my part'.* e.g. my-drift-correction"),
        ("own", Incomplete, "Incomplete as 'own': .*'beta'; give every parameter a default"),
        ("own", int, "int.*'own'.*Drift"),
        ("own", Own(), "'own'.*Drift"),
    ],
)
def test_invalid_components_are_not_registered(name: str, component: object, meaning: str) -> None:
    before = [dict(registry) for registry in (NAMED, *PART_REGISTRIES.values())]
    with pytest.raises(UserError, match=meaning):
        fedflat.register(name, component)  # type: ignore[arg-type]
    assert before == [dict(registry) for registry in (NAMED, *PART_REGISTRIES.values())]


def test_part_names_are_unique_across_kinds_whoever_registers_them() -> None:
    with pytest.raises(UserError, match=r"'swa'.*average"):
        DRIFTS.register("swa", Drift)  # as a built-in would at import
    with pytest.raises(UserError, match=r"'prox'.*drift"):
        AVERAGES.register("prox", Half)
    assert sum(map(len, PART_REGISTRIES.values())) == len(parts())
    Registry[type]("unrelated kind").register("swa", Half)  # other kinds of components have names of their own


@pytest.mark.slow
def test_an_installed_package_provides_its_algorithm(tmp_path: Path) -> None:
    install = "-m pip install -q --no-deps --no-build-isolation --disable-pip-version-check --target"
    source = tmp_path / "source"  # a copy, because building writes into the source folder
    subprocess.run(["cp", "-r", str(ROOT / "examples" / "fedflat-damped"), str(source)], check=True)
    built = subprocess.run(
        [sys.executable, *install.split(), str(tmp_path / "site"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"a package cannot be built here: {built.stderr[-200:]}")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    used = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, env=environment, timeout=scaled(120), check=False
    )
    assert "damped-scaffold" in used.stdout.partition("verified: ")[0], used.stderr
    assert "engines agree" in used.stdout.partition("verified: ")[2], used.stderr


USE = """
from fedflat.cli.application import app
from fedflat.testing import check_algorithm

app(["algorithms"], standalone_mode=False)
print("verified: ", check_algorithm("damped-scaffold"))
"""
"""List the algorithms as the command line does, then check the installed one; one process, since imports are slow."""
