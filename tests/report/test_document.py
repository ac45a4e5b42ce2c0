"""The content of a report on runs with known metrics."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fedflat.errors import UserError
from fedflat.experiment.analysis.landscapes import save_landscapes
from fedflat.flatness.landscapes.grid import Landscape, Mark
from fedflat.reporting.comparison import Comparison
from fedflat.reporting.figures.paper_figures import figures_of
from fedflat.reporting.figures.style import COLOURS
from fedflat.reporting.page.display_names import with_display_names
from fedflat.reporting.page.document import report_document, require_evaluations
from fedflat.reporting.page.gather import gather
from fedflat.reporting.page.page import report_page
from fedflat.reporting.tables.files import TextTable, difference_table, result_table, values_csv
from fedflat.reporting.tables.latex import DIFFERENCE_COLUMNS, RESULT_COLUMNS, latex_table, latex_text
from fedflat.reporting.tables.summary import MEAN_LABEL

from .conftest import cloner, write_comparison


@pytest.fixture(scope="module")
def document(real, tmp_path_factory):
    runs = tmp_path_factory.mktemp("compared")
    return report_document(gather([write_comparison(cloner(real, runs), runs)]), targets=[0.7, 0.86], by="last")


@pytest.fixture(scope="module")
def section(document):
    return document["sections"][0]


def row(section, label):
    return next(one for one in section["rows"] if one["label"] == label)


def notes(section, kind):
    return " ".join(note["text"] for note in section["notes"] if note["kind"] == kind)


def test_rows_summarise_last_best_and_mean(section):
    fedsam = row(section, "fedsam")
    assert fedsam["spread"]["last"]["mean"] == pytest.approx(0.82)
    assert fedsam["spread"]["last"]["std"] == pytest.approx(0.01)
    assert fedsam["spread"]["best"]["mean"] == pytest.approx(0.85)
    assert fedsam["spread"]["mean_last"] == fedsam["spread"]["last"]  # a tenth of three evaluations is the last one
    assert fedsam["mean_counts"] == {0: 1, 1: 1, 2: 1}


def test_differences_are_paired(section):
    (one,) = [one for one in section["differences"] if one["label"] == "fedsam"]
    assert one["pair"]["differences"] == pytest.approx((0.01, 0.02, 0.03))
    assert one["pair"]["mean"] == pytest.approx(0.02)
    # t = 0.02 / (0.01 / sqrt 3) with two degrees of freedom: p = 1 - t / sqrt(t^2 + 2)
    t = 2 * math.sqrt(3)
    assert one["pair"]["p"] == pytest.approx(1 - t / math.sqrt(t * t + 2))
    assert one["holm"] == pytest.approx(
        one["pair"]["p"]
    )  # fedmoswa's two differences are equal and have no p-value, so no correction applies to this one


def test_diverged_runs_are_unpaired_and_rank_last(section):
    fedmoswa = row(section, "fedmoswa")
    assert fedmoswa["diverged"] == [2]
    assert fedmoswa["spread"]["last"]["count"] == 2
    (one,) = [one for one in section["differences"] if one["label"] == "fedmoswa"]
    assert one["pair"]["seeds"] == (0, 1)
    (line,) = [line for line in section["ranks"]["lines"] if line["label"] == "fedmoswa"]
    assert line["each"] == (1.0, 1.0, 3.0)
    assert "fedmoswa, seed 2, diverged at round 1 (the loss is not finite)" in notes(section, "bad")


def test_a_diverged_run_does_not_shorten_the_mean_curve(section):
    curve = section["curves"][row(section, "fedmoswa")["number"]]
    assert curve["over"]["round"] == [0, 1, 2, 3]
    assert curve["over"]["bytes"] == [0, 3000, 6000, 9000]
    assert curve["over"]["seconds"] == [0, 0.5, 1, 1.5]
    assert curve["metrics"]["accuracy"]["mean"] == pytest.approx([0.1, 0.7, 0.9, 0.9])
    assert curve["metrics"]["loss"]["std"] == pytest.approx([0, 0, 0, 0])


def change_metrics(run, change):
    """Apply a function to the evaluations of a run, and write them again."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    change(lines)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_curves_average_equal_rounds_of_the_seeds_that_evaluated_a_model(clone, tmp_path):
    """The loss of one seed is not finite in round 1, and the average of the other one has not begun."""
    for seed in (0, 1):
        run = clone("fedavg+swa", seed, [0.1, 0.4, 0.6, 0.8])
        if seed:
            change_metrics(run, lambda lines: lines[1]["test"]["server"].update(loss=None))
        else:
            change_metrics(run, lambda lines: lines[3]["test"].update(swa={"accuracy": 0.9}))
    gathered = gather([tmp_path / "runs"])
    server, swa = report_document(gathered)["sections"][0]["curves"]
    assert server["metrics"]["loss"]["mean"] == [0.9, None, 0.4, 0.2] and server["over"]["round"] == [0, 1, 2, 3]
    assert swa["metrics"]["accuracy"]["mean"] == [0.9] and swa["over"]["round"] == [3]
    (line,) = Comparison(gathered.records).plot("loss").axes[0].lines
    assert line.get_xdata().tolist() == [0, 2, 3] and line.get_ydata() == pytest.approx([0.9, 0.4, 0.2])


