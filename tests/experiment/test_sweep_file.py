"""Sweep files: the runs they describe, the names of these runs, and error messages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.errors import UserError
from fedflat.experiment.campaign.sweep import MAX_NAME_LENGTH, SweepRun, plan_sweep
from fedflat.experiment.campaign.sweep_file import SweepFile, combinations, read_sweep

OUT = Path("out")


def planned(**values: object) -> tuple[SweepRun, ...]:
    return plan_sweep(read_sweep(values), OUT).runs


def names(**values: object) -> list[str]:
    return [run.name for run in planned(**values)]


def test_a_grid_is_the_product_of_its_values() -> None:
    runs = planned(
        base={"rounds": 7},
        grid={"algorithm": ["fedavg", "fedsam"], "partition": ["iid", "dirichlet(alpha=0.3)"], "seed": [0, 1]},
    )
    assert len(runs) == len({run.config for run in runs}) == 8
    assert (
        runs[0].name == "fedavg--partition-iid--seed-0"
        and runs[-1].name == "fedsam--partition-dirichlet_alpha_0.3--seed-1"
    )
    assert {run.config.data.partition for run in runs} == {"iid", "dirichlet(alpha=0.3)"}
    assert all(run.config.training.rounds == 7 and run.folder == OUT / run.name for run in runs)


def test_every_list_entry_is_combined_with_the_grid() -> None:
    runs = planned(
        list=[{"algorithm": "fedavg", "lr": 0.1}, {"algorithm": "fedsam", "training.lr": 0.2}],
        grid={"seed": [3, 4]},
    )
    assert [(run.config.algorithm, run.config.training.lr, run.config.seed) for run in runs] == [
        ("fedavg", 0.1, 3),
        ("fedavg", 0.1, 4),
        ("fedsam", 0.2, 3),
        ("fedsam", 0.2, 4),
    ]


def test_base_accepts_sections_full_and_short_names() -> None:
    (run,) = planned(
        base={"data": {"clients": 20}, "training.lr": 0.3, "clients_per_round": 4, "flatness": "every=5"},
        grid={"dataset": ["digits"]},
    )
    found = run.config
    assert (found.data.dataset, found.data.clients, found.training.lr, found.federation.clients_per_round) == (
        "digits",
        20,
        0.3,
        4,
    )
    assert found.flatness.every == 5


def test_braces_refer_to_varied_settings() -> None:
    runs = planned(grid={"algorithm": ["fedavg", "fedsam(rho={rho})"], "rho": [0.2, 0.3]})
    assert [run.config.algorithm for run in runs] == ["fedavg", "fedsam(rho=0.2)", "fedsam(rho=0.3)"], (
        "fedavg has no rho, so it is one run"
    )
    assert [run.name for run in runs] == ["fedavg", "fedsam_rho_0.2", "fedsam_rho_0.3"]
    assert runs[1].varied == {"algorithm": "fedsam(rho=0.2)", "rho": 0.2}
    in_base = planned(base={"partition": "dirichlet(alpha={alpha})"}, grid={"alpha": [0.1, 1]})
    assert [(run.name, run.config.data.partition) for run in in_base] == [
        ("alpha-0.1", "dirichlet(alpha=0.1)"),
        ("alpha-1", "dirichlet(alpha=1)"),
    ]
    seeded = planned(base={"init": "weights/{seed}.safetensors"}, grid={"seed": [5]})
    assert (
        seeded[0].config.init is not None
        and seeded[0].config.init.name == "5.safetensors"
        and seeded[0].config.seed == 5
    )


def test_exclusions() -> None:
    grid = {"algorithm": ["fedavg", "fedsam(rho=0.05)"], "seed": [0, 1], "lr": [0.1, 0.2]}
    assert len(planned(grid=grid, exclude=[{"algorithm": "fedsam", "lr": "2e-1"}])) == 6, (
        "fedsam is fedsam(rho=0.05), 2e-1 is 0.2"
    )
    assert len(planned(grid=grid, exclude=[{"seed": [0, 1], "lr": 0.1}])) == 4
    possible = planned(
        grid={"clients": [5, 50], "clients_per_round": [5, 10]}, exclude=[{"clients": 5, "clients_per_round": 10}]
    )
    assert len(possible) == 3, "what is impossible may be left out"
    filled = {"algorithm": ["fedavg", "fedsam(rho={rho})"], "rho": [0.1, 0.2], "seed": [0, 1]}
    assert len(planned(grid=filled, exclude=[{"rho": 0.1, "seed": 1}])) == 2 + 3
    assert len(planned(grid=filled, exclude=[{"algorithm": "fedsam(rho=0.1)"}])) == 2 + 2


def test_names_do_not_change_when_values_are_added() -> None:
    few, more = names(grid={"lr": [0.1], "seed": [0]}), names(grid={"lr": [0.05, 0.1], "seed": [0, 1]})
    assert few == ["lr-0.1--seed-0"] and set(few) < set(more)


def test_settings_with_equal_last_names_are_distinguished() -> None:
    (name,) = names(grid={"evaluation.statistics": ["averaged"], "training.statistics": ["own"]})
    assert name == "evaluation.statistics-averaged--training.statistics-own"


def test_long_and_colliding_names_have_a_hash() -> None:
    long = names(
        grid={
            "algorithm": [
                f"fedmoswa+asam(rho=0.{n})+wima(window=10)+wima(window=20)+ema+swa+ema(decay=0.5)+ema(decay=0.25)"
                for n in (1, 2)
            ]
        }
    )
    assert all(len(name) <= MAX_NAME_LENGTH for name in long) and len(set(long)) == 2
    meeting = names(grid={"init": ["a/b.safetensors", "a_b.safetensors"]})
    assert len(set(meeting)) == 2 and meeting == names(grid={"init": ["a/b.safetensors", "a_b.safetensors"]})


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True),
    st.lists(
        st.sampled_from(["iid", "dirichlet(alpha=0.1)", "dirichlet(alpha=1)"]), min_size=1, max_size=3, unique=True
    ),
    st.lists(st.floats(0.01, 1).map(lambda x: round(x, 3)), min_size=1, max_size=3, unique=True),
)
def test_every_combination_has_its_own_folder(seeds, partitions, rates) -> None:
    runs = planned(grid={"seed": seeds, "partition": partitions, "lr": rates})
    assert (
        len(runs)
        == len({run.folder for run in runs})
        == len({run.config for run in runs})
        == len(seeds) * len(partitions) * len(rates)
    )


SEED = {"grid": {"seed": [0]}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gird": {"seed": [0]}}, "'gird' in the sweep; did you mean grid?"),
        ({"grid": {"sed": [0]}}, "grid 'sed'; did you mean seed?"),
        ({"grid": {"training.lrr": [0]}}, "grid 'training.lrr'; did you mean training.lr"),
        (
            {**SEED, "base": {"training": {"ruonds": 3}}},
            "base 'training.ruonds'; did you mean training.rounds",
        ),
        ({**SEED, "exclude": [{"sede": 0}]}, "exclude 'sede'; did you mean seed?"),
        ({**SEED, "keep": {"chekpoint": False}}, "'chekpoint' in keep of the sweep; did you mean checkpoint?"),
        (
            {"grid": {"algorithm": ["fedsma"]}},
            "combination algorithm=fedsma",
        ),
        ({"grid": {"algorithm": ["fedsam(rhoo=1)"]}}, "'rhoo'; did you mean rho"),
        ({"grid": {"model": ["mlpp"]}}, "'mlpp'; did you mean mlp"),
        ({"grid": {"dataset": ["digit"]}}, "'digit'; did you mean digits"),
        ({"grid": {"partition": ["dirichlet(alpa=1)"]}}, "'alpa'; did you mean alpha"),
        ({}, "the sweep varies nothing"),
        ({"grid": {}}, "grid and list are both empty"),
        ({"grid": {"seed": []}}, "grid gives seed no values"),
        ({"grid": {"seed": np.arange(2)}}, "grid gives seed array([0, 1]); expected a list"),
        ({"grid": {"seed": 3}}, "grid gives seed 3; expected a list"),
        ({"grid": [1]}, "grid: input should be a valid dictionary"),
        ({"grid": {"seed": [1, 1]}}, "grid lists 1 twice for seed"),
        ({"grid": {"lr": [0.1, "1e-1"]}}, "training.lr=0.1 and training.lr=1e-1 are the same run"),
        ({"grid": {"lr": ["fast"]}}, "combination training.lr=fast"),
        (
            {"base": {"clients_per_round": 10}, "grid": {"clients": [50, 5]}},
            "combination data.clients=5",
        ),
        ({**SEED, "list": [{"seed": 1}]}, "seed is in both grid and list"),
        ({"grid": {"training.lr": [0.1, 0.2], "lr": [0.3]}}, "training.lr is given twice in grid"),
        ({**SEED, "base": {"lr": 0.1, "training": {"lr": 0.2}}}, "training.lr is given twice in base"),
        ({"list": [{"lr": 0.1, "training.lr": 0.2}]}, "training.lr is given twice in list"),
        ({**SEED, "exclude": [{"lr": 0.1, "training.lr": 0.2}]}, "training.lr is given twice in exclude"),
        ({**SEED, "exclude": [{"seed": 1}]}, "exclude: no combination has seed=1"),
        ({**SEED, "exclude": [{"seed": 0}]}, "exclude leaves no run"),
        ({**SEED, "base": {"algorithm": "fedsam(rho={rho})"}}, "rho has no value"),
        ({**SEED, "jobs": 0}, "jobs: input should be greater"),
        ({**SEED, "branch": "nowhere@3"}, "nowhere"),
    ],
)
def test_user_errors_are_one_line(values: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as error:
        plan_sweep(read_sweep(values), OUT)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("grid: {seed: [0]\n")
    with pytest.raises(UserError, match=r"mine\.yaml.*YAML"):
        read_sweep(file)
    file.write_text("grdi: {seed: [0]}\n")
    with pytest.raises(UserError, match=r"'grdi' in .*mine\.yaml; did you mean grid"):
        read_sweep(file)


def test_empty_sections_are_ignored() -> None:
    assert read_sweep({"base": None, "list": None, "grid": {"seed": [0]}}) == SweepFile(grid={"seed": [0]})
    assert combinations(SweepFile(grid={"seed": [0, 1]})) == [{"seed": 0}, {"seed": 1}]
