"""compare, and show of many runs: table, targets, verdict; finished runs are not repeated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedflat import compare
from fedflat.averaging import AVERAGES
from fedflat.cli.experiments.compare import read_seeds
from fedflat.cli.shared.several_runs import print_comparison, verdict
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.store.files import locked
from fedflat.experiment.store.run_folder import Record
from fedflat.reporting.comparison import Comparison

COSTS = {"backward_passes": 1, "samples": 1, "bytes_down": 1, "bytes_up": 1}


def record(algorithm: str, seed: int, accuracy: float, status: str = "finished", **changes: object) -> Record:
    config = Config(algorithm=algorithm, seed=seed, **changes)
    history = [
        {"round": r, "train_loss": 1.0, "test": {"server": {"loss": 1.0, "accuracy": accuracy}}, **COSTS}
        for r in (1, 2)
    ]
    reason = "round 2: too hot" if status == "diverged" else ""
    averages = tuple(part for part in config.algorithm.split("+") if part in AVERAGES)
    return Record(config, history, status, reason, 1.0, {}, averages=averages)


def several(**accuracies: list[float | None]) -> Comparison:
    return Comparison(
        record(name, seed, value or 0.1, "finished" if value else "diverged")
        for name, some in accuracies.items()
        for seed, value in enumerate(some)
    )


def test_the_table_has_every_algorithm_and_a_verdict(fedflat, compared, small):
    result = fedflat(
        "compare", "fedavg", "fedsam", *small, "--seeds", "2", "--target", "0.05", "--target", "1", "--out", compared
    )
    assert result.exit_code == 0
    for word in (
        "fedavg",
        "fedsam",
        "±",
        "(2/2)",
        "– (0/2)",
        "sent up",
        "per run",
        "is best by the mean of the last 10 % of evaluations",
        "comparison.png",
    ):
        assert word in result.stdout
    assert (compared / "comparison.png").exists()


def test_finished_runs_are_not_run_again(fedflat, compared, small, monkeypatch):
    monkeypatch.setattr("fedflat.experiment.campaign.compare.Run", None)
    for algorithms in (["fedsam", "fedavg"], ["fedavg", "fedsam"]):
        result = fedflat("compare", *algorithms, *small, "--seeds", "0,1", "--quiet", "--out", compared)
        assert result.exit_code == 0 and "4 of 4 runs, finished earlier" in result.stdout
        rows = json.loads(fedflat("show", compared, "--json").stdout)["rows"]
        assert [row["label"] for row in rows] == algorithms  # in the order of the last comparison


def test_the_figure_in_the_folder_shows_all_its_finished_runs(fedflat, compared, small, monkeypatch):
    plotted = []
    monkeypatch.setattr(Comparison, "plot", lambda self, over: plotted.append(self.records) or Figure())
    monkeypatch.setattr("fedflat.reporting.figures.curves.mark_targets", lambda *_: None)
    shutil.copytree(compared, "c")
    config, status = Path("c/fedsam/seed-0/config.yaml"), Path("c/fedsam/seed-1/status.json")
    for flags in (("--figure", "here.png"), (), ()):
        command = ("compare", "fedavg", *small, "--seeds", "2", "--quiet", "--out", "c", *flags)
        shown = fedflat(*command)
        assert shown.exit_code == 0 and ("also 2 runs of earlier" in shown.stdout) == (len(plotted) == 2)
        if len(plotted) == 2:
            config.write_text(config.read_text().replace("batch_size: 10", "batch_size: 11"))  # another experiment
            status.write_text(status.read_text().replace("finished", "paused"))
    algorithms = [[record.config.algorithm for record in records] for records in plotted]
    assert algorithms == [["fedavg"] * 2, ["fedavg", "fedavg", "fedsam", "fedsam"], ["fedavg"] * 2]
    paused = fedflat("compare", "fedavg", *small, "--seeds", "1", "--set", "stop.seconds=1e-9", "--quiet", "--out", "p")
    assert paused.exit_code == 0 and len(plotted[-1]) == 1 and "not repeated" not in paused.stdout


def test_other_settings_in_the_same_folder_are_refused(fedflat, compared, small):
    result = fedflat("compare", "fedavg", *small, "--batch-size", "11", "--out", compared)
    assert result.exit_code == 2 and "training.batch_size=10 instead of 11" in result.stderr


def test_json_has_rows_targets_and_runs(fedflat, compared, small):
    flags = (
        "--seeds",
        "2",
        "--target",
        "0.05,0.05",
        "--json",
        "--out",
        compared,
        "--figure",
        "here.svg",
        "--over",
        "bytes_up",
    )
    result = fedflat("compare", "fedavg", "fedsam", *small, *flags)
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert [row["algorithm"] for row in document["rows"]] == ["fedavg", "fedsam"]
    assert document["rows"][0]["mean_last"]["count"] == 2
    expected = {"target": 0.05, "median": 0.0, "reached": 2, "runs": 2, "bytes": 0.0}  # the initial model is that good
    assert document["rows"][0]["rounds_to"] == [expected]
    assert document["rows"][0]["last_metrics"].keys() == {"loss", "accuracy"}
    assert len(document["runs"]) == 4
    assert Path("here.svg").read_text().startswith("<?xml")


def test_a_repeated_command_uses_the_same_folder(fedflat, small):
    flags = ("compare", "fedavg", *small, "--seeds", "1", "--json")
    first = json.loads(fedflat(*flags).stdout)
    assert first["folder"].startswith("runs/compare-digits-")
    assert json.loads(fedflat(*flags).stdout)["folder"] == first["folder"]
    assert json.loads(fedflat(*flags, "--batch-size", "12").stdout)["folder"] != first["folder"]


def test_a_diverged_run_does_not_stop_the_rest(fedflat, small):
    result = fedflat("compare", "fedavg(server_lr=1e38)", "fedavg", *small, "--seeds", "2", "--quiet", "--out", "c")
    assert result.exit_code == 0
    assert "2 (2 diverged)" in result.stdout
    assert "fedavg(server_lr=1e+38), seed 1: diverged, round" in result.stdout
    assert "fedavg is best" in result.stdout
    evaluated = fedflat("evaluate", *Path("c").glob("fedavg?*/seed-0"), "--on", "test")
    assert "); using its final model" in evaluated.stderr


def test_show_compares_all_runs_below_a_folder(fedflat, compared):
    shown = fedflat("show", compared.parent, "--target", "0.05")
    assert shown.exit_code == 0 and "fedsam" in shown.stdout and "(2/2)" in shown.stdout
    assert len(json.loads(fedflat("show", compared, "--json").stdout)["runs"]) == 4


def test_show_skips_unreadable_runs(fedflat, compared):
    broken = Path("all/broken")
    broken.mkdir(parents=True)
    (broken / "config.yaml").write_text("format: 99\n")
    shutil.copytree(compared / "fedavg" / "seed-0", "all/good")
    result = fedflat("show", "all")
    assert result.exit_code == 0 and "fedavg" in result.stdout
    assert "all/broken" in result.stderr and "format 99" in result.stderr
    assert [run["folder"] for run in json.loads(fedflat("show", "all", "--json").stdout)["left_out"]] == ["all/broken"]


@pytest.mark.parametrize("digest", [None, "0" * 12])
def test_show_counts_a_seed_once(fedflat, compared, digest):
    for name in ("first", "repeated", "other-engine"):
        shutil.copytree(compared / "fedavg" / "seed-0", Path("all", name))
    config, partition = Path("all/other-engine/config.yaml"), Path("all/repeated/partition.json")
    config.write_text(config.read_text().replace("workers: 1", "workers: 2"))
    if digest:
        partition.write_text(json.dumps({**json.loads(partition.read_text()), "own": {"data": digest}}))
    result = fedflat("show", "all", "--json")
    document = json.loads(result.stdout)
    for row in document["rows"]:
        assert row["seeds"] == row["last"]["count"] == row["last_metrics"]["accuracy"]["count"] == 1
    assert [run["folder"] for run in document["runs"]] == ["all/first", "all/other-engine"]
    assert "left out: all/repeated repeats all/first: the same settings and seed" in result.stderr
    assert [run["folder"] for run in document["left_out"]] == ["all/repeated"]
    assert document["left_out"][0]["why"] in result.stderr
    assert ("their data differ" in result.stderr) == bool(digest)


@pytest.mark.parametrize(
    ("file", "is_needed"), [("metrics.jsonl", True), ("partition.json", False), ("timing.jsonl", False)]
)
def test_a_damaged_run_does_not_block_the_others(fedflat, compared, small, tmp_path, file, is_needed):
    shutil.copytree(compared, tmp_path / "damaged")
    (tmp_path / "damaged" / "fedavg" / "seed-0" / file).write_text("{\n")
    flags = ("--seeds", "2", "--quiet", "--json", "--out", tmp_path / "damaged")
    result = fedflat("compare", "fedavg", "fedsam", *small, *flags)
    assert len(json.loads(result.stdout)["runs"]) == (3 if is_needed else 4)
    assert result.exit_code == (1 if is_needed else 0)
    assert f"fedavg/seed-0/{file} is " in result.stderr or file == "timing.jsonl"
    shown = fedflat("show", tmp_path / "damaged" / "fedavg" / "seed-0")
    assert shown.exit_code == (2 if is_needed else 0)


@pytest.mark.parametrize(("text", "seeds"), [("1", [0]), ("3", [0, 1, 2]), ("7,3", [7, 3]), ("5,", [5])])
def test_seeds(text, seeds):
    assert read_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1,x", "1,1", "-1,2", ","])
def test_bad_seeds(text):
    with pytest.raises(UserError, match="--seeds"):
        read_seeds(text)


def test_a_lead_that_exceeds_seed_variation():
    says = verdict(several(fedavg=[0.70, 0.72], fedsam=[0.80, 0.82]))
    assert says.startswith("fedsam is best") and "10.00 points" in says and "fedavg" in says
    assert "exceeds" in says and "(1.41 + 1.41)" in says


def test_a_lead_within_seed_variation():
    says = verdict(several(fedavg=[0.60, 0.80], fedsam=[0.65, 0.85]))
    assert "5.00 points" in says and "within" in says and "(14.14 + 14.14)" in says


def test_the_best_row_is_compared_with_the_second_best_and_then_the_first():
    assert "fedavg is best" in (says := verdict(several(fedavg=[0.9, 0.9], fedsam=[0.5, 0.5], fedcm=[0.8, 0.8])))
    assert "10.00 points" in says and "fedcm" in says and "fedsam" not in says
    says = verdict(several(fedavg=[0.5, 0.5], fedsam=[0.9, 0.9], fedcm=[0.8, 0.8]))
    assert says.endswith("+10.00 points over fedcm; exceeds seed variation (0.00 + 0.00); +40.00 points over fedavg.")
    says = verdict(several(fedavg=[0.5, 0.5], fedsam=[0.8, 0.9], fedcm=[0.9, 0.8]))
    assert says.startswith("fedsam and fedcm tie for best by the mean") and "+35.00 points over fedavg; exceeds" in says
    says = verdict(several(fedavg=[0.5, 0.5], fedsam=[0.5, 0.5], fedcm=[0.5, 0.5]))
    assert says.startswith("fedavg, fedsam and fedcm tie for best") and says.endswith("(50.00 ± 0.00 %).")


def test_one_seed_has_no_variation():
    assert "use --seeds 3" in verdict(several(fedavg=[0.7], fedsam=[0.8]))


def test_a_single_algorithm_has_no_baseline():
    says = verdict(several(fedavg=[0.7, 0.8]))
    assert "nothing to compare" in says and "is best" not in says and "diverged" not in says


def test_curves_leave_diverged_runs_out():
    axes = several(fedavg=[0.5, None], fedsam=[0.6, 0.7], scaffold=[None, None]).plot().axes[0]
    labels = [str(line.get_label()).split("   ") for line in axes.lines]
    assert labels == [["fedavg (1 of 2 diverged)", "50.0"], ["fedsam", "65.0"], ["scaffold (diverged)", "10.0"]]


def test_diverged_rows_are_not_best():
    assert "fedsam is best" in (says := verdict(several(fedavg=[None, None], fedsam=[0.5, 0.5], fedcm=[0.4, 0.4])))
    assert "+10.00 points over fedcm" in says and "fedavg diverged" in says
    assert "1 of 2 seeds" in (says := verdict(several(fedavg=[0.9, None], fedsam=[0.5, 0.5])))
    assert says.endswith("Means exclude diverged runs (fedavg seed 1), which favours their algorithms.")
    assert "fedavg seed 6 and 2 more)" in verdict(several(fedavg=[0.9, 0.9, *[None] * 7], fedsam=[0.5] * 9))
    assert "all others diverged" in verdict(several(fedavg=[0.5, 0.5], fedsam=[None, None]))
    assert "Every run diverged" in verdict(several(fedavg=[None], fedsam=[None]))


def test_runs_with_different_metrics_are_not_ranked():
    other_task = replace(record("fedavg", 0, 0.5, "diverged", model="lenet5"), metric="rmse")
    assert verdict(Comparison([other_task, record("fedsam", 0, 0.5)])).startswith("These runs differ in more than")


def test_rows_with_different_seeds_are_not_ranked():
    says = verdict(several(fedavg=[0.5], fedsam=[0.6, 0.9]))
    assert says == "The rows have different seeds (fedavg: 0; fedsam: 0, 1), so they are not ranked."


def test_unfinished_seeds_are_left_out_of_means(capsys):
    def runs(name: str, *statuses: str) -> list[Record]:
        return [record(name, seed, 0.9 - 0.4 * seed, status) for seed, status in enumerate(statuses)]

    comparison = Comparison([*runs("fedavg", "finished", "running"), *runs("fedsam", "running", "paused")])
    print_comparison(comparison)
    shown = " ".join(capsys.readouterr().out.split())
    assert "90.00 90.00 1 of 2 finished" in shown and "0 of 2 finished" in shown
    assert "fedsam, seed 1: paused after" in shown
    assert "3 of 4 runs have not finished, so no algorithm is called best; wait for them." in shown
    assert verdict(Comparison(runs("fedsam", "running"))) == "No run has finished yet."
    finished = Comparison([*runs("fedavg", "finished"), *runs("fedsam", "finished")])
    assert verdict(finished, missing=4).startswith("4 of 6 runs have not finished")
    assert verdict(Comparison(runs("fedavg", "finished", "paused"))).endswith("or repeat fedflat compare.")


def test_a_killed_run_is_interrupted_once_its_lock_is_free(fedflat, compared, tmp_path):
    shutil.copytree(compared, tmp_path / "killed")
    run = tmp_path / "killed" / "fedavg" / "seed-0"
    (run / "status.json").write_text('{"status": "running"}')

    def statuses() -> list[str]:
        return [run["status"] for run in json.loads(fedflat("show", tmp_path / "killed", "--json").stdout)["runs"]]

    assert sorted(statuses()) == ["finished"] * 3 + ["interrupted"]
    with locked(run / "checkpoint"):
        assert "running" in statuses()


def test_an_interrupted_comparison_counts_runs_that_finished_out_of_order(
    fedflat, compared, small, tmp_path, monkeypatch
):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    shutil.copytree(compared, tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "fedavg" / "seed-0")
    monkeypatch.setattr("fedflat.experiment.campaign.compare.Run", interrupt)
    result = fedflat("compare", "fedavg", "fedsam", *small, "--seeds", "2", "--quiet", "--out", tmp_path / "c")
    assert "3 of 4 runs finished" in result.stderr + str(result.exception)
    shown = fedflat("show", tmp_path / "c", "--json")
    assert json.loads(shown.stdout)["verdict"].startswith("1 of 4 runs have not finished")
    assert "; repeat fedflat compare." in json.loads(shown.stdout)["verdict"]
    (tmp_path / "c" / "fedsam").rename(tmp_path / "c" / "renamed")
    shown = fedflat("show", tmp_path / "c", "--json")
    assert json.loads(shown.stdout)["verdict"].startswith("1 of 4 runs have not finished")


def test_differing_settings_are_shown(capsys):
    comparison = Comparison([record("fedavg", 0, 0.5), record("fedavg", 0, 0.6, model="lenet5")])
    print_comparison(comparison)
    shown = capsys.readouterr().out
    assert "model=mlp" in shown and "model=lenet5" in shown and "is best" not in shown
    first, second = comparison.plot().axes[0].lines
    assert "fedavg, model=mlp " in first.get_label() and first.get_color() != second.get_color()
    assert "<td>fedavg, model=lenet5</td>" in comparison._repr_html_()


def with_average(text: str, seed: int, begins: int) -> Record:
    """A run of 30 rounds whose average exists from round ``begins`` on."""
    found = record(text, seed, 0.5)
    name = text.partition("+")[2]
    history = [
        {
            **found.history[0],
            "round": r,
            "test": {"server": {"accuracy": 0.02 * r}} | ({name: {"accuracy": 0.9}} if r >= begins else {}),
        }
        for r in range(1, 31)
    ]
    return replace(found, history=history)


def test_means_over_different_evaluations_have_no_best(capsys):
    comparison = Comparison(with_average("fedavg+swa", seed, begins=30) for seed in (0, 1))
    print_comparison(comparison)
    shown = " ".join(capsys.readouterr().out.split())
    assert "58.00 ± 0.00 (n=3)" in shown and "90.00 ± 0.00 (n=1)" in shown
    assert "(fedavg+swa 1, fedavg 3)" in shown and "is best" not in shown
    assert "is best" in verdict(Comparison(with_average("fedavg+swa", seed, begins=1) for seed in (0, 1)))


def test_server_models_of_runs_with_different_averages_share_a_row():
    runs = [record("fedavg", 0, 0.5), with_average("fedavg+swa", 0, begins=99), with_average("fedavg+ema", 0, begins=1)]
    assert [row.label for row in Comparison(runs).rows()] == ["fedavg", "fedavg+ema"]
    assert len(Comparison([record("fedavg", 0, 0.5), record("fedavg", 0, 0.6, model="lenet5")]).rows()) == 2


@pytest.mark.parametrize(
    ("setting", "says"), [("seed=5", "sets seed itself; list seeds"), ("algorithm=scaffold", "as an argument")]
)
def test_settings_that_a_comparison_varies_are_refused(fedflat, setting, says):
    refused = fedflat("compare", "fedavg", "--set", setting)
    assert refused.exit_code == 2 and says in refused.stderr
    name, _, value = setting.partition("=")
    with pytest.raises(UserError, match=f"sets {name} itself"):
        compare(["fedavg"], **{name: value})


@pytest.mark.parametrize(
    ("target", "says"),
    [("90", "between 0 and 1 (for 90 % write 0.9)"), ("nan", "finite number"), ("-1", "between 0 and 1")],
)
def test_targets_that_no_accuracy_can_reach_are_refused(fedflat, compared, small, target, says):
    for command in (
        ("compare", "fedavg", *small, "--out", compared),
        ("show", compared),
        ("report", compared),
        ("run", "fedavg", *small),
    ):
        wanted = ("--set", f"stop.target={target}") if command[0] == "run" else ("--target", target)
        refused = fedflat(*command, *wanted)
        assert refused.exit_code == 2 and says in " ".join(refused.stderr.split())


def test_runs_that_were_never_evaluated():
    assert verdict(Comparison([Record(Config(), [], "running", "", 0.0, {})])) == "No run has been evaluated yet."
