"""Statistics of runs, and verdicts on their differences from published numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedflat.papers import find_table
from fedflat.papers.document import outcome_row
from fedflat.papers.numbers import Best, Eigenvalue, Last, Mean, RoundsTo, parse_number
from fedflat.papers.outcome import CellOutcome, MeasuredRun, outcomes, tolerance, value_of
from fedflat.papers.plan import Deviations, ReproductionPlan, make_plan
from fedflat.papers.post_hoc import ModelQuery

OUT = Path("nowhere")


def history(values: list[float], model: str = "server", every: int = 1) -> list[dict]:
    return [
        {"round": every * number, "test": {model: {"loss": 1.0, "accuracy": value}}}
        for number, value in enumerate(values)
    ]


def measured(values: list[float], status: str = "finished", rounds: int | None = None) -> MeasuredRun:
    return MeasuredRun(history(values), "accuracy", status, rounds or len(values) - 1)


def judged(table: str, cell: str, *runs: MeasuredRun, deviations: Deviations | None = None) -> CellOutcome:
    """The outcome of a cell, given the histories of its runs."""
    plan = planned(table, [cell], len(runs) or 1, deviations)
    return outcomes(plan, {run.folder: result for run, result in zip(plan.runs, runs, strict=bool(runs))})[0]


def planned(table: str, cells: list[str], seeds: int, deviations: Deviations | None = None) -> ReproductionPlan:
    found = find_table(table)
    return make_plan(found, found.choose(cells), range(seeds), OUT, deviations or Deviations())


def test_last_best_and_rounds_to():
    run = measured([0.1, 0.5, 0.7, 0.6])
    assert value_of(Last(), run, "server", 3) == 0.6
    assert value_of(Best(), run, "server", 3) == 0.7
    assert value_of(RoundsTo(0.5), run, "server", 3) == 1
    assert value_of(RoundsTo(0.9), run, "server", 3) is None
    assert value_of(Last(), run, "swa", 3) is None


def test_the_mean_of_the_last_hundred_rounds():
    run = measured([0.0] * 101 + [1.0] * 100)
    assert value_of(Mean(), run, "server", 200) == 1.0
    assert value_of(Mean(rounds=200), run, "server", 200) == 0.5
    assert value_of(Mean(until=100), run, "server", 200) == 0.0
    assert value_of(Mean(until=150), run, "server", 200) == 0.5


def test_the_averaged_window_is_scaled_in_shorter_runs():
    run = measured([0.0, 0.0, 1.0, 0.5, 0.5])
    assert value_of(Mean(rounds=1, until=5000), run, "server", 10000) == 1.0


def test_means_exclude_the_initial_model():
    assert value_of(Mean(), measured([0.9, 0.1, 0.3]), "server", 2) == pytest.approx(0.2)


def test_tolerance_from_the_published_deviation():
    """One seed: 1.96 standard deviations of the difference of two runs, and half a digit."""
    assert tolerance(parse_number("61.9±0.5"), [60.0]) == pytest.approx(1.959964 * 0.5 * math.sqrt(2) + 0.05)


def test_tolerance_from_the_seeds():
    """Student's t with two degrees of freedom is 4.303 at 97.5 %."""
    values = [60.0, 61.0, 62.0]
    assert tolerance(parse_number("61.9"), values) == pytest.approx(4.302653 * 1.0 * math.sqrt(4 / 3) + 0.05, rel=1e-6)


def test_the_larger_tolerance_is_used():
    wide, narrow = [50.0, 60.0, 70.0], [61.899, 61.9, 61.901]
    assert tolerance(parse_number("61.9±0.5"), wide) == tolerance(parse_number("61.9"), wide)
    assert tolerance(parse_number("61.9±0.5"), narrow) == pytest.approx(1.959964 * 0.5 * math.sqrt(4 / 3) + 0.05)


def test_one_seed_without_published_deviation_has_no_tolerance():
    assert tolerance(parse_number("61.9"), [61.9]) is None


def test_a_deviation_of_zero_leaves_the_rounding():
    assert tolerance(parse_number("1.0±0.0"), [1.0]) == pytest.approx(0.05)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=8), st.floats(0.1, 5))
def test_tolerance_covers_the_rounding_and_grows_with_the_spread(values, factor):
    middle = sum(values) / len(values)
    wider = [middle + (1 + factor) * (value - middle) for value in values]
    published = parse_number("50.0")
    assert published.rounding <= tolerance(published, values) <= tolerance(published, wider) + 1e-6
    assert tolerance(published, values) >= stdev(values)