def test_means_over_different_evaluations_are_not_compared(clone, tmp_path):
    for seed in (0, 1):
        run = clone("fedavg+swa", seed, [0.1, *[0.5] * 29, 0.9 + seed / 100])
        change_metrics(run, lambda lines: lines[-1]["test"].update(swa={"loss": 0.1, "accuracy": 0.95}))
    gathered = gather([tmp_path / "runs"])
    (section,) = report_document(gathered)["sections"]
    assert section["differences"][0]["pair"] is None and section["ranks"] is None
    assert "means of fedavg+swa and fedavg cover different numbers of evaluations (n)" in notes(section, "warn")
    assert "share no seed" not in notes(section, "warn") and "No seed is common" not in notes(section, "warn")
    assert [cells[1].split(" (")[1] for cells in result_table(section, ()).rows] == ["n=3)", "n=1)"]
    page = report_page(report_document(gathered), "", [{}], "")
    assert "(n=3)" in page and "(n=1)" in page
    (section,) = report_document(gathered, by="last")["sections"]
    assert section["differences"][0]["pair"]["seeds"] == (0, 1) and section["ranks"] is not None


def test_rounds_to_a_target_are_censored(section):
    texts = {one["label"]: [reached["text"] for reached in one["reached"]] for one in section["rows"]}
    assert texts == {"fedavg": ["2", "3+"], "fedsam": ["2", "3+"], "fedmoswa": ["1", "2"]}
    assert row(section, "fedmoswa")["reached"][0]["each"] == ["1", "1", "3+"]
    assert "In 8 cases, a run ended before it reached a target. Such runs are censored" in notes(section, "warn")


def test_few_seeds_are_noted(section):
    assert "3 seeds are few" in notes(section, "warn")
    assert "3.3 standard deviations" in notes(section, "warn")
    assert "75 % coverage at best" in notes(section, "warn")
    assert "paired t" in notes(section, "info")


def test_one_seed_and_unfinished_runs_are_noted(clone, tmp_path):
    clone("fedavg", 0, [0.1, 0.2, 0.3])
    clone("fedsam", 0, [0.1, 0.2], status="running", training={"rounds": 2})
    (section,) = report_document(gather([tmp_path / "runs"]))["sections"]
    assert "single seed" in notes(section, "warn")
    assert "fedsam seed 0 (1 of 2 rounds)" in notes(section, "warn")
    assert section["rows"][1]["spread"]["last"] is None  # means leave unfinished runs out


