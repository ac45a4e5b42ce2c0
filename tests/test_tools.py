"""The project's own tools, and what they wrote."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["lock", "mutate", "release"])
def test_their_examples_hold(name: str) -> None:
    found = doctest.testmod(tool(name))
    assert found.attempted and not found.failed


def test_the_lock_is_whole_and_names_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    locked = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {re.sub(r"[-_.]+", "-", re.split(r"[<>=\[ ]", one)[0]).lower() for one in wanted} <= locked
    assert "torch==2.13.0" in lines


def test_every_change_is_one_that_python_reads() -> None:
    mutate = tool("mutate")
    path = Path("src/fedflat/algorithms/drift/wmsam.py")
    text = (ROOT / path).read_text()
    found = list(mutate.mutations(path, text))
    assert len(found) > 5
    for change in found:
        changed = text.encode()[: change.start] + change.new.encode() + text.encode()[change.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), str(change)


def test_the_same_seed_chooses_the_same_lines() -> None:
    mutate = tool("mutate")
    chosen = mutate.draw_mutations(3, 20)
    assert chosen == mutate.draw_mutations(3, 20) and len({(change.file, change.line) for change in chosen}) == 20
    files = [change.file for change in mutate.draw_mutations(0, 500)]
    assert {file.parts[2] for file in files} == {"algorithms", "averaging", "engines", "flatness"}
    assert not any("cards" in file.parts for file in files)  # they hold published values, not arithmetic


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Git in a repository with the files that a release changes."""
    for name in ("src/fedflat/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changelog = (tmp_path / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(re.sub(r"^## .*", "## 0.2.0 (unreleased)", changelog, count=1, flags=re.M))
    for variable in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(variable, "tester")

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init", "--quiet", "--initial-branch", "main")
    git("add", "--all")
    git("commit", "--quiet", "--message", "Begin")
    git("tag", "v0.1.0")
    return git


def release(*arguments: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tool("release")
    monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(module.check_package, "main", lambda: None)
    monkeypatch.setattr(sys, "argv", ["release.py", *arguments])
    module.main()


def test_a_release_is_prepared_only_with_apply(
    repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release("0.2.0", root=tmp_path, monkeypatch=monkeypatch)
    assert "nothing was changed" in capsys.readouterr().out
    assert repository("tag").split() == ["v0.1.0"] and not repository("status", "--porcelain")
    release("0.2.0", "--apply", root=tmp_path, monkeypatch=monkeypatch)
    assert repository("tag").split() == ["v0.1.0", "v0.2.0"] and not repository("status", "--porcelain")
    assert '__version__ = "0.2.0"' in (tmp_path / "src/fedflat/__init__.py").read_text()
    assert re.search(r"^version: 0\.2\.0$", (tmp_path / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.search(r"^## 0\.2\.0 \(\d{4}-\d\d-\d\d\)$", (tmp_path / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("version", "reason"),
    [("0.2", "expected MAJOR.MINOR.PATCH"), ("0.1.0", "not later than 0.1.0"), ("0.3.0", "has changes")],
)
def test_invalid_releases_are_rejected(
    version: str, reason: str, repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version == "0.3.0":
        (tmp_path / "CITATION.cff").write_text("")
    with pytest.raises(SystemExit, match=reason):
        release(version, root=tmp_path, monkeypatch=monkeypatch)


def test_only_the_publishing_job_may_request_a_token_and_all_python_versions_are_tested() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())
    jobs = workflow["jobs"]
    assert [name for name, job in jobs.items() if job.get("permissions") == {"id-token": "write"}] == ["publish"]
    assert jobs["publish"]["needs"] == ["test", "build"] and workflow["permissions"] == {"contents": "read"}
    tested = jobs["test"]["strategy"]["matrix"]["include"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert sorted({row["python"] for row in tested}) == supported
    oldest = min((row["torch"] for row in tested), key=tool("release").numbers)
    assert f"torch>={oldest.removesuffix('.0')}" in project["dependencies"]


def test_a_killed_run_is_compared_with_an_undisturbed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kill_runs, log = tool("kill_runs"), tmp_path / "kills.jsonl"
    assert {"scaffold", "fedwmsam", "fedadam", "fedavgm policy=fedasync"} <= set(kill_runs.stateful_algorithms())
    entry = {"seed": 0, "algorithm": "scaffold", "interval": "fixed", "kills": 1, "differing": ["metrics.jsonl"]}
    log.write_text(json.dumps({**entry, "trial": 0}) + "\n")
    assert kill_runs.main(["--kills", "1", "--log", str(log)]) == 1
    assert "| all | 1 | 0 | 1 | 1 |" in capsys.readouterr().out