ACCURACY = ("fedswa/table3", "fedmoswa/cifar100-dirichlet-0.1-accuracy")
REACHED, NEVER = (
    ("fedswa/table3", "fedmoswa/cifar100-dirichlet-0.1-rounds"),
    ("fedswa/table3", "fedavg/cifar100-dirichlet-0.1-rounds"),
)


@pytest.mark.parametrize(("value", "verdict"), [(0.62, "within"), (0.605, "within"), (0.70, "above"), (0.50, "below")])
def test_an_accuracy_is_within_above_or_below(value, verdict):
    found = judged(*ACCURACY, measured([0.0, value], rounds=1000))
    assert found.verdict == verdict
    assert found.mean == pytest.approx(100 * value)
    assert found.difference == pytest.approx(100 * value - 61.9)


def test_cells_without_runs_are_not_run():
    assert judged(*ACCURACY).verdict == "not run"
    not_runnable = judged("fedswa/table3", "fedavg/tiny-imagenet-dirichlet-0.1-accuracy")
    assert not_runnable.verdict == "not run"
    assert "ViT-B/16" in not_runnable.remark and "init=FILE" in not_runnable.remark


def test_an_unfinished_run_has_no_number_yet():
    found = judged(*ACCURACY, measured([0.0, 0.62], status="paused"))
    assert (found.verdict, found.values) == ("not run", ()) and "not finished" in found.remark


def test_a_diverged_run_is_judged_by_whether_the_paper_diverged():
    gone = measured([0.0, 0.1], status="diverged")
    assert judged(*ACCURACY, gone).verdict == "diverged"
    as_published = judged("wima/table2", "feddyn/femnist-without", gone)
    assert as_published.verdict == "within" and "diverged" in as_published.remark
    assert judged("wima/table2", "feddyn/femnist-without", measured([0.0, 0.8])).verdict == "above"


def test_diverged_seeds_are_left_out_of_the_mean():
    found = judged(*ACCURACY, measured([0.0, 0.62]), measured([0.0, 0.1], status="diverged"))
    assert (found.verdict, found.remark, len(found.values)) == ("within", "1 of 2 seeds", 1)


def test_rounds_to_a_target():
    reached, never = measured([0.0] * 570 + [0.6]), measured([0.1] * 10)
    assert judged(*REACHED, reached, reached).verdict == "below"
    assert judged(*REACHED, never).verdict == "censored"
    assert "1 of 2 seeds in 1000 rounds" in judged(*REACHED, reached, never).remark
    assert "as published" in judged(*NEVER, never).remark
    assert judged(*NEVER, never).verdict == "within"
    assert judged(*NEVER, reached).verdict == "below"


def test_a_dash_among_rounds_means_an_unreached_target():
    assert judged("fedwmsam/table3", "fedavg/0.78", measured([0.1] * 5)).verdict == "within"


def test_one_seed_without_published_deviation_is_not_judged():
    found = judged("fedswa/table4", "fedswa/rho-0.4", measured([0.0, 0.5]))
    assert (found.verdict, found.difference) == ("unjudged", pytest.approx(50 - 56.6))


def test_figures_without_numbers_are_not_judged():
    assert judged("fedswa/figure3", "fedavg/accuracy", measured([0.0, 0.5])).verdict == "not printed"


def test_the_best_of_several_methods_counts():
    plan = planned("fedwmsam/table1", ["fedlesam-s-d/cifar-10-beta-0.1"], 1)
    values = zip(plan.runs, (0.70, 0.72, 0.71), strict=True)
    (found,) = outcomes(plan, {run.folder: measured([0.0, value]) for run, value in values})
    assert found.values == (0.72,)


@pytest.mark.parametrize(
    ("table", "cell", "pair", "gain"),
    [
        ("fedswa/table5", "scaffold/improvement", (0.60, 0.58), 2.0),
        ("fedwmsam/table5", "mom/improvement", (0.75, 0.72), 3.0),
        ("eccv/table5", "asam/relative-alpha-0", (0.36, 0.30), 20.0),
    ],
)
def test_gains_are_differences_of_two_cells(table, cell, pair, gain):
    plan = planned(table, [cell], 1)
    found = outcomes(
        plan, {run.folder: measured([0.0, value], rounds=1) for run, value in zip(plan.runs, pair, strict=True)}
    )[0]
    assert found.values == pytest.approx((gain,))
    assert found.verdict == "unjudged"


