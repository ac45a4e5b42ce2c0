"""Stored results, the ledger that is made from them, and the claims that it checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedflat.errors import UserError
from fedflat.experiment.analysis.run_model import open_model
from fedflat.experiment.store.run_folder import load_record
from fedflat.papers import find_table, papers
from fedflat.papers.claims import check_claims, claim_verdict
from fedflat.papers.ledger import UNKNOWN_PROTOCOL, Ledger, deviations_of
from fedflat.papers.library import find_cell
from fedflat.papers.outcome import CellOutcome
from fedflat.papers.protocol import protocol_hash
from fedflat.papers.results import (
    StoredResult,
    embedded_results,
    embedded_text,
    experiment_name,
    read_result,
    read_results,
)
from fedflat.reporting.tables.summary import compare_paired
from tests.papers.test_commands import SMALL, fedflat  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
RESULTS = {path: read_result(path) for path in sorted((ROOT / "results").rglob("*.json"))}
ACCURACY = "table2/fedavg/cifar100-lenet-5-accuracy"


def stored(seed: int, value: float | None, key: str = ACCURACY, **changes: object) -> StoredResult:
    """A committed result with another seed and another measured number."""
    first = next(result for result in RESULTS.values() if key in result.cells)
    cells = {key: first.cells[key].model_copy(update={"measured": value})}
    return first.model_copy(update={"seed": seed, "cells": cells, **changes})


def test_committed_results_are_valid():
    for path, result in RESULTS.items():
        assert path == ROOT / "results" / result.file
        assert path.read_text("utf-8") == result.text()
        assert result.environment["hardware"] and result.date and result.curve["server"]
        assert len(result.curve_rounds) == len(result.curve["server"])
        assert not result.source or (ROOT / result.source).exists()
        for key, number in result.cells.items():
            cell = find_cell(result.paper, key)
            assert (number.unit, number.statistic) == (cell.unit, cell.statistic.text)
            if result.kind == "paper":
                assert result.environment["commit"]
                assert deviations_of(cell, result) is not UNKNOWN_PROTOCOL, f"{path} was run under another protocol"


@pytest.mark.parametrize("name", ["eccv/table1", "wima/table2"])
def test_different_experiments_of_a_table_have_different_files(name):
    table = find_table(name)
    configs = {config for cell in table.cells.values() for config in cell.configs}
    assert len({experiment_name(table, config) for config in configs}) == len(configs)


def test_the_embedded_results_are_the_committed_ones():
    assert embedded_text(list(RESULTS.values())) == embedded_text(embedded_results())


def test_a_cell_has_mean_spread_verdict_and_other_numbers():
    runs = [stored(seed, value) for seed, value in enumerate((40.0, 41.0, 42.0))]
    released = stored(0, 45.5, kind="released", reason="stopped")
    (entry,) = Ledger([*runs, released]).entries
    assert (entry.outcome.mean, entry.outcome.spread, entry.outcome.verdict) == (41.0, 1.0, "within")
    row = entry.row()
    assert row[2:5] == ["41.2±0.2", "41.00 ± 1.00", "3"]
    assert (row[7], row[8], row[10]) == ("45.50", "", "released: stopped")
    assert entry.document()["by_seed"] == {0: 40.0, 1: 41.0, 2: 42.0}


def test_other_protocols_and_fewer_rounds_give_no_verdict():
    (other,) = Ledger([stored(0, 40.0, protocol_hash="another")]).entries
    assert (other.outcome.verdict, other.outcome.remark) == ("ran", "other settings")
    (measured,) = Ledger([stored(0, 90.0, protocol_hash="another"), stored(0, 41.0)]).entries
    assert (measured.outcome.by_seed, measured.outcome.verdict) == ({0: 41.0}, "within")
    every_ten = stored(0, 500.0, key="table2/fedavg/cifar10-lenet-5-rounds")
    every_round = with_protocol(every_ten, eval_every=1)
    for results in ([every_ten], [every_ten, every_round.model_copy(update={"seed": 1})]):
        (rounds,) = Ledger(results).entries
        assert (rounds.outcome.verdict, rounds.outcome.remark) == ("ran", "evaluated every 10 rounds")
    for change in ({"rounds": 5000}, {"eval_final": 100}):
        (changed,) = Ledger([with_protocol(stored(seed, 41.0), **change) for seed in range(2)]).entries
        assert changed.outcome.verdict == "ran"
    (rounds,) = Ledger([every_round, every_ten]).entries
    assert rounds.outcome.verdict != "ran", "of runs with the same seed, the one with the paper's interval counts"


def with_protocol(result: StoredResult, **changes: object) -> StoredResult:
    """A result of a run whose protocol differs in the given values."""
    protocol = result.protocol | changes
    return result.model_copy(update={"protocol": protocol, "protocol_hash": protocol_hash(protocol)})


def test_seeds_with_another_precision_count_and_shorter_or_longer_runs_do_not():
    first, second = stored(0, 40.0), with_protocol(stored(1, 42.0), precision="float32")
    short, long = with_protocol(stored(2, 90.0), rounds=50), with_protocol(stored(3, 90.0), rounds=5000)
    (entry,) = Ledger([short, first, second, long]).entries
    assert (entry.outcome.mean, entry.seeds, entry.outcome.verdict) == (41.0, 2, "within")
    assert "mean over" not in entry.row()[-1] and len(entry.document()["files"]) == 4


def test_a_gain_is_not_judged_if_one_of_its_runs_deviates():
    cells = ("table5/sam/accuracy-alpha-0", 31.0), ("table5/reference/accuracy-alpha-0", 30.0)
    full = [stored(seed, value + seed, key) for key, value in cells for seed in range(2)]
    short = with_protocol(stored(0, 30.0, cells[1][0]), rounds=50)

    def gain(results: list[StoredResult]) -> CellOutcome:
        entries = {entry.cell.name: entry for entry in Ledger(results).entries}
        return entries["sam/absolute-alpha-0"].outcome

    assert (gain(full).by_seed, gain(full).verdict) == ({0: 1.0, 1: 1.0}, "above")
    names = [entry.cell.name for entry in Ledger(full).entries]
    assert "reference/absolute-alpha-0" not in names, "the paper prints no gain of the reference over itself"
    assert (gain([*full[:2], short]).by_seed, gain([*full[:2], short]).verdict) == ({0: 1.0}, "ran")


def test_the_newest_run_of_a_seed_counts():
    old, new = stored(0, 40.0, date="2026-01-01"), stored(0, 42.0, date="2026-01-02")
    for results in ([old, with_protocol(new, precision="float32")], [with_protocol(new, precision="float32"), old]):
        (entry,) = Ledger([*results, stored(1, 44.0)]).entries
        assert (entry.outcome.by_seed, entry.seeds) == ({0: 42.0, 1: 44.0}, 2)


def test_entries_are_chosen_by_paper_dataset_and_method():
    ledger = Ledger(embedded_results())
    chosen = ledger.choose("fedswa/table2", "CIFAR-100", "fed*swa")
    assert {entry.methods[0] for entry in chosen} == {"fedswa", "fedmoswa"}
    assert {entry.dataset for entry in chosen} == {"cifar100"}
    assert {entry.cell.table for entry in ledger.choose("eccv/table2", method="fedasam")} == {"eccv/table2"}
    assert {entry.dataset for entry in ledger.choose("eccv/table2", method="fedavg-swa")} == {"cifar10", "cifar100"}
    with pytest.raises(UserError, match="'digits'"):
        ledger.choose(dataset="digits")
    with pytest.raises(UserError, match="fedswa/table2"):
        ledger.choose("eccv/figure1")
    assert [row[0] for row in ledger.summary()] == [*papers(), "all"]


@pytest.mark.parametrize(
    ("claimed", "differences", "verdict"),
    [
        (3.0, [3.0, 3.1, 2.9], "Confirmed"),
        (9.0, [3.0, 3.1, 2.9], "The direction is confirmed, but the difference is smaller"),
        (1.0, [3.0, 3.1, 2.9], "The direction is confirmed, and the difference is larger"),
        (-3.0, [3.0, 3.1, 2.9], "Contradicted"),
        (9.0, [-0.1, 0.1, 0.05], "Not confirmed"),
        (1.0, [-1.0, 2.0, 1.0], "Undecided"),
        (1.0, [2.0], "One seed points in the claimed direction"),
        (1.0, [-2.0], "One seed points in the opposite direction"),
        (4.1, [0.02], "One seed shows no difference"),
    ],
)
def test_claims_are_judged_by_the_interval(claimed, differences, verdict):
    pair = compare_paired(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
    assert claim_verdict(claimed, pair).startswith(verdict)


def test_an_altered_number_is_rejected(tmp_path):
    path = tmp_path / "fedavg-seed0.json"
    original = (ROOT / "results/fedswa/table2/cifar10-lenet-5/fedavg-seed0.json").read_text("utf-8")
    for old, new, message in [
        ('"measured": 79.47', '"measured": 99.47', "measured number 99.47.*, but its curve gives 79.47"),
        ('"measured": 320', '"measured": 350', "measured number 350, but its curve gives 320"),
        ('"published": "79.6±0.2"', '"published": "12.0"', "published number 12.0, but the paper prints 79.6±0.2"),
    ]:
        assert old in original
        path.write_text(original.replace(old, new), "utf-8")
        with pytest.raises(UserError, match=message):
            read_results(tmp_path)
    path.write_text(original, "utf-8")
    assert len(read_results(tmp_path)) == 1


def test_repeated_numbers_are_counted_once_and_a_repeated_run_is_not_a_tuned_one():
    rows = {row[0]: row for row in Ledger(embedded_results()).summary()}
    entries = [entry for entry in Ledger(embedded_results()).entries if entry.cell.table.startswith("eccv/")]
    cifar10 = [entry for entry in entries if entry.methods[1] == "fedavg" and entry.dataset == "cifar10"]
    assert len({entry.number_key for entry in cifar10}) < len(cifar10)
    assert int(rows["eccv"][2]) < int(rows["eccv"][1]) and int(rows["all"][2]) <= sum(int(rows[p][2]) for p in papers())
    assert not any(entry.tuned for entry in Ledger(embedded_results()).entries)
    assert any("search selects the settings" in note for e in Ledger(embedded_results()).entries for note in e.notes)


def test_claims_compare_published_with_measured_differences():
    scaffold = "table2/scaffold/cifar100-lenet-5-accuracy"
    results = [stored(0, 52.0, key="table2/fedmoswa/cifar100-lenet-5-accuracy"), stored(0, 50.0, key=scaffold)]
    first, *others = check_claims(Ledger(results))
    assert (first.claimed_text, first.measured_text) == ("+3.5 points", "+2.0 points (1 seed)")
    assert {claim.measured_text for claim in others} == {"not measured yet"}
    assert 8 <= len(others) + 1 <= 12
    other_settings = [result.model_copy(update={"protocol_hash": "another"}) for result in results]
    assert check_claims(Ledger(other_settings))[0].measured is None


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"curve": {"server": [0.01, None, 0.0199]}}, True),
        ({"curve": {"server": [0.01, 0.03, 0.01]}}, False),
        ({"curve": {"server": [0.55, 0.9]}}, False),
        ({"curve": {"server": [0.55, 0.59]}}, True),
        ({"status": "diverged"}, True),
    ],
)
def test_a_claim_is_not_tested_by_a_run_that_did_not_learn(change, failed):
    scaffold = "table2/scaffold/cifar100-lenet-5-accuracy"
    results = [
        stored(0, 52.0, key="table2/fedmoswa/cifar100-lenet-5-accuracy"),
        stored(0, 1.0, key=scaffold).model_copy(update=change),
    ]
    for kept in (results, [result.without_curves() for result in results]):
        claim = check_claims(Ledger(kept))[0]
        assert (claim.measured_text == "training failed") == failed
        assert claim.verdict.startswith("Not tested") == failed


def test_measured_cells_are_printed(fedflat):  # noqa: F811
    shown = fedflat(
        "papers", "fedswa", "--measured", "--dataset", "cifar100", "--method", "fedavg", "--markdown", "l.md"
    )
    assert "fedavg/cifar100-lenet-5-accuracy" in shown.stdout and "scaffold" not in shown.stdout
    assert "295" in shown.stdout and "1951" not in shown.stdout, "the summary counts the paper's published numbers"
    assert Path("l.md").read_text().startswith("| table | cell | published | measured |")
    (accuracy, _) = json.loads(fedflat("papers", "--measured", "--dataset", "cifar100", "--method", "fedavg", "--json",
                                       "fedswa").stdout)  # fmt: skip
    assert accuracy["published"] == "41.2±0.2" and accuracy["files"]
    assert "--measured" in fedflat("papers", "--dataset", "cifar10").stderr
    Path("empty").mkdir()
    assert "no stored result in empty" in fedflat("papers", "--measured", "--results", "empty").stderr


def test_reproduce_records_results_of_the_same_form(fedflat):  # noqa: F811
    arguments = ("reproduce", "wima/table4", "--cells", "*/cifar10", *SMALL, "--record", "results")
    assert fedflat(*arguments, "--rounds", "2").exit_code == 0
    (result,) = read_results(Path("results"))
    file = Path("results", result.file)
    assert (result.experiment, result.seed, result.protocol["rounds"]) == ("wima/table4/cifar10/w-5", 0, 2)
    assert set(result.cells) >= {f"table4/w-{window}/cifar10" for window in (5, 10, 50, 100, 200)}
    shown = fedflat("papers", "--measured", "--results", "results").stdout
    assert "w-200/cifar10" in shown and "other settings" in shown and "1951" in shown

    earlier = result.model_copy(update={"date": "2026-01-01", "environment": {"hardware": "other"}})
    file.write_text(earlier.text())
    assert fedflat(*arguments, "--rounds", "2").exit_code == 0
    assert file.read_text() == earlier.text(), "a finished run keeps its date and environment"
    other = fedflat(*arguments, "--rounds", "1")
    assert other.exit_code == 2 and f"{file} holds a result with other settings" in other.stderr
    assert not list(Path("runs").rglob("small-1-*")), "nothing is trained in vain"
    for old, new, message in (
        ('"seed": 0', '"seed": "none"', "seed: Input should be a valid integer"),
        ("w-5/cifar10", "w-6/cifar10", "wima/table4 has no cell 'w-6/cifar10'"),
        ('"lr": 0.1', '"lr": 0.2', "was changed"),
    ):
        file.write_text(result.text().replace(old, new))
        assert message in fedflat("papers", "--measured", "--results", "results").stderr


def test_eigenvalues_are_recorded_only_if_measured(fedflat):  # noqa: F811
    arguments = (*SMALL, "--rounds", "1", "--record", "results")
    assert fedflat("reproduce", "eccv/table2", "--cells", "cifar100-fedsam/alpha-0-5cl", *arguments).exit_code == 0
    (result,) = read_results(Path("results"))
    assert {key.partition("/")[0] for key in result.cells} == {"table2", "table5", "table6"} and not result.spectra

    assert fedflat("reproduce", "eccv/table1", "--cells", "fedsam/lambda-max-alpha-0", *arguments).exit_code == 0
    spectrum = next(result.spectra["server"] for result in read_results(Path("results")) if result.spectra)
    run = load_record(next(Path("runs").rglob("measured.json")).parent)
    (objective,) = open_model(run).objectives(examples=spectrum["examples"])
    assert spectrum["loss"] == pytest.approx(float(objective.loss()), rel=1e-4)
