"""Statistics against closed forms, scipy and known properties of small samples."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.reporting.tables.summary import (
    bootstrap_interval,
    compare_paired,
    detectable_effect,
    holm_correction,
    paired_test,
    rank_algorithms,
    signed_rank_p,
    summarise,
    t_interval,
)
from fedflat.reporting.tables.targets import TargetCosts, costs_to_target

SOME = [0.3, -0.1, 0.45, 0.8, -0.25, 0.62, 0.17]


@pytest.mark.parametrize(("rounds", "every", "count"), [(30, 1, 3), (31, 1, 4), (100, 10, 1), (4, 1, 1), (0, 1, 1)])
def test_the_mean_covers_the_last_tenth_of_all_evaluations(rounds: int, every: int, count: int) -> None:
    history = [{"round": r, "test": {"server": {"accuracy": r / 1000}}} for r in range(0, rounds + 1, every)]
    summary = summarise(history, "server", "accuracy", lower_is_better=False)
    assert summary.mean_count == count
    assert summary.mean_last == pytest.approx(np.mean([(rounds - every * back) / 1000 for back in range(count)]))
    history[-1]["test"]["swa"] = {"accuracy": 0.9}
    average = summarise(history, "swa", "accuracy", lower_is_better=False)
    assert (average.mean_last, average.mean_count) == (0.9, 1)


def test_the_first_evaluation_with_the_best_validation_value_is_selected() -> None:
    losses = zip([0.5, 0.9, 0.7, 0.6, 0.4], [3.0, 1.0, 2.0, 1.0, None], strict=True)
    history = [
        {"round": r, "test": {"server": {"loss": test}}, "validation": {"server": {"loss": value}}}
        for r, (test, value) in enumerate(losses)
    ]
    assert summarise(history, "server", "loss", lower_is_better=True).at_best_validation == 0.9
    assert summarise(history, "server", "loss", lower_is_better=False).at_best_validation == 0.5
    unvalidated = [entry | {"validation": {}} for entry in history]
    assert summarise(unvalidated, "server", "loss", lower_is_better=True).at_best_validation is None


def test_pairs_use_only_common_seeds():
    pair = compare_paired({0: 1.0, 1: 2.0, 5: 9.0}, {1: 1.5, 0: 0.0, 7: 3.0})
    assert pair.seeds == (0, 1)
    assert pair.differences == (1.0, 0.5)
    assert pair.mean == 0.75
    assert compare_paired({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_neither_interval_nor_test():
    pair = compare_paired({0: 1.0}, {0: 0.5})
    assert (pair.interval, pair.t_interval, pair.test, pair.p) == (None, None, "none", None)


def test_bootstrap_of_few_values_counts_every_resample():
    values = [0.1, 0.4, 0.2, 0.9]
    means = sorted(np.mean(chosen) for chosen in product(values, repeat=4))
    low, high = bootstrap_interval(values)
    assert low == pytest.approx(means[math.ceil(0.025 * 256) - 1])
    assert high == pytest.approx(means[math.ceil(0.975 * 256) - 1])


def test_bootstrap_of_many_values_is_near_the_normal_interval():
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    low, high = bootstrap_interval(values.tolist())
    half = 1.96 * values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)
    assert bootstrap_interval(values.tolist()) == (low, high)


def test_three_values_cover_three_quarters():
    """As the notes of a report state for three seeds: their range contains the median in 1 - 2 / 2^3 of all cases."""
    draws = np.random.default_rng(0).normal(0.0, 1.0, (4000, 3))
    held = [low <= 0 <= high for low, high in (bootstrap_interval(row.tolist()) for row in draws[:400])]
    exact = ((draws.min(1) <= 0) & (draws.max(1) >= 0)).mean()
    assert exact == pytest.approx(0.75, abs=0.02)
    assert np.mean(held) == pytest.approx(0.75, abs=0.07)


def test_t_interval_is_scipys():
    found = scipy.stats.ttest_1samp(SOME, 0.0).confidence_interval(0.95)
    assert t_interval(SOME) == pytest.approx((found.low, found.high))


def test_signed_rank_is_scipys_where_scipy_is_exact():
    some = [*SOME, *np.linspace(-0.55, 0.6, 20)]
    for values in (SOME, some):
        assert signed_rank_p(values) == pytest.approx(scipy.stats.wilcoxon(values, method="exact").pvalue)
    assert signed_rank_p([*some, 0.3, 0.3]) == signed_rank_p([*some, 0.3, 0.3])  # exact even with ties


@settings(max_examples=40)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=8))
def test_signed_rank_with_ties_is_the_share_of_sign_flips(differences):
    values = np.array([d for d in differences if d], dtype=float)
    if not len(values):
        assert signed_rank_p(differences) == 1.0
        return
    ranks = scipy.stats.rankdata(np.abs(values))
    sums = np.array([ranks[np.array(signs) > 0].sum() for signs in product((-1, 1), repeat=len(values))])
    positive = ranks[values > 0].sum()
    tail = min((sums <= positive).mean(), (sums >= positive).mean())
    assert signed_rank_p(differences) == pytest.approx(min(1.0, 2 * tail))


def test_nearly_equal_differences_are_ties():
    assert signed_rank_p([0.1 + 0.2, 0.3, -0.3, 0.4, 0.5, 0.6]) == signed_rank_p([3, 3, -3, 4, 5, 6])
    some = [0.01, 0.02, 0.03, -0.04, 0.05, 0.06]
    assert paired_test([*some, 1.1e-16]) == paired_test([*some, 0.0]) == ("signed rank", signed_rank_p(some))
    assert paired_test([1.1e-16, 1.1e-16, 2.2e-16]) == ("none", 1.0)
    assert rank_algorithms({"a": {0: 0.1 + 0.2}, "b": {0: 0.3}}).each == {"a": (1.5,), "b": (1.5,)}


def test_which_test_is_used():
    assert paired_test(SOME[:5])[0] == "paired t"
    assert paired_test(SOME[:5])[1] == pytest.approx(scipy.stats.ttest_1samp(SOME[:5], 0).pvalue)
    assert paired_test(SOME[:6])[0] == "signed rank"
    assert paired_test([0.0, 0.0, 0.0]) == ("none", 1.0)
    assert paired_test([0.1, 0.1, 0.1]) == ("none", None)


def test_five_pairs_could_never_be_significant_by_rank():
    assert signed_rank_p([1, 2, 3, 4, 5]) == 2 / 2**5
    assert signed_rank_p([1, 2, 3, 4, 5, 6]) < 0.05


def test_holm_by_hand():
    assert holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_correction([0.9, 0.8]) == [1.0, 1.0]
    assert holm_correction([None, 0.2]) == [None, 0.2]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_between_the_raw_value_and_bonferroni(ps):
    for raw, adjusted in zip(ps, holm_correction(ps), strict=True):
        assert raw <= adjusted <= min(1.0, len(ps) * raw) + 1e-12
    order = np.argsort(ps, kind="stable")
    assert np.all(np.diff(np.array(holm_correction(ps))[order]) >= 0)


def test_ranks_share_places_and_put_the_diverged_last():
    ranks = rank_algorithms({"a": {0: 0.9, 1: 0.8}, "b": {0: 0.9, 1: -math.inf}, "c": {0: 0.1, 1: 0.2}})
    assert ranks.each == {"a": (1.5, 1.0), "b": (1.5, 3.0), "c": (3.0, 2.0)}
    assert list(ranks.mean) == ["a", "b", "c"]
    two = rank_algorithms({"a": {0: 0.1}, "b": {0: 0.9}})
    assert two.each == {"a": (2.0,), "b": (1.0,)}
    assert two.friedman is None


def test_friedman_and_the_critical_difference():
    table = {
        name: dict(enumerate(values))
        for name, values in {"a": (9, 8, 7, 9), "b": (5, 6, 5, 4), "c": (1, 2, 1, 3)}.items()
    }
    ranks = rank_algorithms(table)
    assert ranks.friedman == pytest.approx(
        scipy.stats.friedmanchisquare((9, 8, 7, 9), (5, 6, 5, 4), (1, 2, 1, 3)).pvalue
    )
    assert ranks.critical == pytest.approx(
        2.343 * math.sqrt(3 * 4 / (6 * 4)), abs=2e-3
    )  # Demsar (2006), table 5: q = 2.343 for three


def test_rows_without_common_seeds_have_no_ranks():
    assert rank_algorithms({"a": {0: 1.0}, "b": {1: 1.0}}) is None
    assert rank_algorithms({"a": {0: 1.0}}) is None


def test_censored_runs_count():
    assert TargetCosts((10, 20, None), (50, 50, 50)).median == 20
    assert TargetCosts((10, None, None), (50, 1000, 1000)).text == "1000+"
    assert TargetCosts((10, None, None), (1000, 50, 100)).text == "50+", "where the run in the middle ended"
    assert TargetCosts((10, 20), (50, 50)).text == "15"
    assert TargetCosts((10, None), (50, 50)).median is None
    assert TargetCosts((10, None), (50, 50)).reached == 1


def test_runs_without_evaluations_do_not_count() -> None:
    history = [{"round": r, "test": {"server": {"rmse": 9 - r}}, "bytes_up": r, "bytes_down": r} for r in (5, 8)]
    evaluated = SimpleNamespace(history=history, status="running")
    row = SimpleNamespace(model="server", records=[evaluated, SimpleNamespace(history=[], status="running")])
    needed = costs_to_target(row, "rmse", 4, lower_is_better=True)
    assert (needed.median, needed.bytes, needed.reached, needed.ends) == (5, 10, 1, (8,))
    assert costs_to_target(row, "rmse", 0.5, lower_is_better=True).document(0.5)["each"] == ["8+"]


def test_power_agrees_with_simulation():
    effect = detectable_effect(5)
    draws = np.random.default_rng(0).normal(effect, 1.0, (4000, 5))
    assert (scipy.stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.03)
    assert detectable_effect(3) > detectable_effect(5) > detectable_effect(20)
