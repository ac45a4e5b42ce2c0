"""FEMNIST, Shakespeare, PACS and CIFAR-10 themselves, where ``FEDFLAT_DATA`` has them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fedflat.data import DATASETS, IGNORED, MappedTensor, data_dir, load, make_partition
from fedflat.data.batches import channel_statistics


def here(name: str) -> None:
    if "FEDFLAT_DATA" not in os.environ or DATASETS[name].missing(data_dir()):
        pytest.skip(f"{name} is not in FEDFLAT_DATA")


def test_femnist_by_writer() -> None:
    here("femnist")
    dataset = load("femnist")
    assert (
        dataset.num_classes == 62
        and dataset.input_shape == (1, 28, 28)
        and isinstance(dataset.train.inputs, MappedTensor)
    )
    partition = make_partition("natural", dataset.train.targets, 62, None, 0, groups=dataset.train.groups)
    writers = [np.unique(np.asarray(dataset.train.groups)[indices]) for indices in partition.clients]
    assert all(len(writer) == 1 for writer in writers) and len(partition.clients) >= 100
    assert dataset.mean[0] == pytest.approx(0.96, abs=0.02), "dark on white"
    assert (dataset.mean, dataset.std) == channel_statistics(dataset.train.inputs)


def test_shakespeare_by_role() -> None:
    here("shakespeare")
    dataset = load("shakespeare")
    assert torch.equal(dataset.train.inputs[:, 1:], dataset.train.targets[:, :-1])
    spoken = "".join(dataset.classes[i] for i in dataset.train.inputs[0].tolist())
    assert len(spoken.split()) > 8, "English"
    partition = make_partition("natural", dataset.train.targets, 80, None, 0, groups=dataset.train.groups)
    assert len(partition.clients) == len(np.unique(dataset.train.groups)) and sum(map(len, partition.clients)) == len(
        dataset.train
    )


@pytest.mark.parametrize("domain", [None, "sketch", "photo"])
def test_pacs(domain: str | None) -> None:
    here("pacs")
    dataset = load("pacs" if domain is None else f"pacs(test_domain={domain})")
    assert (
        len(dataset.train) + len(dataset.test) == 9991
        and dataset.classes[0] == "dog"
        and dataset.input_shape == (3, 64, 64)
    )
    if domain is not None:
        assert len(dataset.test) == {"sketch": 3929, "photo": 1670}[domain]
    assert (dataset.mean, dataset.std) == channel_statistics(dataset.train.inputs)


def test_cifar10_is_loaded_and_split_by_reading_its_files_at_most_twice() -> None:
    here("cifar10")
    files = [data_dir() / file for file in DATASETS["cifar10"].files]
    load("cifar10")
    before, start = bytes_read(), time.process_time()
    dataset = load("cifar10", download=False)
    make_partition("dirichlet(alpha=0.1)", dataset.train.targets, 10, 100, 0)
    assert bytes_read() - before <= 2 * sum(file.stat().st_size for file in files)
    assert time.process_time() - start < 10, "a few seconds"


def bytes_read() -> int:
    """How many bytes this process has read from files so far."""
    account = Path("/proc/self/io")
    if not account.is_file():
        pytest.skip("this system does not count what is read")
    return int(account.read_text().split()[1])


def test_camvid() -> None:
    here("camvid")
    dataset = load("camvid")
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (
        367,
        233,
        11,
    ) and dataset.kind == "segmentation"
    counts = [int((dataset.train.targets == label).sum()) for label in range(11)]
    assert dataset.classes[int(np.argmax(counts))] == "road" and min(counts) > 0
    share = float((dataset.train.targets == IGNORED).float().mean())
    assert 0 < share < 0.1, "few pixels do not count"
