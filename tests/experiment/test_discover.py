"""Searches over algorithms: valid spaces, a known optimum, interruptions, and the confirmation on unseen seeds."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fedflat.algorithms import algorithm
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback
from fedflat.experiment.campaign import discover, tune
from fedflat.experiment.campaign.discover import (
    SEARCH,
    Discovery,
    Finalist,
    check_setup,
    confirm,
    finalists,
    plan_discovery,
    run_searches,
    seconds_spent,
)
from fedflat.experiment.campaign.space_file import read_space
from fedflat.experiment.campaign.tune import open_study, run_search
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.reporting.discovery import discovery_document, report_tables, selection_text, verdict, write_report
from fedflat.reporting.figures.discovery import discovery_figure

BASE = {
    "rounds": 4,
    "local_steps": 3,
    "clients_per_round": 2,
    "clients": 4,
    "partition": "iid",
    "model": "mlp(hidden=8)",
    "workers": 1,
    "engine.checkpoint_every": 1,
    "device": "cpu",
    "data.validation": 0.2,
    "evaluation.examples": 100,
}
SLOTS: dict[str, Any] = {
    "drift": ["none", "scaffold", "cm(alpha={alpha})"],
    "perturbation": ["none", "smoo"],  # smoo requires dyn, so it is never valid here
    "server": ["sgd(server_lr=0.0001)", "none"],  # such a small server_lr cannot be the best
}
SPACE: dict[str, Any] = {
    "base": BASE,
    "slots": SLOTS,
    "parameters": {"alpha": {"low": 0.2, "high": 1}, "lr": [0.1, 0.2]},
    "baselines": ["fedavg"],
    "candidates": 8,
    "halving": {"min_rounds": 1, "reduction": 2},
    "confirm": {"seeds": [7, 8], "also": [{"partition": "dirichlet(alpha=0.5)"}]},
}


def plan(out: Path, **more: Any) -> Discovery:
    return plan_discovery(read_space({**SPACE, **more}), out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Discovery, dict[str, Any]]:
    """A finished search with its report."""
    pytest.importorskip("optuna", minversion="4.0", reason="searches need Optuna (pip install 'fedflat[sweep]')")
    discovery = plan(tmp_path_factory.mktemp("discovered"))
    list(run_searches(discovery))
    best = finalists(discovery)
    document = discovery_document(discovery, best, confirm(discovery, best))
    write_report(document, discovery.out)
    return discovery, document


def test_the_known_optimum_wins_and_invalid_combinations_are_never_tried(
    finished: tuple[Discovery, dict[str, Any]],
) -> None:
    discovery, document = finished
    assert (discovery.combinations, discovery.excluded, discovery.rungs) == (6, 6, [1, 2])
    candidates = document["candidates"][SEARCH]
    assert len(candidates) == 8 and {candidate["values"]["perturbation"] for candidate in candidates} == {"none"}
    assert {candidate["values"]["server"] for candidate in candidates} == set(SLOTS["server"])
    best = max((one for one in candidates if one["state"] == "complete"), key=lambda one: one["score"])
    winner = document["finalists"][0]
    assert best["values"]["server"] == "none" and winner["algorithm"] == best["algorithm"]
    assert algorithm(winner["algorithm"]).conflict() is None
    assert f"--set training.lr={best['values']['training.lr']}" in winner["command"]
    assert "--set data.partition=iid" in winner["command"]
    (rung, *_) = document["importance"]
    assert rung["rounds"] == 1 and max(rung["shares"], key=rung["shares"].get) == "server"


def test_the_figure_states_why_there_are_no_importances(finished: tuple[Discovery, dict[str, Any]]) -> None:
    figure = discovery_figure({**finished[1], "importance": []})
    assert "more candidates, varied slots, or scikit-learn" in figure.axes[0].get_xlabel()


def test_candidates_have_only_the_parameters_of_their_parts(finished: tuple[Discovery, dict[str, Any]]) -> None:
    for candidate in finished[1]["candidates"][SEARCH]:
        values = candidate["values"]
        assert ("alpha" in values) == values["drift"].startswith("cm")
        assert {"drift", "perturbation", "server", "training.lr"} <= values.keys()


def test_scores_at_every_rung_are_validation_metrics(finished: tuple[Discovery, dict[str, Any]]) -> None:
    discovery, document = finished
    states = set()
    for name, candidates in document["candidates"].items():
        for candidate in candidates:
            folder = discovery.searches[name].folder(candidate["trial"]) / "seed-0"
            metrics = RunFolder(folder).metrics()
            recorded = {line["round"]: line["validation"]["server"]["accuracy"] for line in metrics}
            assert candidate["scores"] == recorded
            assert (candidate["state"] == "complete") == (4 in recorded) and candidate["score"] == recorded.get(4)
            assert not list(folder.glob("checkpoint/[!.]*")) and not list(folder.glob("*.safetensors"))
            states.add(candidate["state"])
    assert states == {"complete", "pruned"}


def test_confirmation_is_paired_on_unseen_seeds_and_test_data(finished: tuple[Discovery, dict[str, Any]]) -> None:
    discovery, document = finished
    assert list(document["confirmation"]) == [SEARCH, "partition=dirichlet(alpha=0.5)"]
    rows = document["confirmation"][SEARCH]
    for label, row in rows.items():
        assert list(row["test"]) == [7, 8]
        for seed, score in row["test"].items():
            folder = discovery.out / "confirm" / SEARCH / label.replace(" ", "_") / f"seed-{seed}"
            assert RunFolder(folder).metrics()[-1]["test"]["server"]["accuracy"] == score
            assert not list(folder.glob("checkpoint/[!.]*")) and list(folder.glob("*.safetensors"))
    difference = document["differences"][0]
    expected = [rows[SEARCH]["test"][seed] - rows["fedavg"]["test"][seed] for seed in (7, 8)]
    assert difference["label"] == "fedavg" and list(difference["differences"]) == expected
    assert len(document["differences"]) == 2 and difference["holm"] >= difference["p"]
    labels = [finalist["label"] for finalist in document["finalists"][2:]]
    assert labels == [f"without {part}" for part in _parts(document["finalists"][0]["algorithm"])]


def _parts(text: str) -> list[str]:
    """The parts of the winner that have an ablation."""
    return ["scaffold"] if "scaffold" in text else ["cm"] if "cm" in text else []


def test_ablations_are_confirmed_on_the_problem_of_the_search(
    finished: tuple[Discovery, dict[str, Any]], tmp_path: Path
) -> None:
    winner, baseline = finalists(finished[0])[:2]
    parts = {"drift": "scaffold", "perturbation": "none", "server": "none", "training.lr": 0.1}
    ablation = Finalist(SEARCH, {**parts, "drift": "none"}, "without scaffold")
    best = [replace(winner, values=parts), baseline, ablation]
    document = discovery_document(finished[0], best, confirm(replace(finished[0], out=tmp_path), best))
    confirmed = {problem: list(rows) for problem, rows in document["confirmation"].items()}
    both = [SEARCH, "fedavg"]
    assert confirmed == {SEARCH: [*both, "without scaffold"], "partition=dirichlet(alpha=0.5)": both}
    assert [one["problem"] for one in document["ablations"]] == [SEARCH]
    assert report_tables(document)["Confirmation"].rows[-1][-1] == "–"


def test_the_report_states_the_number_of_candidates_and_the_regression(
    finished: tuple[Discovery, dict[str, Any]],
) -> None:
    discovery, document = finished
    selection = document["selection"]
    values = list(document["confirmation"][SEARCH][SEARCH]["validation"].values())
    assert selection["candidates"] == 8
    assert selection["regression"] == pytest.approx(document["finalists"][0]["search"] - sum(values) / 2)
    assert selection["expected_maximum"] == pytest.approx(1.4236 * selection["seed_deviation"], rel=1e-3)
    text = (discovery.out / "discover.md").read_text(encoding="utf-8")
    assert "best of 8 scored candidates" in text and "6 valid combinations of parts (6 excluded)" in text
    assert json.loads((discovery.out / "discover.json").read_text())["verdict"] == document["verdict"]
    assert (discovery.out / "discover.png").stat().st_size > 1000
    for cost, front in document["pareto"].items():
        points = [(one[cost], one["score"]) for one in front]
        for rising in zip(*points, strict=True):
            assert list(rising) == sorted(set(rising))
        assert all(one["rounds"] for one in front)
        for one in front:
            candidate = document["candidates"][one["search"]][one["trial"]]
            assert candidate["scores"][one["rounds"]] == one["score"]
            assert one["name"].endswith(f", lr={candidate['values']['training.lr']}")
        candidates = [one for listed in document["candidates"].values() for one in listed]
        for one in candidates:
            for rounds, score in one["scores"].items():
                spent = one["costs"][rounds][cost]
                assert rounds == 0 or any(point[0] <= spent and point[1] >= score for point in points)
        reached = {(one["costs"][rounds][cost], score) for one in candidates for rounds, score in one["scores"].items()}
        assert reached >= set(points)


def test_a_better_confirmation_is_no_regression(finished: tuple[Discovery, dict[str, Any]]) -> None:
    document = finished[1]
    for regression, words in (
        (0.01, ": a regression to the mean of 1.00 points."),
        (-0.01, ", so it did not regress."),
    ):
        text = selection_text({**document, "selection": document["selection"] | {"regression": regression}})
        assert words in text and "expected regression of up to " in text
    unknown = document["selection"] | {"regression": 0.01, "seed_deviation": None, "expected_maximum": None}
    assert selection_text({**document, "selection": unknown}).endswith(": a regression to the mean of 1.00 points.")


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_the_verdict_counts_significant_gains_and_losses(lower_is_better: bool) -> None:
    sign = -1 if lower_is_better else 1
    differences = [{"mean": sign * mean, "holm": p} for mean, p in ((1, 0.01), (2, 0.02), (-1, 0.03), (3, 0.2))]
    document = {"lower_is_better": lower_is_better, "finalists": [{"name": "mine"}], "differences": differences}
    assert "better in 2 and worse in 1 of 4 comparisons" in verdict(document)
    assert "better than every baseline" in verdict({**document, "differences": differences[:2]})
    assert "not differ significantly from any baseline (1 comp" in verdict({**document, "differences": differences[3:]})


def test_a_trial_that_another_process_finishes_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = plan(tmp_path).searches[SEARCH]
    study = open_study(search)
    number = study.ask()

    def finish_and_release(folder: Path) -> bool:
        study.record_result(number, 0.5, "complete")
        return True

    monkeypatch.setattr(tune, "is_free", finish_and_release)
    with ExitStack() as lock:
        assert tune._lock_next_trial(search, study, lock) == number + 1


class Crash(Callback):
    def __init__(self, after: int) -> None:
        self.left = after

    def round_done(self, run: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_killed_search_continues_to_the_same_candidates(
    finished: tuple[Discovery, dict[str, Any]], tmp_path: Path
) -> None:
    discovery = plan(tmp_path, candidates=5)
    search = discovery.searches[SEARCH]
    for rounds in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            list(run_search(search, (Crash(rounds),)))
    list(run_search(search))
    candidates = open_study(search).candidates()
    uninterrupted = finished[1]["candidates"][SEARCH][:5]
    assert [(one["values"], one["scores"], one["state"]) for one in candidates] == [
        (one["values"], one["scores"], one["state"]) for one in uninterrupted
    ]


def test_finished_searches_are_not_repeated_and_used_seeds_are_refused(
    finished: tuple[Discovery, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    discovery, _ = finished
    assert list(run_searches(discovery)) == []
    winner = finalists(discovery)[0]
    assert [record.config.seed for _, _, record in confirm(discovery, [winner])] == [7, 8, 7, 8]
    run_all = discover.run_each
    monkeypatch.setattr(discover, "run_each", lambda *arguments: islice(run_all(*arguments), 1, None))  # one failed
    confirmed = [(problem, record.folder.path.parts[-3]) for problem, _, record in confirm(discovery, [winner])]
    assert confirmed == [(SEARCH, SEARCH), *[("partition=dirichlet(alpha=0.5)", "partition_dirichlet_alpha_0.5")] * 2]
    monkeypatch.undo()
    changed = type(winner)(SEARCH, {**winner.values, "training.lr": 0.15}, SEARCH, 0, 0.5)
    with pytest.raises(UserError, match=r"choose new confirm\.seeds"):
        next(confirm(discovery, [changed]))


def test_the_time_limit_is_shared_and_holds_across_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate takes 40 seconds of a simulated clock, and both searches have 60 seconds of the 2 minutes."""
    slots, parameters = {"server": SLOTS["server"]}, {"lr": [0.1, 0.2]}
    discovery = plan(tmp_path, candidates=9, slots=slots, parameters=parameters)
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: 1e9 * now[0])  # jumps of the clock do not matter

    def tried(minutes: float) -> list[str]:
        names = []
        for name, _ in run_searches(discovery, minutes):
            names.append(name)
            now[0] += 40
        return names

    assert tried(2) == [SEARCH, SEARCH, "fedavg", "fedavg"]
    assert seconds_spent(discovery) == {SEARCH: 80, "fedavg": 80}
    assert tried(2) == [] and tried(3) == [SEARCH, "fedavg"]
    interrupted = run_searches(discovery, 9)
    next(interrupted)
    now[0] += 25
    interrupted.close()  # type: ignore[attr-defined]
    assert seconds_spent(discovery)[SEARCH] == 145, "the time of the interrupted candidate counts"