def test_gains_are_paired_by_seed():
    plan = planned("fedswa/table5", ["scaffold/improvement"], 2)
    by_seed = {("scaffold", 0): 0.60, ("fedavg", 0): 0.58, ("scaffold", 1): 0.62, ("fedavg", 1): 0.61}
    runs = {run.folder: measured([0.0, by_seed[run.config.algorithm, run.config.seed]]) for run in plan.runs}
    assert outcomes(plan, runs)[0].values == pytest.approx((2.0, 1.0))
    zero = {folder: measured([0.0, 0.0]) if "fedavg" in str(folder) else run for folder, run in runs.items()}
    assert outcomes(plan, zero)[0].values == pytest.approx((60.0, 62.0)), "an absolute gain over zero"
    for run in plan.runs:  # now SCAFFOLD diverges with seed 0
        if (run.config.algorithm, run.config.seed) == ("scaffold", 0):
            runs[run.folder] = replace(runs[run.folder], status="diverged")
    assert outcomes(plan, runs)[0].by_seed == pytest.approx({1: 1.0})


def test_initial_weights_may_be_supplied_where_the_paper_uses_them():
    deviations = Deviations(has_initial_weights=True)
    assert deviations.reason_for_no_verdict(find_table("wima/table3").cells["fedavg/w-wima"]) == ""
    assert deviations.reason_for_no_verdict(find_table("wima/table4").cells["w-5/cifar10"]) == "other initial weights"
    assert planned("wima/table3", ["fedavg/*"], 1).not_runnable
    assert not planned("wima/table3", ["fedavg/*"], 1, deviations).not_runnable


@pytest.mark.parametrize(
    "deviations",
    [
        Deviations(small=True),
        Deviations(rounds=10),
        Deviations(rounds=5000),
        Deviations(changed_settings=("training.lr=1",)),
    ],
    ids=["small", "short", "long", "changed"],
)
def test_deviations_from_the_protocol_have_no_verdict(deviations):
    found = judged(*ACCURACY, measured([0.0, 0.62]), deviations=deviations)
    assert (found.verdict, found.difference, found.tolerance) == ("ran", None, None)


def test_the_evaluation_interval_affects_all_statistics_but_the_last():
    """The evaluation interval affects rounds to a target, but not the last accuracy."""
    deviations = Deviations(changed_settings=("evaluation.every=10",))
    run = measured([0.1, 0.796], rounds=1000)
    assert judged("fedswa/table2", "fedavg/cifar10-lenet-5-accuracy", run, deviations=deviations).verdict == "within"
    rounds = judged("fedswa/table2", "fedavg/cifar10-lenet-5-rounds", run, deviations=deviations)
    assert (rounds.verdict, rounds.remark) == ("ran", "evaluated every 10 rounds")
    other = Deviations(changed_settings=("training.lr=0.01",))
    assert judged("fedswa/table2", "fedavg/cifar10-lenet-5-accuracy", run, deviations=other).verdict == "ran"


def test_model_statistics_are_judged_and_missing_ones_have_a_reason():
    asked = ModelQuery(Eigenvalue(), "server")
    runs = [replace(measured([0.1]), model_statistics={asked: value}) for value in (90.0, 95.0, 99.0)]
    found = judged("eccv/table1", "fedavg-e-1/lambda-max-alpha-0", *runs)
    assert found.values == (90.0, 95.0, 99.0)
    assert found.verdict == "within"
    far = judged(
        "eccv/table1",
        "fedavg-e-1/lambda-max-alpha-0",
        *(replace(run, model_statistics={asked: 300.0 + n}) for n, run in enumerate(runs)),
    )
    assert far.verdict == "above"
    without = judged(
        "eccv/table1",
        "fedavg-e-1/lambda-max-alpha-0",
        replace(runs[0], model_statistics={asked: "the loss is not finite"}),
    )
    assert (without.verdict, without.remark, without.values) == ("not run", "the loss is not finite", ())


def test_seconds_are_never_judged():
    run = replace(measured([0.1] * 501), seconds=1000.0)
    found = judged("fedwmsam/table3", "fedavg/time", run, run)
    assert found.values == (2.0, 2.0)
    assert found.verdict == "unjudged" and "machine" in found.remark


def test_an_unreached_target_is_shown_with_the_planned_rounds():
    short = judged("fedwmsam/table3", "fedavg/0.7", measured([0.1] * 21), deviations=Deviations(small=True))
    assert short.unreached_in == 20
    assert outcome_row(short)[2] == "20+"
    reached = judged("fedwmsam/table3", "fedavg/0.7", measured([0.1] * 20 + [0.8]), deviations=Deviations(small=True))
    assert (reached.unreached_in, outcome_row(reached)[2]) == (None, "20")


def test_another_number_of_natural_clients_is_reported():
    run = replace(measured([0.0, 0.84]), clients=3597)
    cell = ("wima/table2", "fedavg/femnist-without")
    assert judged(*cell, run).remark.endswith("3,597 clients instead of 3,400")
    assert "clients" not in judged(*cell, replace(run, clients=3400)).remark
    assert "clients" not in judged(*cell, run, deviations=Deviations(small=True)).remark
