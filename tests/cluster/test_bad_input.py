"""What cannot be done is told in one sentence."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedflat
from fedflat.engines.ray import cluster as ray_cluster
from fedflat.engines.ray.cluster import check_address, connect, device_for, gpus_each, ray_module, workers_for
from fedflat.engines.ray.worker import check_facts, facts
from fedflat.errors import UserError
from fedflat.experiment.setup.problem import federation

from .federations import engine_of, small
from .nodes import Nodes, python, said


def test_ray_is_not_installed() -> None:
    """In a process of its own, from which Ray is hidden."""
    code = "import sys; sys.modules['ray'] = None; import fedflat; fedflat.run('fedavg', rounds=1, engine='ray')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.endswith(
        'engine.name=ray needs Ray, which is not installed; install it with: pip install "fedflat[ray]"'
    )


def test_ray_is_not_installed_for_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        UserError, match=r'ray_address needs Ray, which is not installed; install it with: pip install "fedflat\[ray\]"'
    ):
        fedflat.sweep({"grid": {"seed": [0, 1]}, "ray_address": "auto"}, out=tmp_path)


def test_ray_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(__version__="2.9.3")
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(
        UserError,
        match=r"Ray 2\.9\.3 is too old, and 2\.40 or newer is needed; update it with: pip install .* --upgrade",
    ):
        ray_module()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", r"no Ray cluster answers at 127\.0\.0\.1:1 \(.*refused\); start one there"),
        ("nowhere.invalid:6379", "no Ray cluster answers at nowhere.invalid:6379"),
        ("127.0.0.1:99999", "no Ray cluster answers at 127.0.0.1:99999"),
        ("elsewhere", "is no address; expected HOST:PORT"),
        ("ray://10.0.0.1:10001", "is for Ray's remote client"),
    ],
)
def test_addresses_at_which_there_is_nothing(address: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_address(address)


class NoToken(Exception):
    """Stands for Ray's own."""


@pytest.mark.parametrize(
    "error", [ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"), NoToken("no token was found")]
)
def test_a_cluster_that_asks_for_a_token(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends its token to no address that is named, unless it is told to."""

    def init(**settings: Any) -> None:
        raise error

    strict = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=SimpleNamespace(RayError=NoToken))
    monkeypatch.setattr(ray_cluster, "ray_module", lambda what: strict)
    monkeypatch.setattr(ray_cluster, "check_address", lambda address: None)
    with pytest.raises(
        UserError, match=r"what listens at 10\.0\.0\.1:6379 .*; .* asks for a token, set RAY_AUTH_MODE=token here"
    ):
        connect("10.0.0.1:6379", 2)


def test_a_cluster_without_what_is_asked_for(ray: Any) -> None:
    connected = connect(None, 2)
    assert connected is ray
    with pytest.raises(UserError, match="no node of the Ray cluster has a GPU"):
        device_for(ray, "cuda")
    assert device_for(ray, "auto") == "cpu"
    assert workers_for(ray, None, "cpu") == 4
    with pytest.raises(UserError, match=r"engine\.workers=64 is more than the 4 cores of the Ray cluster"):
        workers_for(ray, 64, "cpu")
    with pytest.raises(UserError, match="bf16 is for a GPU, and this run is on the CPU"):
        engine_of(small(engine__precision="bf16"), 2)


TWICE = """
import sys
import fedflat
address, config, out = sys.argv[1:]
seeds = {"base": {"engine.device": "cpu"}, "grid": {"seed": list(range(8))}, "ray_address": address}
attempts = [
    lambda: fedflat.run(base=config, engine="ray", workers=2, ray_address=address),
    lambda: fedflat.sweep(seeds, out=out + line.strip()),
]
for line in sys.stdin:
    for attempt in attempts:
        try:
            attempt()
            print("nothing was said", flush=True)
        except fedflat.UserError as sentence:
            print(sentence, flush=True)
"""


def test_a_node_with_another_version_or_none(cluster: Nodes, tmp_path: Path) -> None:
    """A second node, whose processes find a copy of fedflat that calls itself by another version, or one that cannot be imported."""
    config = tmp_path / "config.yaml"
    config.write_text(small(rounds=2).to_yaml())
    with python("-c", TWICE, cluster.address, str(config), str(tmp_path / "sweep")) as driver:
        for version, expected in EXPECTED.items():
            with cluster.another(PYTHONPATH=str(other_fedflat(tmp_path / f"other {version}", version))):
                assert re.fullmatch(expected, said(driver, f"{version}\n")), "what the run says"
                assert re.fullmatch(expected, said(driver)), "what the sweep says"


EXPECTED = {
    "9.9.9": r"node .* of the Ray cluster has fedflat 9\.9\.9, and this is 0\.\d+\.\d+; install the same version on every node",
    None: r".* is fedflat installed on every node\?",
}


def other_fedflat(folder: Path, version: str | None) -> Path:
    """A folder from which another fedflat is imported."""
    own = Path(fedflat.__file__).parent
    start = folder / "fedflat" / "__init__.py"
    if version is None:
        start.parent.mkdir(parents=True)
        start.write_text("raise ImportError('there is no fedflat here')\n")
    else:
        shutil.copytree(own, start.parent)
        start.write_text(start.read_text().replace(f'"{fedflat.__version__}"', f'"{version}"'))
    return folder


def test_a_node_with_other_data() -> None:
    known = facts(federation(small())[0])
    check_facts(known, known)
    with pytest.raises(
        UserError, match=r"finds other training examples than .* put the same data and weights in the same place"
    ):
        check_facts(known, {**known, "training examples": 3})


def test_a_mistake_in_a_worker_is_told_as_it_is_here(ray: Any) -> None:
    engine = engine_of(small(), 2)
    with pytest.raises(KeyError, match="no such set"):
        engine.crew.map("evaluate", [([tuple(model_arrays(engine))], [(0, "no such set", None)])], engine._source)
    assert engine.crew.lost == 0 or engine.crew.processes


def model_arrays(engine: Any) -> Any:
    weights, buffers, integers = engine.problem.initial()
    return weights.numpy(), buffers.numpy(), {name: value.numpy() for name, value in integers.items()}


@pytest.mark.parametrize(
    ("wanted", "workers", "each"), [(None, 2, 1.0), (1, 1, 1.0), (2, 2, 1.0), (3, 3, 0.5), (5, 5, 1 / 3)]
)
def test_more_workers_than_gpus_share_them(wanted: int | None, workers: int, each: float) -> None:
    two: Any = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 2.0})
    assert workers_for(two, wanted, device_for(two, "auto")) == workers
    assert gpus_each(two, workers) == each
    with pytest.raises(UserError, match=r"engine\.workers=9 is more than the 8 cores"):
        workers_for(two, 9, "cuda")


def test_a_process_that_is_connected_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    connected = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(ray_cluster, "ray_module", lambda what: connected)
    assert all(ray_cluster.connect(address, None) is connected for address in (None, "auto", "10.0.0.1:6379"))
    with pytest.raises(
        UserError,
        match=r"connected to the Ray cluster at 10\.0\.0\.1:6379 already; for ray_address=10\.0\.0\.2:6379 start a new",
    ):
        ray_cluster.connect("10.0.0.2:6379", None)
