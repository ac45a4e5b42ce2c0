"""The commands fedflat papers and fedflat reproduce."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedflat.cli.application import app
from fedflat.papers import find_table, papers
from fedflat.papers.outcome import CellOutcome
from fedflat.papers.pictures import bar_chart, picture_commands
from fedflat.papers.plan import Deviations, make_plan

WIDE = {"COLUMNS": "250"}


def call(*arguments: object):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env=WIDE)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def fedflat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``fedflat`` in an empty folder, with only the embedded datasets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "data"))
    return call


SMALL = ("--scale", "small", "--seeds", "1", "--quiet")


def test_all_papers_are_listed(fedflat):
    shown = fedflat("papers").stdout
    for paper in papers().values():
        assert paper.name in shown
    assert "ICML 2025" in shown


def test_a_paper_shows_its_protocols_and_tables(fedflat):
    shown = fedflat("papers", "wima").stdout
    assert "Window-based Model Averaging" in shown
    assert "Protocol femnist" in shown
    assert "mean of 3 seeds" in shown
    for table in papers()["wima"].tables.values():
        assert table.full_name in shown


def test_a_table_shows_printed_numbers_and_notes(fedflat):
    assert re.search(r"number +eigenvalue; eigenvalue\(over=5\); ", fedflat("papers", "eccv/table1").stdout)
    shown = fedflat("papers", "fedswa/table3").stdout
    assert "61.9±0.5" in shown
    assert "400+" in shown
    assert "misprint" in shown
    assert "ViT-B/16" in shown and "init=FILE" in shown
    assert "assumed:" in shown


def test_a_table_in_markdown(fedflat):
    assert "67.9" in fedflat("papers", "fedswa/table6", "--markdown", "table.md").stdout
    lines = Path("table.md").read_text().splitlines()
    assert "|  | accuracy | improvement |" in lines
    assert "| FedMoSWA (i+ii) | 67.9 | +13.7 |" in lines


def test_a_table_as_json(fedflat):
    document = json.loads(fedflat("papers", "eccv/table13", "--json").stdout)
    cell = next(cell for cell in document["cells"] if cell["name"] == "adam-lr-0.1/alpha-0")
    assert (cell["value"], cell["unit"], cell["number"]) == (29.75, "%", "mean")
    assert cell["configs"][0]["training"]["rounds"] == 20000


def test_papers_as_json(fedflat):
    assert [paper["name"] for paper in json.loads(fedflat("papers", "--json").stdout)] == list(papers())
    assert json.loads(fedflat("papers", "fedwmsam", "--json").stdout)["year"] == 2025


def test_cells_are_listed_with_their_requirements(fedflat):
    shown = fedflat("papers", "eccv/table7", "--list-cells").stdout
    assert "fedasam/swa-75" in shown
    assert "cannot" not in shown


@pytest.mark.parametrize("command", ["papers", "reproduce"])
@pytest.mark.parametrize(("name", "message"), [("fedswaa/table3", "'fedswaa'"), ("fedswa/table7", "table2, table3")])
def test_unknown_tables(fedflat, command, name, message):
    result = fedflat(command, name)
    assert result.exit_code == 2
    assert message in result.stderr


def test_small_scale_names_its_stand_ins(fedflat):
    shown = fedflat("reproduce", "fedswa/table4", "--cells", "*/rho-0.1", *SMALL, "--rounds", "2").stdout
    assert "fedswa/table4: 2 ran" in shown
    assert "digits for cifar100; mlp(hidden=32) for resnet18" in shown


def test_finished_runs_are_not_repeated(fedflat, tmp_path):
    arguments = ("reproduce", "wima/table4", "--cells", "*/cifar10", *SMALL, "--rounds", "2", "--json")
    first, second = (json.loads(fedflat(*arguments).stdout) for _ in range(2))
    assert (first["cost"]["runs"], first["cost"]["done"], first["cost"]["rounds"]) == (1, 0, 2)
    assert (second["cost"]["runs"], second["cost"]["done"], second["cost"]["rounds"]) == (1, 1, 0)
    assert first["cells"] == second["cells"]
    assert len(first["cells"]) == 5
    assert len(list(tmp_path.rglob("config.yaml"))) == 1


def test_an_interrupted_run_is_resumed(fedflat, tmp_path):
    short = (*SMALL, "--rounds", "4", "--set", "engine.checkpoint_every=1", "--json")
    arguments = ("reproduce", "fedswa/table6", "--cells", "fedmo-ii/accuracy", *short)
    whole = json.loads(fedflat(*arguments, "--out", "whole").stdout)
    fedflat(*arguments, "--out", "halves", "--set", "stop.seconds=0.000001")
    config = next(Path("halves").rglob("config.yaml"))
    config.write_text(config.read_text().replace("seconds: 1.0e-06", "seconds: null"))
    again = json.loads(fedflat(*arguments, "--out", "halves").stdout)
    assert 0 < again["cost"]["rounds"] < 4
    assert again["cells"] == whole["cells"]


def test_an_interruption_is_reported_with_the_finished_runs(fedflat, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedflat.experiment.campaign.compare.run_each", interrupt)
    result = fedflat("reproduce", "fedswa/table6", "--representative", *SMALL, "--out", "here")
    assert result.exit_code == 130
    said = "interrupted; 0 of 1 runs of fedswa/table6 finished; repeat the command to continue"  # with the same --out
    assert result.stderr == f"fedflat: {said}\n"


def test_a_dry_run_runs_nothing(fedflat, tmp_path):
    shown = fedflat("reproduce", "fedswa/table3", "--cells", "fedavg/*", "--seeds", "2", "--dry-run").stdout
    assert "6 with 2 seeds, 0 finished" in shown
    assert "6,000 remaining" in shown
    assert "cifar100" in shown and "ViT-B/16" in shown and "init=FILE" in shown
    assert "fedflat data get cifar100" in shown and " min on one NVIDIA H200" in shown
    assert "per round  epochs  rounds" in shown
    assert not list(tmp_path.rglob("config.yaml"))
    document = json.loads(fedflat("reproduce", "fedswa/table3", "--cells", "fedavg/*", "--dry-run", "--json").stdout)
    assert len(document["runs"]) == 9
    assert document["missing_data"] == ["cifar100"]
    # 9 runs of 1,000 rounds, each with 10 clients of 500 images for 5 epochs, at about 46,000 gradients per second
    assert 9 * 1000 * 25_000 / 46_000 < document["gpu"]["seconds"] < 1.5 * 9 * 1000 * 25_000 / 46_000
    skipped = fedflat("reproduce", "wima/table3", "--dry-run").stdout
    assert "4 cells: ImageNet weights" in skipped and "time on" not in skipped and "algorithm" not in skipped
    unknown = fedflat("reproduce", "wima/table3", "--set", "init=w.pt", "--dry-run").stdout
    assert "6 runs (unknown: speed of mobilenetv2); to time a few steps on a GPU, with the data, repeat" in unknown
    assert "--probe --set engine.device=cuda --set engine.precision=bf16" in unknown and "init=FILE" not in unknown
    shown = fedflat("reproduce", "wima", "--seeds", "1", "--dry-run", "--no-probe").stdout
    runs = [int(count) for count in re.findall(r"^runs +(\d+) with", shown, re.MULTILINE)]
    total = re.search(r"^all tables +(\d+) distinct runs, [\d,]+ rounds remaining", shown, re.MULTILINE)
    assert total and len(runs) == 7 and int(total[1]) < sum(runs), shown


def test_a_dry_run_estimates_skipped_cells(fedflat):
    shown = fedflat("reproduce", "eccv/figure6", "--dry-run", "--no-probe").stdout
    assert re.search(r"skipped cells need +36 runs, 540,000 rounds; time: about 4 h \d+ min on one NVIDIA H200", shown)
    assert "data to get: fedflat data get cifar10; fedflat data get cifar100" in shown and "not estimated" not in shown
    shown = fedflat("reproduce", "wima/table3", "--dry-run", "--no-probe").stdout
    assert "6 runs, 18,000 rounds; time: unknown; data to get: fedflat data get landmarks" in shown
    assert "6 runs (unknown: speed of mobilenetv2)" in shown and "--set init=FILE" in shown
    document = json.loads(fedflat("reproduce", "fedswa/table3", "--dry-run", "--no-probe", "--json").stdout)
    assert document["missing_data"] == ["cifar100"] and document["skipped"]["missing_data"] == ["tiny_imagenet"]
    assert document["skipped"]["runs"] == document["skipped"]["gpu"]["runs"] == 90
    # A skipped run that another cell needs counts once.
    shown = fedflat("reproduce", "eccv", "--seeds", "1", "--dry-run", "--no-probe").stdout
    assert re.search(r"^skipped cells need +10 further runs; time: unknown", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        ("eccv/table3", 'augmentation="crop-flip+cutout(size=8)"'),
        ("eccv/table5", "clients=1, augmentation=crop-flip+mixup"),
        ("eccv/table8", "statistics=own"),
        ("fedwmsam/figure6", "clients=50"),
    ],
)
def test_a_dry_run_shows_all_settings_in_which_runs_differ(fedflat, monkeypatch, table, setting):
    monkeypatch.setitem(WIDE, "COLUMNS", "400")  # no row is wrapped
    shown = fedflat("reproduce", table, "--seeds", "1", "--dry-run", "--no-probe").stdout
    rows = shown.partition("rounds  settings")[2].strip().splitlines()[1:]
    runs = re.search(r"^runs +(\d+) with", shown, re.MULTILINE)
    assert runs and len(set(rows)) == len(rows) == int(runs[1])
    assert setting in shown


def test_results_as_markdown_and_csv(fedflat, tmp_path):
    cells = ("--cells", "fedgamma/*", *SMALL, "--rounds", "4")
    fedflat("reproduce", "fedswa/table8", *cells, "--markdown", "r.md", "--csv", "r.csv")
    assert Path("r.md").read_text().startswith("| table | cell | published | measured |")
    rows = list(csv.DictReader(Path("r.csv").read_text().splitlines()))
    assert [row["published"] for row in rows] == ["48.4", "51.8", "52.6"]
    assert {row["stand-ins"].partition(";")[0] for row in rows} == {"mlp(hidden=32) for resnet18"}
    assert all(float(row["measured"]) > 10 and float(row["seconds"]) > 0 for row in rows)


def test_fewer_rounds_or_other_settings_give_no_verdict(fedflat):
    changes = ("--rounds", "2", "--set", "training.lr=0.01")
    document = json.loads(fedflat("reproduce", "fedswa/table6", "--representative", *SMALL, *changes, "--json").stdout)
    assert document["cost"]["rounds"] == 2
    assert document["cells"][0]["verdict"] == "ran"
    assert document["folder"].endswith("/fedswa")
    assert "small-2-rounds-" in document["folder"]


def test_a_dense_task_has_a_stand_in_with_seen_and_unseen_domains(fedflat):
    shown = fedflat(
        "reproduce", "eccv/table8", "--cells", "heterogeneous-fedavg/rainy-*", *SMALL, "--rounds", "1"
    ).stdout
    assert "digit_masks(unseen=night) for idda(size=none,unseen=rainy)" in shown
    assert "eccv/table8: 2 ran" in shown


def test_eigenvalues_are_measured_after_the_runs(fedflat, tmp_path):
    cells = ("--cells", "fedasam-swa/*-alpha-0", "--cells", "fedavg-e-1/*-alpha-0")
    arguments = ("reproduce", "eccv/table1", *cells, *SMALL, "--rounds", "4", "--json")
    first, second = (json.loads(fedflat(*arguments).stdout) for _ in range(2))
    values = {cell["cell"]: cell["measured"] for cell in first["cells"]}
    assert values == {cell["cell"]: cell["measured"] for cell in second["cells"]}
    kept = [json.loads(path.read_text()) for path in tmp_path.rglob("measured.json")]
    assert sorted(name for stored in kept for name in stored) == ["spectrum, server", "spectrum, swa"]
    for stored in kept:
        ((name, spectrum),) = stored.items()
        row = "fedasam-swa" if name == "spectrum, swa" else "fedavg-e-1"
        assert values[f"{row}/lambda-max-alpha-0"] == spectrum["eigenvalues"][0] > spectrum["eigenvalues"][4]
        assert values[f"{row}/lambda-max-lambda-5-alpha-0"] == spectrum["eigenvalues"][0] / spectrum["eigenvalues"][4]


def test_a_whole_paper_at_once(fedflat):
    documents = json.loads(fedflat("reproduce", "wima", "--representative", *SMALL, "--rounds", "2", "--json").stdout)
    assert [one["table"] for one in documents] == [table.full_name for table in papers()["wima"].tables.values()]
    assert {cell["verdict"] for one in documents for cell in one["cells"]} == {"ran"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fedswa/table3", "--cells", "fedavg/nothing"), "'fedavg/nothing'"),
        (("fedswa/table3", "--scale", "tiny"), "'tiny'; expected one of paper, small"),
        (("fedswa/table3", "--csv", "nowhere/r.csv"), "nowhere/r.csv"),
        (("fedswa/table3", "--seeds", "none"), "--seeds 'none'"),
        (("fedswa", "--cells", "fedavg/*"), "18"),
        (("fedswa/table3", "--representative", "--cells", "fedavg/*"), "--cells and --representative exclude"),
        (("fedswa/table6", "--set", "training.lr", "--scale", "small"), "--set 'training.lr'"),
        (("fedswa/table2", "--set", "data.dataset=cifar11", "--dry-run"), "'cifar11'; did you mean cifar10"),
        (("fedswa/table6", "--set", "model=resnet19", "--dry-run"), "unknown model 'resnet19'"),
        (("fedswa/table6", "--set", "no.such=1", "--dry-run"), "unknown setting 'no.such'"),
    ],
)
def test_user_errors_are_one_line(fedflat, arguments, message):
    result = fedflat("reproduce", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_runs_with_other_settings_have_their_own_folder(fedflat):
    arguments = ("reproduce", "fedswa/table6", "--representative", *SMALL, "--out", "here")
    assert fedflat(*arguments, "--rounds", "3").exit_code == 0
    other = fedflat(*arguments, "--rounds", "2")
    assert other.exit_code == 2
    assert "training.rounds=3 instead of 2" in other.stderr


def test_list_cells_and_markdown_need_one_table(fedflat):
    for arguments in (("papers", "fedswa", "--list-cells"), ("papers", "--markdown", "table.md")):
        result = fedflat(*arguments)
        assert result.exit_code == 2
        assert "fedswa/table3 --list-cells" in result.stderr
    both = fedflat("papers", "fedswa/table2", "--measured", "--list-cells")
    assert both.exit_code == 2 and "exclude each other" in both.stderr
    missing = fedflat("papers", "fedswa/table3", "--markdown", "nowhere/table.md")
    assert missing.exit_code == 2 and "folder nowhere does not exist" in missing.stderr


def test_titles_of_tables_and_figures(fedflat):
    assert find_table("eccv/table17").title == "Table 17"
    assert find_table("fedswa/figure5").title == "Figure 5"


def test_figures_name_the_commands_that_draw_them(fedflat):
    document = json.loads(
        fedflat("reproduce", "wima/figure2", "--cells", "swa-75/*", *SMALL, "--rounds", "1", "--json").stdout
    )
    folder = document["folder"]
    runs = [str(path.parent) for path in sorted(Path(folder).rglob("config.yaml"))]
    assert document["pictures"] == [f"fedflat report {runs[0]} --apart --out {folder}/report-figure2"]
    shown = fedflat("reproduce", "eccv/figure5", "--cells", "fedasam-swa/alpha-0", *SMALL, "--rounds", "4").stdout
    command = " ".join(shown.partition("picture: ")[2].split())
    assert command.startswith("fedflat flatness spectrum runs/reproduce/small-4-rounds/eccv/")
    assert command.endswith("/seed-0:swa --examples 20 --subsets 1 --eigenvalues 5")
    assert fedflat(*command.split()[1:], "--eigenvalues", "3", "--examples", "50", "--quiet").exit_code == 0


def test_every_panel_of_a_figure_is_drawn(fedflat):
    """Commands use the chosen cells, and planes need three models."""

    out = Path("my out")

    def pictures(*cells: str) -> list[str]:
        table = find_table("eccv/figure14")
        return picture_commands(make_plan(table, table.choose(cells), [0, 1], out, Deviations()), out)

    first, second = pictures()
    assert len(shlex.split(first)) == len(first.replace("my out", "my_out").split())
    assert first.count("alpha-0/seed-0:server") == second.count("alpha-0.5-0.05-5cl/seed-0:server") == 3
    assert pictures("*/alpha-0") == [first]
    assert pictures("fedavg/*") == []
    for_each = find_table("eccv/figure16")
    plan = make_plan(for_each, list(for_each.cells.values()), [0], Path("out"), Deviations())
    assert len(set(picture_commands(plan, Path("out")))) == 9


def test_options_at_small_scale_replace_those_of_the_figure():
    table = find_table("eccv/figure2")
    plan = make_plan(table, list(table.cells.values()), [0], Path("out"), Deviations(small=True))
    for command in picture_commands(plan, Path("out")):
        words = command.split()
        assert words.count("--points") == 1 and words[words.index("--points") + 1] == "11", command


def test_accuracy_under_corruptions_is_drawn_as_bars(fedflat):
    arguments = ("reproduce", "eccv/figure6", "--cells", "fedavg/*", "--cells", "fedasam/cifar10-c", *SMALL)
    document = json.loads(fedflat(*arguments, "--rounds", "1", "--json").stdout)
    assert Path(document["chart"]).name == "figure6.png" and Path(document["chart"]).exists()
    cells = find_table("eccv/figure6").cells
    means = {"fedavg/cifar10-c": 61.0, "fedavg/cifar100-c": 23.0, "fedasam/cifar10-c": 72.0}
    figure = bar_chart([CellOutcome(cells[name], {0: mean}, "ran") for name, mean in means.items()])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["CIFAR10-C", "CIFAR100-C"]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"FedAvg": [61.0, 23.0], "FedASAM": [72.0]}


def test_planes_of_local_models_and_clients_over_rounds_at_small_scale(fedflat):
    arguments = ("reproduce", "eccv/figure2", "--cells", "fedavg/alpha-0", *SMALL, "--rounds", "4", "--json")
    (plane,) = json.loads(fedflat(*arguments).stdout)["pictures"]
    words = plane.split()[1:]
    assert [word.rpartition(":")[2] for word in words[2:5]] == ["client0", "client1", "client2"]
    assert fedflat(*words, "--points", "2", "--examples", "20", "--quiet").exit_code == 0
    saved = list(Path("runs").rglob("models/*"))
    assert saved, "models are saved over rounds, for figures 3, 4, 7 and 16"


@pytest.mark.parametrize(
    "command",
    sorted(
        {command for paper in papers().values() for table in paper.tables.values() for command in table.file.picture}
    ),
)
def test_commands_of_pictures_exist(fedflat, command):
    words = [word for word in command.split()[1:] if word.isalpha()]
    assert fedflat(*words, "--help").exit_code == 0