def test_many_diverged_runs_do_not_hide_other_caveats(clone, tmp_path):
    for seed in range(14):
        clone("fedavg", seed, [0.1, 0.2], status="diverged", training={"rounds": 2})
    clone("fedsam", 0, [0.1, 0.2], status="paused", training={"rounds": 2})
    clone("fedsam", 1, [0.1, 0.2, 0.3])
    (section,) = report_document(gather([tmp_path / "runs"]))["sections"]
    assert "… and 2 more. Diverged runs rank last. Means" in notes(section, "bad")
    assert "different numbers of rounds" not in notes(section, "warn")  # diverged ones have no final values
    assert "1 of 16 runs are unfinished" in notes(section, "warn")


def test_many_points_are_reduced_but_both_ends_are_kept(clone, tmp_path):
    clone("fedavg", 0, [n / 1000 for n in range(1001)])
    (section,) = report_document(gather([tmp_path / "runs"]))["sections"]
    rounds = section["curves"][0]["over"]["round"]
    assert len(rounds) == 240
    assert (rounds[0], rounds[-1]) == (0, 1000)
    assert section["differences"] == [] and section["ranks"] is None


def test_baseline_by_name(compared):
    document = report_document(gather([compared]), baseline="fedsam", by="last")
    assert {one["label"] for one in document["sections"][0]["differences"]} == {"fedavg", "fedmoswa"}
    with pytest.raises(UserError, match="'fedsma'; did you mean fedsam"):
        report_document(gather([compared]), baseline="fedsma")
    with pytest.raises(UserError, match="'median'"):
        report_document(gather([compared]), by="median")


def test_nothing_evaluated_yet(clone, tmp_path):
    run = clone("fedavg", 0, [0.1], status="running", training={"rounds": 5})
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="none of these runs has been evaluated yet"):
        require_evaluations(report_document(gather([tmp_path / "runs"])))


def test_the_flatness_log_of_a_run_is_included(real):
    (section,) = report_document(gather([real]))["sections"]
    assert {"lambda_max", "cosine"} <= set(section["views"]["log"])
    assert "on at most 500 training examples" in section["views"]["log_sample"]
    assert section["views"]["log"]["lambda_max"]["lines"][0]["x"][-2:] == [1, 2]
    assert len(figures_of(section, "last")["flatness-log"].axes) >= 2


