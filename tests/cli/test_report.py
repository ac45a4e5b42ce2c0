"""fedflat report on real runs: files and user errors."""

from __future__ import annotations

import csv
import html
import json
import re
import shlex
import shutil

import pytest


def test_every_file_is_written(fedflat, compared, tmp_path):
    result = fedflat("report", compared, "--target", "0.99", "--by", "last", "--title", "Two of them")
    assert result.exit_code == 0
    out = tmp_path / "report"
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("report.html", "values.csv", "settings.yaml", "figures"),
        *(f"{table}.{ending}" for table in ("results", "differences") for ending in ("csv", "md", "tex")),
    }
    assert "<h1>Two of them</h1>" in (out / "report.html").read_text()
    assert len(list((out / "figures").glob("*.pdf"))) == 7
    lines = list(csv.DictReader((out / "values.csv").open()))
    assert {(line["row"], line["seed"]) for line in lines} == {
        (name, seed) for name in ("fedavg", "fedsam") for seed in "01"
    }
    assert "3+ (0/2)" in (out / "results.md").read_text()
    assert "mean of the last 10 % of evaluations" in (out / "report.html").read_text()
    arguments = ("report", compared, "--no-figures", "--target", "0.99", "--columns")
    assert fedflat(*arguments, "best, rounds_to_0.99").exit_code == 0
    assert (out / "results.csv").read_text().startswith("row,best test value,rounds to 99 %\n")
    assert r"algorithm & best & rounds to 99 \% \\" in (out / "results.tex").read_text()
    assert "unknown column 'median'" in fedflat(*arguments, "median").stderr
    assert "add --target 0.5 (in Python: targets=[0.5])" in fedflat(*arguments, "rounds_to_0.5").stderr
    (out / "results.csv").unlink()
    too_wide = fedflat(*arguments, "mean_last,last,best,seeds,rounds_to_0.99,backward_passes,mb_up,time")
    assert too_wide.exit_code != 0 and "results.tex was not written: the LaTeX table would be" in too_wide.stderr
    assert (out / "results.csv").exists()  # all other files are written


def test_rows_have_the_names_of_papers_or_labels(fedflat, compared, tmp_path):
    arguments = ("report", compared, "--no-figures", "--baseline", "fedavg", "--label")
    assert fedflat(*arguments, "fedsam=SAM (ours)").exit_code == 0
    out = tmp_path / "report"
    assert "\n| FedAvg |" in (text := (out / "results.md").read_text()) and "\n| SAM (ours) |" in text
    assert "Differences from FedAvg" in (text := (out / "differences.tex").read_text())
    assert "SAM (ours) &" in text
    assert '"label":"SAM (ours)"' in (out / "report.html").read_text()
    assert "on digits, Dirichlet(0.1), " in text + (out / "results.md").read_text()
    assert "unknown row 'fedsma'; did you mean fedsam" in fedflat(*arguments, "fedsma=x").stderr
    assert fedflat(*arguments, "FedSAM(rho=0.050)=μ ≤ 1").exit_code == 0  # another spelling of the row fedsam
    assert r"$\mu$ $\leq$ 1 &" in (out / "results.tex").read_text()
    assert "unknown row 'fedsma, lr=0.1'" in fedflat(*arguments, "fedsma, lr=0.1=x").stderr
    assert "same name" in fedflat(*arguments, "fedsam=FedAvg").stderr
    assert "expected ROW=NAME" in fedflat(*arguments, "fedsam").stderr


def test_a_label_may_name_a_row_with_settings(fedflat, compared, tmp_path):
    runs = shutil.copytree(compared, tmp_path / "runs")
    for file in runs.glob("**/config.yaml"):
        rate = "0.02" if "algorithm: fedsam" in (text := file.read_text()) else "0.05"
        file.write_text(re.sub(r"\n  lr: .*", f"\n  lr: {rate}", text))
    assert fedflat("report", runs, "--no-figures", "--label", "fedsam, lr=0.02=Small steps").exit_code == 0
    assert "\n| Small steps |" in (tmp_path / "report" / "results.md").read_text()


