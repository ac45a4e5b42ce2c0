"""The page on scale says what the code does."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def scale() -> Iterator[ModuleType]:
    """The script, imported as if it ran from its own folder."""
    spec = importlib.util.spec_from_file_location("scale", DOCS / "scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        spec.loader.exec_module(module)
        yield module


def test_the_page_is_up_to_date(scale: ModuleType) -> None:
    assert scale.page() == (DOCS / "scale.md").read_text(encoding="utf-8")


def test_client_state_vectors_per_algorithm(scale: ModuleType) -> None:
    """By the papers: SCAFFOLD's c_i, FedDyn's and FedSpeed's dual, FedSMOO's two, MIME and FedCM nothing."""
    vectors = {
        "fedavg": 0,
        "scaffold": 1,
        "feddyn": 1,
        "fedspeed": 1,
        "fedsmoo": 2,
        "mime": 0,
        "fedcm": 0,
        "fedswa": 0,
        "fedmoswa": 1,
    }
    assert {name: scale.vectors(scale.NAMED[name].client_fields()) for name in vectors} == vectors


def test_sizes_are_those_of_the_published_networks(scale: ModuleType) -> None:
    found = scale.sizes()
    assert found["lenet5"] == 62_006
    assert found["vit-b16"] == 85_798_656 + 768 * 100 + 100
    assert scale.shown_bytes(4 * found["vit-b16"] * 10**6) == "344 TB"


def test_measured_runs_keep_no_more_than_the_arithmetic_says(scale: ModuleType) -> None:
    runs = json.loads(scale.MEASURED.read_text(encoding="utf-8"))
    assert {(run["clients"], run["algorithm"]) for run in runs} == set(scale.RUNS)
    for run in runs:
        row = 4 * scale.vectors(scale.NAMED[run["algorithm"]].client_fields()) * run["parameters"]
        seen = run["clients"] * (1 - (1 - scale.COHORT / run["clients"]) ** scale.ROUNDS)
        index = 2 * 4096
        assert 0.9 * row * seen <= run["kept"] <= 2 * row * scale.COHORT * scale.ROUNDS + index + 24 * seen