def test_measured_spectra_and_clients_are_found(compared):
    folder = compared / "fedavg" / "seed-0" / "flatness"
    names = ("fedavg", "mine", "fedsam (seed 1)", "fedsam (seed 2)")
    (folder / "spectrum").mkdir(parents=True)
    subset = {"eigenvalues": [4.0, 2.0], "lambda_max": 4.0, "examples": 10, "trace": {"value": 7.0, "high": 7.5}}
    other = {"eigenvalues": [6.0, 1.0], "lambda_max": 6.0, "examples": 10, "trace": {"value": 9.0, "high": 9.5}}
    models = {name: {"subsets": [subset | {"loss": 0.2}, other | {"loss": 0.2}]} for name in names}
    models["mine"] = {"subsets": [subset | {"loss": 0.4}], "parameters": 8970}
    (folder / "spectrum" / "spectrum.json").write_text(json.dumps({"on": "train", "models": models}))
    axis = (-1.0, 0.0, 1.0)
    bowl = Landscape("around", (axis, axis), {"train_loss": 1 + np.square(np.add.outer(axis, axis))}, (), {})
    bowl = bowl.with_metadata(parameters=1914)
    centres = {"fedavg": 1.0, "fedsam": 3.0, "diverged": float("nan")}
    marked = {n: replace(bowl, marks=(Mark(n, (0.0, 0.0), 0.0, {"train_loss": v}),)) for n, v in centres.items()}
    save_landscapes(folder / "landscape" / "landscape.json", marked)
    (folder / "clients").mkdir()
    looks = [{"round": n, "accuracy": {"classes": {"0": 0.1 * n}, "clients": {"7": None}}} for n in range(3)]
    (folder / "clients" / "clients.json").write_text(json.dumps({"models": looks, "forgetting": {}, "rounds": []}))
    (folder / "clients" / "spectrum.json").write_text("damaged")
    document = report_document(gather([compared]))
    section = document["sections"][0]
    views = section["views"]
    spectrum, other, variant, second = views["spectra"]
    styles = {row["label"]: row["style"] for row in section["rows"]}
    assert spectrum["style"] == styles["fedavg"] and other["style"] not in styles.values()
    assert variant["style"] == styles["fedsam"]  # that of its algorithm, which no other model has
    assert second["style"] == styles["fedsam"] + len(COLOURS)  # another seed: the same colour, other dashes and marker
    assert (spectrum["eigenvalues"], spectrum["lambda_max"], spectrum["trace"]) == ([5.0, 1.5], 5.0, 8.0)
    deviation = pytest.approx(2**0.5)  # over subsets; a single subset has that of its trace
    known = {"loss": 0.0, "lambda_max": deviation, "trace": deviation}
    assert spectrum["spread"] == known | {"ratio": None, "lambda_min": None}
    assert (other["loss"], other["spread"]["lambda_max"], other["spread"]["trace"]) == (0.4, None, 0.5)
    assert views["clients"][0]["classes"] == {"0": [0.0, 0.1, 0.2]}
    assert views["clients"][0]["clients"] == {"7": [None, None, None]}
    (named,) = with_display_names({"sections": [section]}, {"fedavg": "Ours"})[0]["sections"]
    assert named["views"]["clients"][0]["label"] == "Ours, seed 0" and named["views"]["spectra"][0]["label"] == "Ours"
    assert "range from 0.2 (Ours) to 3 (FedSAM), a factor of 15" in notes(named, "warn")
    assert "Ours has 1,914 parameters, mine has 8,970" in notes(named, "warn")
    views["more"], views["clients"] = 7, []
    page = report_page(document)
    assert "7 more spectra or client views are in the run folders" in page
    assert '<span class="dev"> ± 1.4</span></td>' in page and ">trace</th>" in page
    assert ">lambda_min</th>" not in page  # no spectrum has it
    figures = figures_of(section, "last", {"fedavg": bowl})
    assert {"spectra", "contours", "surfaces"} <= set(figures) and "flatness-log" not in figures
    fedavg, *_ = figures["spectra"].axes[0].lines
    assert figures["spectra"].axes[0].get_xlabel() == "eigenvalues of the Hessian, largest first"
    for matrix in views["spectra"]:
        matrix["matrix"] = "gauss-newton"
    gauss_newton = figures_of(section, "last", {})["spectra"].axes[0].get_xlabel()
    assert gauss_newton == "eigenvalues of the Gauss-Newton matrix, largest first"
    assert (fedavg.get_color(), fedavg.get_label()) == (COLOURS[styles["fedavg"]], "fedavg")


