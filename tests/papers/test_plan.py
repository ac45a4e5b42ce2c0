"""The runs that cells need, their folders and cost, and the stand-ins at small scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedflat.experiment.campaign.compare import run_each
from fedflat.experiment.campaign.estimate import is_available, remaining_work
from fedflat.papers import find_table, papers
from fedflat.papers.outcome import MeasuredRun, outcomes
from fedflat.papers.plan import Deviations, ReproductionPlan, make_plan
from fedflat.papers.post_hoc import measure
from fedflat.papers.small import small

SMALL = Deviations(small=True)
TABLES = [
    table.full_name for paper in papers().values() for table in paper.tables.values() if table.name.startswith("table")
]


@pytest.fixture(scope="module")
def without_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without any dataset."""
    return tmp_path_factory.mktemp("data")


def plan(table: str, cells: list[str], out: Path, seeds: int = 1, deviations: Deviations = SMALL) -> ReproductionPlan:
    found = find_table(table)
    return make_plan(found, found.choose(cells), range(seeds), out, deviations)


def test_cells_with_the_same_experiment_share_its_run(tmp_path):
    made = plan("fedswa/table3", ["fedavg/cifar100-dirichlet-0.1-*"], tmp_path, seeds=2, deviations=Deviations())
    assert [run.config.seed for run in made.runs] == [0, 1]
    assert len(made.runs[0].cells) == 2


def test_folders_do_not_depend_on_the_chosen_cells(tmp_path):
    by_rounds = plan("fedswa/table3", ["fedavg/cifar100-dirichlet-0.1-rounds"], tmp_path, deviations=Deviations())
    by_accuracy = plan("fedswa/table3", ["fedavg/cifar100-dirichlet-0.1-accuracy"], tmp_path, deviations=Deviations())
    assert by_rounds.runs[0].folder == by_accuracy.runs[0].folder
    assert by_rounds.runs[0].folder == tmp_path / "table3" / "fedavg" / "cifar100-dirichlet-0.1-accuracy" / "seed-0"


def test_tables_of_a_paper_share_their_runs(tmp_path):
    cells = {
        "table3": "fedmoswa/cifar100-dirichlet-0.6-accuracy",
        "table4": "fedmoswa/rho-0.1",
        "table6": "fedmoswa-i-ii/accuracy",
    }
    folders = {
        plan(f"fedswa/{table}", [cell], tmp_path, deviations=Deviations()).runs[0].folder
        for table, cell in cells.items()
    }
    assert folders == {tmp_path / "table2" / "fedmoswa" / "cifar100-resnet-18-accuracy" / "seed-0"}


def test_alternative_methods_have_separate_folders(tmp_path):
    made = plan("fedwmsam/table1", ["fedlesam-s-d/cifar-10-beta-0.1"], tmp_path, deviations=Deviations())
    assert [run.folder.parent.name for run in made.runs] == ["fedlesam", "fedlesam-s", "fedlesam-d"]


def test_a_gain_plans_both_compared_cells(tmp_path):
    made = plan("fedswa/table6", ["fedmo-ii/improvement"], tmp_path, deviations=Deviations())
    assert [run.config.algorithm for run in made.runs] == ["fedmo", "fedavg"]


def test_cells_without_their_dataset_are_not_run(tmp_path):
    made = plan("eccv/figure6", ["*/cifar10-c"], tmp_path, deviations=Deviations(data_dir=tmp_path))
    assert not made.runs
    assert len(made.not_runnable) == len(made.cells) == 6
    assert all("fedflat data get cifar10_c" in reason for reason in made.not_runnable.values())


@pytest.mark.parametrize("table", TABLES)
def test_every_table_runs_at_small_scale(table, tmp_path, without_data):
    """Run one representative cell of each table with the real engine on embedded data."""
    made = plan(
        table,
        [find_table(table).file.representative],
        tmp_path,
        deviations=Deviations(small=True, data_dir=without_data, rounds=2),
    )
    assert not made.not_runnable
    records = list(run_each([run.config for run in made.runs], [run.folder for run in made.runs], jobs=1))
    assert all(record.status == "finished" and len(record.history) == 3 for record in records)
    pairs = list(zip(made.runs, records, strict=True))
    (found,) = outcomes(
        made, {run.folder: MeasuredRun.of(record, measure(record, run.queries, small=True)) for run, record in pairs}
    )
    assert found.verdict == "ran"
    assert any(text.startswith(("digits for ", "digit_masks")) for text in found.stand_ins)
    assert found.values or found.unreached_in == 2
    assert found.seconds > 0


def test_small_scale_keeps_the_structure_of_a_table(tmp_path):
    config = find_table("eccv/table3").cells["cutout-fedsam/e-1-10-clients-w-swa"].configs[0]
    made, instead = small(config, tmp_path)
    assert made.algorithm == config.algorithm
    assert made.data.augmentation == "crop-flip(padding=1)+cutout(size=2)"
    assert made.training.momentum == config.training.momentum
    assert instead == (
        "mlp(hidden=32) for resnet18",
        "digits for cifar100",
        "dirichlet(alpha=0.1) for pachinko",
        "crop-flip(padding=1)+cutout(size=2) for crop-flip+cutout(size=8)",
    )


def test_small_scale_keeps_full_participation(tmp_path):
    made, _ = small(find_table("fedswa/table5").cells["fedavg/accuracy"].configs[0], tmp_path)
    assert made.federation.clients_per_round == made.data.clients == 10
    some, _ = small(find_table("fedswa/table6").cells["fedavg/accuracy"].configs[0], tmp_path)
    assert some.federation.clients_per_round < some.data.clients
    alone, _ = small(find_table("eccv/table5").cells["sam/accuracy-centr"].configs[0], tmp_path)
    assert (alone.data.clients, alone.federation.clients_per_round, alone.data.partition) == (1, 1, "centralised")


def test_available_datasets_are_used(tmp_path):
    """Empty files suffice, because only their existence is checked."""
    config = find_table("fedswa/table2").cells["fedavg/cifar10-resnet-18-accuracy"].configs[0]
    assert not is_available("cifar10", tmp_path)
    from fedflat.data import DATASETS

    for file in DATASETS["cifar10"].files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    made, instead = small(config, tmp_path)
    assert (made.data.dataset, made.data.clients, made.model) == ("cifar10", 100, "resnet20")
    assert instead == ("resnet20 for resnet18",)


def test_finished_runs_cost_nothing(tmp_path):
    cells = ["fedavg/accuracy", "fedswa-i/accuracy"]
    made = plan("fedswa/table6", cells, tmp_path, deviations=Deviations(small=True, rounds=2))
    before = remaining_work(made.runs)
    assert (before.runs, before.done, before.rounds) == (2, 0, 4)
    assert before.seconds and before.seconds > 0
    list(run_each([made.runs[0].config], [made.runs[0].folder], jobs=1))
    after = remaining_work(made.runs, probing=False)
    assert (after.done, after.rounds, after.seconds) == (1, 2, None)


def test_missing_data_cannot_be_probed(tmp_path):
    made = plan("fedswa/table6", ["fedavg/accuracy"], tmp_path, deviations=Deviations(data_dir=tmp_path))
    work = remaining_work(made.runs)
    assert (work.rounds, work.seconds) == (1000, None) and "cifar100" in work.reason
