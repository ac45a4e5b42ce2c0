"""``fedflat deploy check`` on a project: settings, hooks and data, before Flower starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from fedflat.cli.application import app
from fedflat.deploy.flower.project import HOOKS, write_project
from fedflat.deploy.trust.certificates import write_certificates

RNG = np.random.default_rng(0)


def check(project: Path, *options: str) -> tuple[int, str]:
    """Return the exit code, which is 1 if only the list of sites is missing, and the output."""
    done = CliRunner().invoke(app, ["deploy", "check", str(project), *options])
    return done.exit_code, " ".join(done.output.split())


def with_hooks(project: Path, hooks: str) -> Path:
    write_project(project, "scaffold", 3)
    (project / project.name / "hooks.py").write_text(hooks)
    return project


def test_a_new_project_is_ready_once_all_sites_have_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path / "fresh", "scaffold", 3)
    code, output = check(tmp_path / "fresh", "--site", "0", "--site", "2", "--json")
    parts = json.loads(output)["parts"]
    assert code == 1 and [part["part"] for part in parts] == ["server", "site 0", "site 2"]
    assert parts[0]["train"] > parts[1]["train"] + parts[2]["train"]
    assert json.loads(output)["missing"] and not json.loads(output)["ready"]
    monkeypatch.chdir(tmp_path)
    write_certificates(Path("certificates"), ["127.0.0.1"], 3, days=1)
    code, output = check(tmp_path / "fresh")
    assert code == 0 and "data of the server fit together. Start the run" in output
    assert check(tmp_path / "fresh", "--json")[0] == 0
    sites = Path("certificates/sites.txt")
    sites.write_text("\n".join(sites.read_text().splitlines()[:-1]))
    code, output = check(tmp_path / "fresh")
    assert code == 1 and "Missing: client 2 in the list of sites certificates/sites.txt Not ready:" in output


def test_a_private_project_passes_and_a_quorum_does_not(tmp_path: Path) -> None:
    write_project(tmp_path / "private", "fedavg", 3, secure_weighting="uniform")
    settings = tmp_path / "private" / "pyproject.toml"
    text = settings.read_text().replace(
        "[tool.flwr.app.config.federation]", '[tool.flwr.app.config.federation]\nprivacy = "dp(noise=1)"'
    )
    settings.write_text(text)
    code, output = check(tmp_path / "private", "--site", "0")
    assert code == 1 and "epsilon 30.1 after 5 rounds (delta 1e-05), noise multiplier 1," in output
    assert "on: every sum includes at least 2 of 3 sites privacy: the noise on a round's mean update is" in output
    deploy = "[tool.flwr.app.config.deploy]\n"
    settings.write_text(text.replace(deploy, f"{deploy}secure_threshold = 1.0\n").replace("rounds = 5", "rounds = 1"))
    project = json.loads(check(tmp_path / "private", "--json")[1])
    assert project["sums"].startswith("every sum includes at least 3 of 3 sites, or at least 2 (deploy.minimum) if")
    assert "after 1 round (" in project["privacy"]
    settings.write_text(text.replace('privacy = "dp(noise=1)"', 'sampling = "bernoulli"'))
    assert "on: every sum includes at least 2 sites (deploy.minimum)" in check(tmp_path / "private")[1]
    settings.write_text(text.replace(deploy, f"{deploy}quorum = 2\n"))
    assert "deploy.quorum=2 does not work with federation.privacy" in check(tmp_path / "private")[1]
    settings.write_text(re.sub("track = .*", 'track = "tensorboardx"', text))
    assert "unknown tracking backend 'tensorboardx'; did you mean tensorboard?" in check(tmp_path / "private")[1]


def test_the_examples_in_the_hooks_run(tmp_path: Path) -> None:
    """Uncommented, with files at the paths that they name."""
    for name in ("mine", "public"):
        np.savez(tmp_path / f"{name}.npz", inputs=RNG.normal(3, 2, (40, 30)), targets=np.arange(40) % 2)
    lines = [line.removeprefix("#     ") for line in HOOKS.splitlines() if " = None" not in line]
    project = with_hooks(tmp_path / "uncommented", "\n".join(lines).replace("/data/", f"{tmp_path}/"))
    code, output = check(project, "--site", "1")
    assert code == 1 and "site 1" in output and "own training examples" not in output
    by_node = "\n".join(lines).replace("site: int", "site: int, node: dict").replace("/data/mine.npz", "{node['mine']}")
    hooks_of_nodes = by_node.replace('load("', 'load(f"').replace("/data/", f"{tmp_path}/")
    mine = f'mine="{tmp_path}/mine.npz"'
    code, output = check(with_hooks(tmp_path / "nodes", hooks_of_nodes), "--site", "1", "--node-config", mine)
    assert code == 1 and "site 1" in output
    hooks = project / "uncommented" / "hooks.py"
    hooks.write_text(hooks.read_text().replace("mine.npz", "mine.npz,standardise=true"))
    code, output = check(with_hooks(tmp_path / "standardised", hooks.read_text()), "--site", "1")
    assert code == 2 and "site 1: normalisation is none" in output and "own training examples" in output


@pytest.mark.parametrize(
    ("name", "hooks", "problem"),
    [
        ("unimported", "def site_data(site: int) -> Dataset: ...", "unimported/hooks.py fails with NameError"),
        ("failing", "def held_out():\n    return 1 / 0", "hooks.py, line 2"),
        ("returning", "def held_out():\n    return 1", "held_out in hooks.py returns int; expected a Dataset"),
        (
            "renamed",
            "from dataclasses import replace\nfrom fedflat.data import load\n"
            "def site_data(site): return replace(load('digits'), classes=tuple('abcdefghij'))",
            "the server would reject site 0: classes is 0, 1",
        ),
    ],
)
def test_mistakes_in_hooks(name: str, hooks: str, problem: str, tmp_path: Path) -> None:
    code, output = check(with_hooks(tmp_path / name, hooks), "--site", "0")
    assert code == 2 and problem in output


def test_other_mistakes(tmp_path: Path) -> None:
    assert "has no pyproject.toml" in check(tmp_path)[1]
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert "is not a Flower project" in check(tmp_path)[1]
    (tmp_path / "pyproject.toml").write_text("[project\n")
    assert "is not valid TOML" in check(tmp_path)[1]
    assert "--site needs a project folder" in check(tmp_path / "absent", "--site", "0")[1]
    assert "--node-config needs --site" in check(tmp_path, "--node-config", "a=1")[1]