def test_stored_measurements_become_tables_and_sharpness_lines(compared):
    folder = compared / "fedavg" / "seed-1" / "flatness"

    def store(name, document):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{name}.json").write_text(json.dumps(document))

    norms = {"loss": 0.5, "relative_flatness": {"value": 9.0}, "fisher_rao": 2.0, "sigma": 0.1, "magnitude_sigma": None}
    norms |= {"layer": "3.weight", "rise": 0.1, "examples": 20}
    subsets = [norms, norms | {"loss": 0.7, "sigma": 0.3}]
    store(
        "norms",
        {"on": "train", "models": {"fedavg": {"model": "run", "described": "server model", "subsets": subsets}}},
    )
    rises = [("sam", 0.05, 1, 0.2, None), ("sam", 0.1, 1, 0.5, None), ("asam", 0.5, 3, 0.3, 32)]
    results = [
        [{"kind": kind, "rho": rho, "loss": 1.0, "value": value, "steps": steps, "m": m}]
        for kind, rho, steps, value, m in rises
    ]
    results[0].append(results[0][0] | {"value": 0.4})
    results[2][0]["interval"] = {"value": 0.3, "high": 0.35}
    store(
        "sharpness",
        {"on": "train", "scope": "all", "models": {"fedsam": {"described": "server model", "sharpness": results}}},
    )
    blocks = [{"name": "1.weight", "size": 40, "lambda_max": value, "trace": {"value": 3 * value}} for value in (2, 4)]
    spectra = [{"eigenvalues": [1.0], "lambda_max": 1.0, "layers": [block]} for block in blocks]
    store("spectrum", {"models": {"fedavg": {"subsets": spectra}}})
    clients = [
        {"client": number, "overlap_at_server": 0.5, "overlap": 0.1 * number, "cka": cka}
        for number, cka in ((1, None), (3, 0.9))
    ]
    store("similarity", {"model": "run:server", "eigenvectors": 5, "expected_of_random": 0.01, "clients": clients})
    values = {"train_loss": np.array([1.0, 4.0, 2.0]), "test_error": np.array([0.1, 0.3, 0.1])}
    path = Landscape("path", ((0.0, 0.5, 1.0),), values, (), {"distance": 7.0})
    save_landscapes(folder / "landscape.json", {"fedavg to fedsam": path.with_metadata(curved=True, aligned=True)})
    (folder / "sharpness" / "norms.json").write_text('{"models": {"damaged": {}}}')
    with pytest.warns(UserWarning, match="norms.json is damaged"):
        document = report_document(gather([compared]))
    (section,) = with_display_names({"sections": document["sections"][:1]}, {})[0]["sections"]
    found = {
        (table["title"], row["label"], row["described"]): dict(zip(table["heads"][2:], row["numbers"], strict=True))
        for table in section["views"]["tables"]
        for row in table["rows"]
    }
    assert found.pop(("Norms", "FedAvg", "server model; relative flatness of 3.weight")) == {
        "loss": pytest.approx(0.6),
        "Fisher-Rao norm": 2.0,
        "sigma": pytest.approx(0.2),
        "relative flatness": 9.0,
        "accepted rise": 0.1,
        "examples": 20,
    }
    asam = "asam (scope all), m = 32, 3 steps"
    sharpness = {"loss": 1.0, f"{asam}, rho 0.5": 0.3, "sam, rho 0.05": pytest.approx(0.3), "sam, rho 0.1": 0.5}
    assert found.pop(("Sharpness", "FedSAM", "server model")) == sharpness
    spreads = {table["title"]: table["rows"][0]["spreads"] for table in section["views"]["tables"]}
    assert spreads["Sharpness"] == [0.0, pytest.approx(0.05), pytest.approx(0.02**0.5), None]
    assert spreads["Norms"] == [pytest.approx(0.02**0.5), 0.0, pytest.approx(0.02**0.5), 0.0]
    assert '<td data-v="0.3">0.3000<span class="dev"> ± 0.05</span></td>' in report_page(document)
    assert "range from 0.6 (FedAvg) to 1 (FedSAM), a factor of 1.67" in notes(section, "warn")
    layer = {"weights": 40, "lambda_max": 3.0, "trace": 9.0}
    assert found.pop(("Curvature of single parameters", "FedAvg", "1.weight")) == layer
    similarity = found.pop(("Similarity of clients and server", "FedAvg, seed 1", "run:server"))
    assert list(similarity.values()) == pytest.approx([0.5, 0.2, 0.9, 0.01, 5, 2])
    barrier = {
        "barrier of training loss": 2.5,
        "barrier of test error %": pytest.approx(20),
        "distance of weights": 7.0,
    }
    assert found.pop(("Paths between models", "FedAvg to FedSAM", "trained curve, after alignment")) == barrier
    assert not found
    style = next(row["style"] for row in section["rows"] if row["label"] == "FedSAM")
    line = {"label": "FedSAM", "style": style, "x": [0.05, 0.1], "y": pytest.approx([0.3, 0.5])}
    assert section["views"]["rises"] == {"sam": [line]}  # asam has a single radius
    (axes,) = figures_of(section, "last")["sharpness"].axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.3, 0.5])


