"""Components of the user: templates, --plugin, and runs whose names are not registered."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedflat.errors import UserError
from fedflat.registry import load_plugins, plugins_to_record
from fedflat.reporting.page.document import report_document
from fedflat.reporting.page.gather import gather, group_runs
from fedflat.reporting.page.repeat import repeat_commands
from tests.cli.conftest import call
from tests.registries import registries_restored

USES = {
    "algorithm": "fedflat run my-algorithm --plugin my_algorithm.py --rounds 5",
    "server": "fedflat run fedavg+my-server --plugin my_server.py --rounds 5",
    "dataset": "fedflat run fedavg --dataset my-dataset --plugin my_dataset.py --rounds 5",
    "model": "fedflat run fedavg --model my-model --plugin my_model.py --rounds 5",
}
"""The next command that ``fedflat new`` prints, by kind."""
RUN_KINDS = ("algorithm", "dataset", "model")
"""The kinds that the runs of these tests use."""


def test_templates_are_valid_and_pass_their_tests(fedflat, tmp_path, restore_registries, monkeypatch):
    for kind, use in USES.items():
        result = fedflat("new", kind, f"my-{kind}")
        assert result.stdout.splitlines() == [f"my_{kind}.py", f"test_my_{kind}.py", f"Next: {use}"]
    assert "class MyModel(ModelSpec)" in (tmp_path / "my_model.py").read_text()
    ruff = [sys.executable, "-m", "ruff"]
    rules = ("--isolated", "--select", "E,F,W,I,UP,B,SIM,RET,RUF")
    for command in ([*ruff, "check", *rules, "."], [*ruff, "format", "--isolated", "--check", "."]):
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout
    assert "my_model.py?" in fedflat("algorithms", "--plugin", "my_model").stderr
    for kind in USES:
        load_plugins([f"my_{kind}.py"])
        runpy.run_path(f"test_my_{kind}.py")["test_properties"]()
    restore_registries()
    (tmp_path / "my_model.py").unlink()
    again = fedflat("new", "model", "my-model")
    assert again.exit_code == 2 and "test_my_model.py already exists" in again.stderr
    monkeypatch.setenv("FEDFLAT_PLUGINS", "my_dataset.py")
    assert "my-dataset" in fedflat("data").stdout
    assert not (tmp_path / "my_model.py").exists()
    assert "--plugin 'my own/my_model.py'" in fedflat("new", "model", "my-model", "--out", "my own").stdout


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("algorithms", "mine", "unknown kind 'algorithms'; did you mean algorithm?"),
        ("algorithm", "FedAvg", "'FedAvg' is already the name of a registered algorithm"),
        ("algorithm", "sam", "'sam' is already the name of a registered perturbation"),
        ("model", "my model", "'my model' is not a valid model name"),
        ("dataset", "json", "'json' is the name of an installed Python module"),
        ("model", "class", "'class' is a keyword of Python"),
        ("dataset", "numpy", "'numpy' is the name of an installed Python module"),
    ],
)
def test_invalid_template_names_are_rejected(fedflat, tmp_path, kind, name, message):
    result = fedflat("new", kind, name)
    assert result.exit_code == 2 and message in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_template_that_cannot_be_written_leaves_no_file(fedflat, tmp_path, monkeypatch):
    def write(path: Path, text: str) -> None:
        if path.name.startswith("test_"):
            raise UserError("cannot write")
        path.write_text(text)

    monkeypatch.setattr("fedflat.cli.experiments.new.write_atomically", write)
    assert fedflat("new", "algorithm", "zz").exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def own_runs(tmp_path_factory, small):
    """A folder with plugins in ``own``, and two runs that use them in ``runs``."""
    folder = tmp_path_factory.mktemp("own_runs")
    for kind in RUN_KINDS:
        assert call("new", kind, f"my-{kind}", "--out", folder / "own").exit_code == 0
    flags = ["--dataset", "my-dataset", "--model", "my-model", *small, "--set", "stop.seconds=1e-9", "--quiet"]
    for kind in RUN_KINDS:
        flags += ["--plugin", folder / "own" / f"my_{kind}.py"]
    with registries_restored():
        for name, text in {"own": "my-algorithm(mu=0.2)+sam+wima(window=2)+ema", "fedavg": "fedavg"}.items():
            result = call("run", text, *flags, "--out", folder / "runs" / name)
            assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture
def own_run(fedflat, own_runs, tmp_path, restore_registries):
    """A copy of a paused run whose algorithm, dataset and model come from plugins that are not loaded."""
    shutil.copytree(own_runs, tmp_path, dirs_exist_ok=True)
    for recorded in (tmp_path / "runs").glob("*/plugins.json"):
        recorded.write_text(recorded.read_text().replace(str(own_runs), str(tmp_path)))
    return Path("runs/own")


def test_a_run_stays_visible_without_its_plugin(fedflat, own_run, tmp_path):
    label = "my-algorithm(mu=0.2)+sam"
    (tmp_path / "own").rename(tmp_path / "moved")
    shown = fedflat("show", own_run)
    assert shown.exit_code == 0 and f"{label}+wima(window=2)+ema" in shown.stdout and "my-dataset" in shown.stdout
    assert "last checkpoint: round 1" in " ".join(shown.stdout.split())
    rows = json.loads(fedflat("show", "runs", "--json").stdout)["rows"]
    labels = [label, f"{label}+wima(window=2)", f"{label}+ema"]
    assert [row["label"] for row in rows] == ["fedavg", *labels]
    report = json.loads(fedflat("report", "runs", "--no-figures", "--json").stdout)
    assert report["left_out"] == []
    assert [row["label"] for row in report["sections"][0]["rows"]] == ["fedavg", *labels]
    assert "my-algorithm" in fedflat("watch", "runs", "--once").stdout
    assert not any(name.startswith("my_") for name in sys.modules)
    (group,) = group_runs(gather([own_run]).records)
    compare, _ = repeat_commands(group, tmp_path / "my report" / "settings.yaml", "again", [])
    assert compare.endswith(
        "--out again --plugin own/my_algorithm.py --plugin own/my_dataset.py --plugin own/my_model.py"
    )
    assert " 'my-algorithm(mu=0.2)+sam+wima(window=2)+ema' --config 'my report/settings.yaml' " in compare
    Path("my_algorithm.py").touch()
    assert "--plugin my_algorithm.py" in fedflat("run", "my-algorithm").stderr


def test_a_run_loads_its_plugins_again(fedflat, own_run, tmp_path):
    recorded = json.loads((own_run / "plugins.json").read_text())
    assert list(recorded) == [str(tmp_path / "own" / f"my_{kind}.py") for kind in RUN_KINDS]
    assert set(map(len, recorded.values())) == {64}
    rounds_before = json.loads((own_run / "status.json").read_text())["rounds"]
    assert fedflat("resume", own_run, "--quiet").exit_code == 0
    assert json.loads((own_run / "status.json").read_text())["rounds"] == rounds_before + 1


def test_the_config_of_a_run_names_its_plugins_without_executing_them(fedflat, own_run, tmp_path):
    plugins = [tmp_path / "own" / f"my_{kind}.py" for kind in RUN_KINDS]
    command = ("run", "--config", own_run / "config.yaml", "--dry-run")
    without = fedflat(*command)
    assert without.exit_code == 2
    assert f"config.yaml may need the plugin {plugins[0]}; pass it with --plugin" in without.stderr
    flags = [word for plugin in plugins for word in ("--plugin", plugin)]
    assert "may need" not in (given := fedflat(*command, *flags)).stderr and given.exit_code == 0


def test_a_run_needs_only_the_plugins_that_it_uses(fedflat, own_run, tmp_path):
    """The run of FedAvg uses the dataset and the model of the plugins, but not their algorithm."""
    recorded = json.loads(Path("runs/fedavg/plugins.json").read_text())
    assert [Path(path).name for path in recorded] == ["my_dataset.py", "my_model.py", "unused"]
    assert [Path(path).name for path in recorded["unused"]] == ["my_algorithm.py"]
    (tmp_path / "own" / "my_algorithm.py").unlink()
    assert fedflat("evaluate", "runs/fedavg", "--on", "test").exit_code == 0


def test_a_plugin_is_used_by_plugins_that_mention_its_names(tmp_path, restore_registries):
    part = "from fedflat.algorithms.drift.prox import Prox\nclass Part(Prox): pass\nfedflat.register('part', Part)\n"
    contents = {"part": part, "whole": "fedflat.register('whole', fedflat.algorithm('fedavg+part(mu=0.3)+sam'))\n"}
    for name, content in contents.items():
        (tmp_path / f"own_{name}.py").write_text(f"import fedflat\n{content}")
        load_plugins([tmp_path / f"own_{name}.py"])
    used = {text: [Path(path).stem for path in plugins_to_record(text)] for text in ("whole", "Part", "fedavg")}
    assert used == {"whole": ["own_part", "own_whole"], "Part": ["own_part", "unused"], "fedavg": ["unused"]}


def test_a_label_loads_plugins_only_if_they_are_needed_and_unchanged(fedflat, own_run, tmp_path):
    def labelled(text):
        return fedflat("report", own_run, "--no-figures", "--label", text)

    assert labelled("my-algorithm=Mine").exit_code == 0 and "unknown row" in labelled("fedsam=x").stderr
    assert "my_algorithm" not in sys.modules
    plugin = tmp_path / "own" / "my_algorithm.py"
    content = plugin.read_text()
    plugin.write_text(content + "raise SystemExit\n")
    refused = " ".join(labelled("my-algorithm(mu=0.20)+SAM=Ours").stderr.split())
    assert "did you mean my-algorithm(mu=0.2)+sam" in refused and "my_algorithm.py has changed; pass" in refused
    plugin.write_text(content)
    assert labelled("my-algorithm(mu=0.20)+SAM=Ours").exit_code == 0
    assert "\n| Ours |" in Path("report/results.md").read_text()


@pytest.mark.parametrize("command", ["resume", "evaluate", "flatness sharpness"])
def test_a_moved_plugin_is_named_with_the_command(fedflat, own_run, tmp_path, command):
    (tmp_path / "own").rename(tmp_path / "moved")
    result = fedflat(*command.split(), own_run)
    missing = tmp_path / "own" / "my_algorithm.py"
    assert result.exit_code == 2
    assert f"the run in {own_run} needs the plugin {missing}, which does not exist" in result.stderr
    assert f"fedflat {command} {own_run} --plugin NEW_FOLDER/my_algorithm.py" in result.stderr


def test_plugins_from_the_environment_and_the_command_line(fedflat, own_run, tmp_path, monkeypatch):
    (tmp_path / "own").rename(tmp_path / "moved")
    with (tmp_path / "moved" / "my_model.py").open("a") as file:
        file.write("# changed\n")
    monkeypatch.setenv("FEDFLAT_PLUGINS", os.pathsep.join(["moved/my_algorithm.py", "moved/my_dataset.py"]))
    result = fedflat("evaluate", own_run, "--on", "test", "--plugin", "moved/my_model.py")
    assert result.exit_code == 0, result.stderr
    assert "my_model.py has changed since the run in runs/own began" in result.stderr
    assert "my_dataset.py has changed" not in result.stderr


def test_a_comparison_that_mixes_versions_of_a_plugin_warns(fedflat, small, tmp_path, restore_registries):
    """The plugin itself does not change, but a module that it imports from its folder."""
    (tmp_path / "versioned.py").write_text("def weights():\n    import plugin_helpers.weights\n")
    helper = tmp_path / "plugin_helpers" / "weights.py"
    helper.parent.mkdir()
    (helper.parent / "__init__.py").touch()
    helper.touch()
    command = ["compare", "fedavg", *small, "--rounds", 1, "--quiet", "--out", "out", "--plugin", "versioned.py"]
    assert "versioned.py" not in fedflat(*command, "--seeds", 1).stderr
    assert "versioned.py" not in fedflat(*command, "--seeds", 1).stderr
    helper.write_text("WEIGHT = 2\n")
    restore_registries()
    result = fedflat(*command, "--seeds", 2)
    warning = "versioned.py has changed since 1 of these runs began, or is not loaded now, and they are not repeated: "
    warning += "out/fedavg/seed-0;"
    assert warning in result.stderr
    mixed = "different plugins, or versions of one, so its mean may mix different code: fedavg (versioned.py)."
    assert mixed in " ".join(fedflat("show", "out").stdout.split())
    (section,) = report_document(gather([Path("out")]))["sections"]
    assert sum(mixed in note["text"] for note in section["notes"]) == 1
    assert mixed in " ".join(fedflat("report", "out", "--no-figures").stderr.split())
    assert mixed.replace("fedavg", "FedAvg") in Path("report/results.md").read_text()
    assert "(versioned.py)" in Path("report/results.tex").read_text()


def test_a_plugin_with_another_name_and_content_is_noticed(fedflat, small, tmp_path, restore_registries):
    for name, factor in (("first.py", 1), ("second.py", 2)):
        code = "import fedflat\nfrom fedflat.algorithms.server import Sgd\n"
        code += f"fedflat.register('mine', fedflat.Algorithm(server=Sgd(server_lr={factor}.0)))\n"
        (tmp_path / name).write_text(code)
    command = ["compare", "mine", *small, "--rounds", 1, "--quiet", "--out", "out", "--seeds"]
    fedflat(*command, 1, "--plugin", "first.py")
    restore_registries()
    assert "first.py has changed since 1 of these runs began" in fedflat(*command, 2, "--plugin", "second.py").stderr
    shown = " ".join(fedflat("show", "out").stdout.split())
    assert "its mean may mix different code: mine (first.py, second.py)" in shown


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("absent.py", None, "absent.py does not exist; expected the path of a Python file"),
        ("own.txt", "", "own.txt is not a Python module"),
        ("json.py", "", "has the same name as another module"),
        ("broken.py", "\nimport fedflat\nfedflat.regster", "broken.py, line 3: AttributeError: module 'fedflat'"),
        ("worse.py", "\ndef", "worse.py, line 2: SyntaxError"),
        ("script.py", "import sys\nsys.exit(3)", "script.py, line 2: SystemExit: 3"),
        (".", None, "is a folder; expected the path of a Python file"),
        ("taken.py", "import fedflat\nfedflat.register('fedavg', fedflat.Algorithm(1))", "taken.py, line 2: the algo"),
    ],
)
def test_plugins_that_cannot_be_loaded(fedflat, tmp_path, file, content, message):
    if content is not None:
        (tmp_path / file).write_text(content)
    result = fedflat("algorithms", "--plugin", file)
    assert result.exit_code == 2 and message in result.stderr
    assert Path(file).stem not in sys.modules or file == "json.py"
