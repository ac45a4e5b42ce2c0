"""The project that ``fedflat deploy init`` writes, and errors if Flower is missing."""

from __future__ import annotations

import re
import runpy
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from fedflat.cli.application import app
from fedflat.deploy.flower.project import write_project
from fedflat.deploy.flower.version import check_version, require_flower
from fedflat.deploy.settings import PREFIX, Deployment, config_of, deployment_of
from fedflat.deploy.trust.certificates import start_commands
from fedflat.errors import UserError

from .follow_page import commands


def flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    """The config of a project as Flower passes it on."""
    settings: dict[str, object] = {}
    for name, value in values.items():
        settings |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return settings


def test_a_project_is_complete_and_its_config_is_an_experiment(tmp_path: Path) -> None:
    folder = tmp_path / "My Hospital"
    done = CliRunner().invoke(
        app, ["deploy", "init", str(folder), "--algorithm", "scaffold+sam(rho=0.1)", "--clients", "3"]
    )
    assert done.exit_code == 0, done.output
    settings = flat(tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
    config = config_of(settings)
    assert (
        config.algorithm,
        config.data.clients,
        config.federation.clients_per_round,
        config.engine.checkpoint_every,
    ) == (
        "fedgamma",
        3,
        3,
        1,
    )
    assert deployment_of(settings).minimum == 2
    assert {key.removeprefix(PREFIX) for key in settings if key.startswith(PREFIX)} <= Deployment.model_fields.keys()
    for name in ("server", "client", "hooks", "__init__"):
        compile((folder / "my_hospital" / f"{name}.py").read_text(), name, "exec")
    readme = (folder / "README.md").read_text()
    assert readme.index("fedflat deploy certificates certificates --sites 3") < readme.index("--insecure")
    assert "partition-id=2" in readme and "flwr run 'My Hospital' sites --stream" in readme
    assert 'it says "Invalid run configuration"' in (folder / "pyproject.toml").read_text()


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path)])
    assert done.exit_code == 2
    assert "exists and is not empty" in done.output
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "new"), "--algorithm", "scafold"])
    assert "did you mean scaffold" in done.output
    assert not (tmp_path / "new").exists()


def test_a_project_of_one_site_can_run(tmp_path: Path) -> None:
    write_project(tmp_path / "alone", "fedavg", 1)
    settings = tomllib.loads((tmp_path / "alone" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert deployment_of(flat(settings)).minimum == 1


@pytest.mark.parametrize("name", ["fedflat", "random", "class"])
def test_a_project_must_not_hide_a_python_module(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'{name}'.*Python"):
        write_project(tmp_path / name, "fedavg", 3)
    assert not (tmp_path / name).exists()


def test_missing_or_old_flower_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"1\.9\.0.*1\.41.*pip install 'fedflat\[flower\]'"):
        check_version("1.9.0")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("fedflat.deploy.flower.version.version", missing)
    with pytest.raises(UserError, match=r"pip install 'fedflat\[flower\]'"):
        require_flower()


def test_the_docs_have_the_printed_commands(tmp_path: Path) -> None:
    """docs/deploy.md, which ``follow_page.py`` executes, has the commands that are printed."""
    folder = tmp_path / "certificates"
    printed = (
        start_commands(folder, "127.0.0.1", sites=3).replace(str(folder), "certificates").replace("--port 8000 ", "")
    )
    wanted = [line.strip() for line in printed.splitlines() if line.startswith(("  flower-", "  flwr "))]
    assert len(wanted) == 7
    assert [command for command in wanted if command not in commands()] == []


def test_the_plain_app_of_the_overhead_study_is_complete() -> None:
    """The baseline of ``studies/flower_overhead.py``."""
    path = Path(__file__).parents[2] / "studies" / "flower_overhead.py"
    plain = runpy.run_path(str(path))["PLAIN"]
    for name, text in plain.items():
        tomllib.loads(text) if name.endswith(".toml") else compile(text, name, "exec")
    config = tomllib.loads(plain["pyproject.toml"])["tool"]["flwr"]["app"]
    assert {part.split(":")[0].replace(".", "/") + ".py" for part in config["components"].values()} < plain.keys()
    assert set(re.findall(r'run_config\["(\w+)"\]', "".join(plain.values()))) == config["config"].keys()