def test_problems_with_another_metric_are_refused(tmp_path: Path) -> None:
    check_setup(plan(tmp_path))
    with pytest.raises(UserError, match=r"another metric \(task=f1: f1 instead of accuracy\)"):
        check_setup(plan(tmp_path, confirm={"seeds": [7, 8], "also": [{"training.task": "f1"}]}))


def test_a_problem_that_cannot_be_trained_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedflat.experiment.setup.engine.has_bf16", lambda device: False)
    with pytest.raises(UserError, match=r"^confirm\.also, model=cnn: cnn needs images of at least 16x16 pixels"):
        check_setup(plan(tmp_path, confirm={"seeds": [7, 8], "also": [{"model": "cnn"}]}))
    with pytest.raises(UserError, match=r"^this CPU does not compute in bf16, .*; use engine\.precision=float32"):
        check_setup(plan(tmp_path, base={**BASE, "engine.precision": "bf16"}))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"^engine\.device=cuda, but torch finds no GPU here"):
            check_setup(plan(tmp_path, base={**BASE, "device": "cuda"}))


def test_a_candidate_in_progress_pauses_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = plan(tmp_path, candidates=1).searches[SEARCH]
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Late(Callback):
        def round_done(self, run: Any) -> None:
            now[0] += 40

    assert list(run_search(replace(search, seconds=60), (Late(),))) == []
    (candidate,) = open_study(search).candidates()
    assert candidate["state"] == "unfinished" and list(candidate["scores"]) == [0, 1]
    (trial,) = run_search(search)
    assert trial.state == "complete" and list(open_study(search).candidates()[0]["scores"]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"slots": {"drift": ["scafold"]}}, "unknown drift correction 'scafold'; did you mean scaffold?"),
        ({"slots": {"drfit": ["scaffold"]}}, "unknown slot 'drfit'; did you mean drift?"),
        ({"slots": {"drift": ["none", "sam"]}}, "sam is listed in slots.drift, but it fills the perturbation"),
        ({"slots": {"drift": ["scaffold+dyn"]}}, "'scaffold+dyn' has 2 parts"),
        ({"slots": {"drift": ["none", "none"]}}, "slots.drift lists none twice"),
        ({"slots": {"drift": []}}, "slots.drift is empty"),
        ({"slots": {}}, "slots is empty"),
        ({"slots": {"drift": ["dyn(beta=1)"]}, "parameters": {}}, "'beta'"),
        ({"slots": {"drift": ["dyn(alpha={alpha})"]}, "parameters": {"alpha": {"low": -1, "high": 1}}}, "alpha=-1"),
        ({"slots": {"drift": ["cm(alpha={alpha})"]}, "parameters": {"alpha": {"low": 0.1, "high": 9}}}, "alpha=9"),
        ({"base": {**BASE, "algorithm": "fedsam"}}, "the perturbation is filled twice: by fedsam in base"),
        ({"slots": {"drift": ["acg"], "server": ["adam"]}, "parameters": {}}, "no combination of the slots' choices"),
        ({"parameters": {"lr": [0.1]}}, "{alpha} has no values"),
        ({"parameters": {**SPACE["parameters"], "ratte": [1]}}, "parameters 'ratte'"),
        ({"parameters": {**SPACE["parameters"], "beta": [1]}}, "no text contains {beta}"),
        ({"parameters": {"alpha": 0.2}}, "parameters.alpha: expected a list of values, or a range with low, high"),
        ({"parameters": {"alpha": {"low": "a", "high": 1}}}, "parameters.alpha.low: input should be a valid number"),
        ({"sampler": "grid"}, "sampler: input should be 'tpe' or 'random'"),
        ({"parameters": {**SPACE["parameters"], "seed": [1]}}, "remove it from parameters"),
        ({"parameters": {**SPACE["parameters"], "algorithm": ["fedavg"]}}, "algorithm cannot be a parameter"),
        ({"seeds": [7]}, "share the seed 7"),
        ({"seeds": [1, 1]}, "seeds is [1, 1]"),
        ({"confirm": {"seeds": [3]}}, "confirm.seeds"),
        ({"confirm": {"seeds": [7, 8], "also": [{}]}}, "empty or occurs twice"),
        ({"confirm": {"seeds": [7, 8], "also": [{"rond": 3}]}}, "confirm.also 'rond'"),
        ({"confirm": {"seeds": [7, 8], "also": [{"model": "mlpp"}]}}, "confirm.also, model=mlpp: "),
        ({"confirm": {"seeds": [7, 8], "also": [{"rounds": 4}]}}, "rounds=4 is the same problem as that of the search"),
        ({"confirm": {"seeds": [7, 8], "also": [{"clients": 5}, {"data": {"clients": 5.0}}]}}, "same problem as that"),
        ({"confirm": {"sedes": [7, 8]}}, "'sedes' in confirm of the space; did you mean seeds?"),
        ({"baselines": ["fedsma"]}, "fedsma"),
        ({"baselines": ["fedavg", "FedAvg"]}, "baselines lists FedAvg twice"),
        ({"confirm": {"seeds": [7, 8], "also": [{"lr": 0.5}]}}, "confirm.also cannot change training.lr"),
        ({"confirm": {"seeds": [7, 8], "also": [{"algorithm": "fedsam"}]}}, "confirm.also cannot change algorithm"),
        ({"base": {**BASE, "data.validation": 0}}, "data.validation"),
        ({"base": {**BASE, "stop.target": 0.9}}, "stop.target"),
        ({"base": {**BASE, "dataset": "digtis"}}, "digtis"),
        ({"candidate": 3}, "'candidate' in the space; did you mean candidates?"),
        ({"halving": {"min_rounds": 0}}, "halving.min_rounds"),
        ({"halving": True}, "halving: expected a mapping with min_rounds, reduction"),
    ],
)
def test_invalid_spaces_are_rejected_before_anything_runs(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        plan(tmp_path, **more)
    assert words in str(error.value) and not list(tmp_path.iterdir())


def test_base_and_baselines_may_have_placeholders(tmp_path: Path) -> None:
    base = {**BASE, "algorithm": "fedsam(rho={rho})", "partition": "dirichlet(alpha={a})"}
    parameters = {"rho": {"low": 0.1, "high": 0.2}, "a": [0.3]}
    space = {
        "base": base,
        "slots": {"drift": ["scaffold"]},
        "parameters": parameters,
        "baselines": ["fedasam(rho={rho})"],
    }
    config = plan(tmp_path, **space).searches[SEARCH].example_config()
    assert config.algorithm == "fedgamma" and config.data.partition == "dirichlet(alpha=0.3)"


def test_a_damaged_journal_is_a_user_error(tmp_path: Path) -> None:
    search = plan(tmp_path).searches[SEARCH]
    search.out.mkdir()
    (search.out / "tune.journal").write_text('{"op_code": 0}\n')
    with pytest.raises(UserError, match="journal is damaged"):
        open_study(search)


def test_the_example_is_valid(tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "examples" / "discover-digits.yaml"
    discovery = plan_discovery(read_space(file), tmp_path)
    assert discovery.excluded and discovery.combinations > 100
    assert yaml.safe_load(file.read_text())["baselines"] == [name for name in discovery.searches if name != SEARCH]
