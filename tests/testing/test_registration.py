"""Names of one's own: registered in Python, by an installed package, and as the documentation says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedflat
from fedflat.algorithms import composition, table
from fedflat.algorithms.drift.scaffold import Scaffold
from fedflat.algorithms.perturbation.sam import Sam
from fedflat.errors import UserError

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Own(Scaffold):
    """SCAFFOLD under another name."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave no names behind."""
    tables: tuple[dict[object, object], ...] = (table.NAMED, composition.PARTS, composition._NAMES)  # type: ignore[assignment]
    before = [dict(one) for one in tables]
    yield
    for one, earlier in zip(tables, before, strict=True):
        one.clear()
        one.update(earlier)


def test_an_algorithm_gets_a_name() -> None:
    with pytest.raises(UserError, match="this algorithm has no name"):
        fedflat.canonical(fedflat.Algorithm(Own(), Sam(0.1)))
    fedflat.register("own", fedflat.Algorithm(Own()))
    assert fedflat.algorithm("own") == fedflat.Algorithm(Own())
    assert (
        fedflat.canonical(fedflat.algorithm("own(cv_weight=0.5)+sam(rho=0.1)+wima"))
        == "own(cv_weight=0.5)+sam(rho=0.1)+wima"
    )
    result = fedflat.run("own", rounds=1, clients=4, clients_per_round=2, local_steps=1, workers=1)
    assert result.config.algorithm == "own"


def test_a_class_becomes_a_part() -> None:
    fedflat.register("own-part", Own)
    assert fedflat.algorithm("fedsam+own-part(cv_weight=0.5)") == fedflat.Algorithm(Own(cv_weight=0.5), Sam(0.05))
    fedflat.register("own-part", Own)  # twice the same is no mistake


@pytest.mark.parametrize(
    ("name", "what", "sentence"),
    [
        ("scaffold", fedflat.Algorithm(Own()), "there is already an algorithm or part 'scaffold'"),
        ("Own Name", fedflat.Algorithm(), "cannot be the name of an algorithm"),
        ("own", int, "only as an Algorithm or as a class derived from Drift"),
    ],
)
def test_what_cannot_be_registered(name: str, what: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        fedflat.register(name, what)  # type: ignore[arg-type]


def fedflat_with(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


@pytest.mark.slow
def test_an_installed_package_brings_its_algorithm(tmp_path: Path) -> None:
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
    ]
    source = tmp_path / "source"
    subprocess.run(
        ["cp", "-r", str(ROOT / "examples" / "fedflat-damped"), str(source)], check=True
    )  # building writes beside the sources
    made = subprocess.run(
        [*install, "--target", str(tmp_path / "site"), str(source)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a package cannot be built here: {made.stderr[-200:]}")
    listed = fedflat_with(tmp_path / "site", "-m", "fedflat", "algorithms")
    assert "damped-scaffold" in listed.stdout, listed.stderr
    checked = fedflat_with(
        tmp_path / "site", "-c", "from fedflat.testing import check_algorithm as c; print(c('damped-scaffold'))"
    )
    assert "engines agree" in checked.stdout, checked.stderr


def test_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-algorithm.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    done = fedflat_with(tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    assert "engines agree" in done.stdout
