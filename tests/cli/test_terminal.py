"""Tables keep words whole at 80 columns, JSON is the only output, and commands are corrected once."""

from __future__ import annotations

import json
import re

import pytest
from rich.console import Console

from fedflat.cli.shared.screen import key_values, show_loading, table

TABLES = [
    "settings",
    "algorithms",
    "algorithms fedmoswa+asam(rho=0.3)+wima(window=50)",
    "models",
    "models resnet18",
    "papers",
    "papers fedswa",
    "papers fedswa/table3",
    "papers eccv/table7 --list-cells",
    "data list",
    "data describe digits --partition dirichlet",
    "show RUN",
    "show RUNS --target 0.5",
    "watch RUNS --once",
    "clean RUNS",
    "evaluate RUN",
    "reproduce fedswa/table6 --dry-run --no-probe",
    "flatness gap RUN --examples 20 --quiet",
]


def words(text: str) -> set[str]:
    return set(re.findall(r"[\w.%±]+(?:-[\w.]+)*", text))


@pytest.mark.parametrize("command", TABLES)
def test_no_word_is_broken_at_80_columns(fedflat, finished, compared, monkeypatch, command):
    names = {"RUN": finished, "RUNS": compared}
    arguments = [names.get(word, word) for word in command.split()]
    outputs = {}
    for columns in (80, 1000):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = fedflat(*arguments)
        assert result.exit_code == 0, result.output
        outputs[columns] = re.sub(r"\d+(\.\d+)? m?s\b", "time", result.stdout)
    assert max(map(len, outputs[80].splitlines())) <= 80
    assert words(outputs[80]) <= words(outputs[1000])


def test_columns_that_do_not_fit_continue_below(capsys):
    numbers = [f"quantity-{number}" for number in range(12)]
    grid = table(["model", *numbers], [["server", *range(100, 112)]], numeric=numbers)
    Console(width=60).print(grid)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip() and "─" not in line]
    assert [line[0] for line in lines] == ["model", "server"] * 3
    assert [word for line in lines[1::2] for word in line[1:]] == [str(number) for number in range(100, 112)]


def test_optional_columns_are_left_out_first(capsys):
    grid = table(["run", "bar", "loss"], [["fedavg", "#" * 20, "0.25"]], optional=["bar"])
    Console(width=40).print(grid)
    Console(width=30).print(grid)
    first, second = capsys.readouterr().out.split("run")[1:]
    assert "#" * 20 in first and "bar" not in second and "0.25" in second


def test_a_command_on_a_terminal_says_at_once_that_it_loads(capsys, monkeypatch):
    show_loading(silent=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show_loading(silent=True)
    assert not capsys.readouterr().err
    show_loading(silent=False)
    assert capsys.readouterr().err.startswith("loading PyTorch")


def test_paths_break_after_a_slash(capsys):
    Console(width=30).print(key_values({"folder": "/somewhere/quite/deep/below/the/root"}))
    assert capsys.readouterr().out.split() == ["folder", "/somewhere/quite/deep/", "below/the/root"]


@pytest.mark.parametrize(
    "command", ["settings", "show RUN", "show RUNS", "watch RUNS", "clean RUNS", "export RUN", "resume RUN"]
)
def test_json_is_the_only_output(fedflat, finished, compared, command):
    names = {"RUN": finished, "RUNS": compared}
    result = fedflat(*(names.get(word, word) for word in command.split()), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


@pytest.mark.parametrize(("typed", "meant"), [(["runn"], "run"), (["flatness", "spectrumm"], "spectrum")])
def test_an_unknown_command_is_corrected_once(fedflat, typed, meant):
    result = fedflat(*typed)
    assert result.exit_code == 2
    assert " ".join(result.stderr.split()).count(f"did you mean {meant}?") == 1
    assert result.stderr.lower().count("did you mean") == 1
