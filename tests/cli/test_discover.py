"""fedflat discover: the plan, the report, JSON and user errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SPACE = """
base: {rounds: 1, local_steps: 1, clients_per_round: 2, clients: 4, model: mlp(hidden=8), workers: 1, device: cpu,
  data.validation: 0.2}
slots: {perturbation: [none, "sam(rho={rho})"]}
parameters: {rho: {low: 0.01, high: 0.1}}
candidates: 2
confirm: {seeds: [7, 8], ablation: false}
"""


def test_discover(fedflat):
    pytest.importorskip("optuna", minversion="4.0", reason="searches need Optuna (pip install 'fedflat[sweep]')")
    Path("mine.yaml").write_text(SPACE)
    shown = fedflat("discover", "mine.yaml", "--dry-run")
    assert shown.exit_code == 0 and "confirmation runs" in shown.stdout and not Path("runs").exists()
    plan = json.loads(fedflat("discover", "mine.yaml", "--dry-run", "--minutes", "3", "--json").stdout)
    assert plan["minutes"] == 3 and plan["rungs"] == []
    result = fedflat("discover", "mine.yaml", "--out", "out")
    assert result.exit_code == 0 and "Best of 2 candidates" in result.stdout and "p after Holm" in result.stdout
    assert "search, trial 1: " in result.stderr and "confirmed fedavg, seed 8: finished" in result.stderr
    document = json.loads(fedflat("discover", "mine.yaml", "--out", "out", "--json").stdout)
    assert f"\n{document['finalists'][0]['command']}\n" in result.stdout
    assert document == json.loads(Path("out/discover.json").read_text())
    Path("other.yaml").write_text(SPACE.replace("high: 0.1", "high: 0.2"))
    refused = fedflat("discover", "other.yaml", "--out", "out", "--dry-run")
    assert refused.exit_code == 2 and "tune.space.rho={low: 0.01, high: 0.1} instead of" in refused.stderr


def test_the_command_of_the_winner_names_its_plugin(fedflat, restore_registries):
    pytest.importorskip("optuna", minversion="4.0", reason="searches need Optuna (pip install 'fedflat[sweep]')")
    Path("own_part.py").write_text(
        "import fedflat\nfedflat.register('own-part', fedflat.algorithm('fedavg+prox(mu=0.3)'))\n"
    )
    Path("mine.yaml").write_text(SPACE.replace("base: {", "base: {algorithm: own-part, "))
    result = fedflat("discover", "mine.yaml", "--plugin", "own_part.py", "--json")
    winner, baseline = json.loads(result.stdout)["finalists"]
    assert winner["command"].endswith(" --plugin own_part.py") and "--plugin" not in baseline["command"]


def test_a_file_of_tune_is_refused(fedflat):
    Path("mine.yaml").write_text("tune: {space: {lr: [0.1, 0.2]}}")
    assert "mine.yaml has the key tune; use fedflat tune" in fedflat("discover", "mine.yaml").stderr


def test_an_invalid_space_is_one_line(fedflat):
    Path("mine.yaml").write_text(SPACE.replace("sam(", "samm("))
    result = fedflat("discover", "mine.yaml")
    assert result.exit_code == 2 and "unknown perturbation 'samm'; did you mean sam" in result.stderr
    assert not Path("runs").exists()
