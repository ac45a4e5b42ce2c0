"""Estimates of the time on a GPU, without data."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedflat.experiment.campaign.estimate import PlannedRun
from fedflat.papers import find_table, papers
from fedflat.papers.cost import dataset_facts, gpu_seconds, gpu_time, speeds
from fedflat.papers.plan import Deviations, make_plan


def test_sizes_follow_from_published_facts():
    femnist = dataset_facts("femnist")
    assert femnist and femnist.training + femnist.test == 805_263 and femnist.clients == 3550
    real_world = dataset_facts("office_home(test_domain=real_world)")
    assert real_world and (real_world.test, real_world.training, real_world.clients) == (4357, 11_231, 3)
    vit = dataset_facts("tiny_imagenet(size=224)")
    assert vit and (vit.training, vit.pixels) == (100_000, 224 * 224)
    assert dataset_facts("cityscapes(size=none)") is None  # images of the original size
    for user_data in ("arrays(path=a.npz)", "domains(path=a,test_domain=b)", "unknown"):
        assert dataset_facts(user_data) is None


def test_a_natural_client_has_its_share_of_the_examples():
    """500 rounds with three domains of together 13,161 images of 64 x 64 pixels, 5 epochs, and few evaluations."""
    config = find_table("fedwmsam/table2").cells["fedavg/art"].configs[0].changed(evaluation={"examples": 1})
    speed = speeds()["resnet18(stem=torchvision)"]
    assert gpu_seconds(config, 500) == pytest.approx(500 * 5 * 13_161 * 64**2 / speed, rel=1e-3)


def test_a_partition_may_determine_the_number_of_clients(tmp_path):
    config = find_table("fedswa/table2").cells["fedmoswa/cifar10-lenet-5-accuracy"].configs[0]
    one_client = config.changed(data={"clients": 1}, federation={"clients_per_round": 1})
    centralised = config.changed(data={"partition": "centralised", "clients": None})
    assert gpu_seconds(centralised, 1000) == gpu_seconds(one_client, 1000) is not None
    listed = config.changed(data={"partition": "listed(path=a.json)", "clients": None})
    assert gpu_time([PlannedRun(listed, tmp_path)]).unknown == ("number of clients",)


def test_only_models_without_a_measured_speed_are_not_estimated():
    unknown: set[str] = set()
    for paper in papers().values():
        for table in paper.tables.values():
            plan = make_plan(table, list(table.cells.values()), [0], Path("out"), Deviations(data_dir=Path("none")))
            unknown |= set(gpu_time([*plan.runs, *plan.skipped]).unknown)
    models = ("vgg11", "vgg11(hidden=256)", "char-lstm", "mobilenetv2", "bisenetv2")
    assert unknown == {f"speed of {model}" for model in models}


def test_a_narrow_model_takes_at_most_as_long_as_a_wider_one():
    table = find_table("fedwmsam/table1")
    plan = make_plan(table, table.choose(["fedavg/fashion-mnist-*"]), [0], Path("out"), Deviations())
    time = gpu_time(plan.runs)
    assert time.bounded == ("lenet5 at most as long as cnn",) and not time.unknown
    cnn = [gpu_seconds(run.config.changed(model="cnn"), run.rounds_left) for run in plan.runs]
    assert time.seconds == pytest.approx(sum(seconds or 0 for seconds in cnn))