def test_tables(document, section):
    results, differences = result_table(section, document["targets"]), difference_table(section, "last")
    assert (
        "| fedsam | 82.00 ± 1.00 | 82.00 ± 1.00 | 85.00 ± 0.00 | 3 | 2 | 3+ (0/3) | 30 | 0.00300 | 1.5 s |"
        in results.markdown()
    )
    assert all(MEAN_LABEL in text for text in (results.csv(), results.markdown(), values_csv(document)))
    assert "fedsam,+2.00,+1.00 to +3.00," in differences.csv()
    assert "fedmoswa,+10.00,all equal,all equal,2,none,–,–" in differences.csv()  # both pairs differ by 10 points
    assert "All equal: all seeds have the same difference" in differences.full_caption
    assert "the number of tested rows" in differences.full_caption
    fedsam = [row for row in section["differences"] if row["label"] == "fedsam"]
    assert "All equal" not in difference_table(section | {"differences": fedsam}, "last").full_caption


def test_latex_tables_fit_a_column_and_emphasise_the_best(document, section):
    results = result_table(section, document["targets"])
    text = latex_table(results.select(RESULT_COLUMNS), "tab:results")
    assert r"\begin{table}[t]" in text and r"\begin{tabularx}{\columnwidth}" in text and r"\label{tab:results}" in text
    assert r"fedmoswa & \textbf{90.00} $\pm$ 0.00 & \textbf{90.00} $\pm$ 0.00 \\" in text
    assert r"fedsam & \underline{82.00} $\pm$ 1.00 & \underline{82.00} $\pm$ 1.00 \\" in text
    assert r"fedavg & 80.00 $\pm$ 0.00 & 80.00 $\pm$ 0.00 \\" in text
    for words in (
        r"10 clients per round, 3 rounds, 1 local step, batch size 10, learning rate 0.1): mean $\pm$",
        "over 3 seeds. Diverged runs are excluded: fedmoswa 1 of 3. Last 10 \\%: ",
        rf"{latex_text(MEAN_LABEL)} (n=\allowbreak 1). Bold: best; underlined: second.",
    ):
        assert words in text
    differences = latex_table(difference_table(section, "last").select(DIFFERENCE_COLUMNS), "tab:differences")
    assert r"\begin{table}[t]" in differences and "\nfedsam & +2.00 & $-$0.48 to +4.48 & 0.074 \\\\\n" in differences


def test_runs_with_a_validation_split_are_compared_at_their_best_validation_value(clone, tmp_path, document, section):
    split = {"data": {"validation": 0.1}}
    for seed, values in enumerate([(0.3, 0.7, 0.6), (0.3, 0.5, 0.8)]):
        clone("fedavg", seed, values, validation=(0.1, 0.9, 0.2), **split)
        clone("fedsam", seed, [value / 2 for value in values], validation=(0.1, 0.2, 0.9), **split)
    validated = report_document(gather([tmp_path / "runs"]), by="at_best_validation")
    (one,) = validated["sections"]
    assert [row["spread"]["at_best_validation"]["mean"] for row in one["rows"]] == pytest.approx([0.6, 0.35])
    (difference,) = one["differences"]
    assert difference["pair"]["differences"] == pytest.approx((0.3 - 0.7, 0.4 - 0.5))
    caption = difference_table(one, "at_best_validation").caption
    assert caption.startswith("Differences from fedavg in the value at best validation, paired by seed")
    table = result_table(one, ())
    assert "at_best_validation" in table.heads and "60.00 ± 14.14" in table.rows[0]
    assert "<th" in report_page(validated) and "at best validation" in report_page(validated)
    assert "at_best_validation" not in result_table(section, document["targets"]).heads
    with pytest.raises(UserError, match=r"at_best_validation needs runs with a validation split; set data\.validation"):
        report_document(gather([clone("scaffold", 0, [0.1, 0.2], name="without")]), by="at_best_validation")
    paused = clone("fedprox", 0, [0.1, 0.2], name="paused", status="paused", validation=(0.1, 0.2), **split)
    (one,) = report_document(gather([paused]), by="at_best_validation")["sections"]
    assert "at_best_validation" in one["summaries"] and "1 of 1 runs are unfinished" in notes(one, "warn")