def test_the_printed_commands_repeat_runs_and_report(fedflat, compared, tmp_path):
    """One row clips gradients and has one seed less, so that every row has a command."""
    runs = shutil.copytree(compared, tmp_path / "runs")
    shutil.rmtree(runs / "fedsam" / "seed-0")
    for file in (runs / "fedsam").glob("**/config.yaml"):
        file.write_text(file.read_text().replace("\n  clip: null", "\n  clip: 1.0"))
    options = ("--no-figures", "--baseline", "fedsam, clip=1.0", "--label", "fedsam, clip=1.0=SAM's (ours)")
    assert fedflat("report", runs, "--out", "my report", *options).exit_code == 0
    page = html.unescape((tmp_path / "my report" / "report.html").read_text())
    commands = [shlex.split(line) for line in re.search("<pre>(fedflat .*?)</pre>", page, re.DOTALL)[1].splitlines()]
    assert [words[1:3] for words in commands] == [["compare", "fedavg"], ["compare", "fedsam"], ["report", "repeated"]]
    for words in commands:
        assert fedflat(*words[1:]).exit_code == 0
    run = "fedavg/seed-1/metrics.jsonl"
    assert (tmp_path / "repeated" / "1" / run).read_text() == (compared / run).read_text()
    reports = ("my report", "repeated-report")
    captions = [(tmp_path / out / "differences.md").read_text().splitlines()[0] for out in reports]
    assert captions[0] == captions[1] and "SAM's (ours)" in captions[0]


def test_json(fedflat, compared):
    found = json.loads(fedflat("report", compared, "--no-figures", "--json", "--baseline", "fedsam").stdout)
    (section,) = found["sections"]
    assert [one["label"] for one in section["differences"]] == ["fedavg"]
    assert section["differences"][0]["pair"]["seeds"] == [0, 1]
    assert found["files"]["page"] == "report/report.html"


def test_an_incomplete_run_is_reported(fedflat, compared, tmp_path):
    shutil.copytree(compared, tmp_path / "copy")
    (tmp_path / "copy" / "fedsam" / "seed-1" / "status.json").unlink()
    result = fedflat("report", "copy", "--no-figures")
    assert result.exit_code == 0
    assert "left out: copy/fedsam/seed-1/status.json is missing or damaged" in result.stderr
    assert "status.json is missing or damaged" in (tmp_path / "report" / "report.html").read_text()
    refused = fedflat("report", "copy/fedsam/seed-1")
    assert refused.exit_code != 0
    assert "status.json is missing or damaged" in refused.stderr


def test_different_partitions_are_refused_unless_apart(fedflat, compared, small, tmp_path):
    assert fedflat("run", "fedavg", *small, "--partition", "iid", "--quiet", "--out", "iid").exit_code == 0
    refused = fedflat("report", compared, "iid")
    assert refused.exit_code != 0
    for word in ("2 different partitions", "dirichlet(alpha=0.1)", "iid", "--apart"):
        assert word in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "report").exists()
    options = ("--apart", "--no-figures", "--baseline", "fedsam", "--label", "fedsam=SAM", "--label", "fedavg=Avg")
    assert fedflat("report", compared, "iid", *options).exit_code == 0
    page = html.unescape((tmp_path / "report" / "report.html").read_text())
    both, iid = re.findall("fedflat report repeated-. .*?(?=<)", page)  # the second partition has no fedsam
    assert "--baseline fedsam --label fedsam=SAM --label fedavg=Avg" in both
    assert "--label fedavg=Avg" in iid and "fedsam" not in iid
    assert {"results-1.csv", "results-2.csv", "settings-2.yaml"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "nowhere"),
        ((".",), "fedflat run"),
    ],
)
def test_bad_input(fedflat, arguments, words):
    result = fedflat("report", *arguments)
    assert result.exit_code != 0
    assert words in result.stderr