def test_wide_latex_tables_span_the_page_or_are_rejected(document, section):
    results = result_table(section, document["targets"])
    wide = latex_table(results.select(["mean_last", "best", "rounds_to_0.7", "rounds_to_0.86"]), "tab:results")
    assert "Rounds to 70 \\%: median over seeds; N+ means not reached by round N." in wide
    assert r" & \textbf{1} (2/3) & \textbf{2} (2/3) \\" in wide and r" & \underline{2} & 3+ (0/3) \\" in wide
    assert r"\begin{table*}[t]" in wide and r"\begin{tabularx}{\textwidth}" in wide and r"\end{table*}" in wide
    with pytest.raises(UserError, match="points wide, but a page has 397; select fewer columns"):
        latex_table(results, "tab:results")
    broken = TextTable("a_b & 5%", {"row": "row"}, (("fedavg+wima(window=20)",),))
    assert r"fedavg+\allowbreak wima\allowbreak(window=\allowbreak 20)" in latex_table(broken, "tab:broken")
    assert r"\caption{a\_b \& 5\%}" in latex_table(broken, "tab:broken")


def test_regression_has_no_classes_and_poor_models_are_noted(clone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"dataset": f"arrays(path={tmp_path / 'mine.csv'})"}
    for algorithm, rmse, r2 in (("fedavg", 0.5, -0.5), ("fedsam", 0.1234, 0.5), ("fedswa", 0.25, "null")):
        run = clone(algorithm, 0, [0.9, rmse], data=data)
        metrics = (run / "metrics.jsonl").read_text().replace('"accuracy"', f'"r2": {r2}, "rmse"')
        (run / "metrics.jsonl").write_text(metrics)
        for file, changes in (
            ("status", {"metric": "rmse", "lower_is_better": True}),
            ("partition", {"histogram": [[9]]}),
        ):
            content = json.loads((run / f"{file}.json").read_text()) | changes
            (run / f"{file}.json").write_text(json.dumps(content))
    document = report_document(gather([tmp_path / "runs"]))
    (section,) = document["sections"]
    assert "no better than predicting the mean of the targets: fedavg." in notes(section, "warn")
    (named,) = with_display_names(document, {})[0]["sections"]
    assert "no better than predicting the mean of the targets: FedAvg." in notes(named, "warn")
    table = result_table(section, []).markdown()
    assert "| fedavg | 0.5000 |" in table and "| fedsam | 0.1234 |" in table  # the same number of decimals
    assert table.startswith("Test rmse on mine.csv, dirichlet")
    page = report_page(document)
    assert "classes per client" not in page and "Classes:" not in page
    assert str(tmp_path) not in page and "runs/fedavg/seed-0" in page
    assert figures_of(section, "last")["partition"].axes[0].get_xlabel() == "clients"


def test_values_have_full_precision_and_include_diverged_runs(document):
    lines = values_csv(document).splitlines()
    assert any(line.endswith("fedmoswa,fedmoswa,server,2,diverged,") for line in lines)
    assert any(line.endswith(",fedsam,fedsam,server,2,last value,0.8300000000000001") for line in lines)
    assert any(line.endswith(",fedsam,fedsam,server,0,last loss,0.18999999999999995") for line in lines)


def test_figures_are_vector_graphics(section, tmp_path):
    figures = figures_of(section, "last", targets=[0.7])
    assert figures["curves-bytes"].axes[0].texts[0].get_text() == "target 70"
    assert set(figures) == {
        *(f"curves-{axis}" for axis in ("round", "backward_passes", "bytes", "seconds")),
        "differences",
        "ranks",
        "partition",
    }
    curves = figures["curves-round"].axes[0]
    assert curves.get_xlabel() == "communication round (early values are outside the axis)"
    assert curves.get_xticks().tolist() == [0, 1, 2, 3]
    figures["differences"].savefig(tmp_path / "figure.pdf")
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    labels = [text.get_text() for text in figures["ranks"].axes[0].get_yticklabels()]
    assert labels == [line["label"] for line in section["ranks"]["lines"]]
