"""Partitions that a file lists, and that partitioners of Flower make."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.data import from_flower, listed, load, make_partition
from fedflat.errors import UserError

SETTINGS: dict[str, Any] = {
    "model": "mlp(hidden=8)",
    "rounds": 2,
    "clients_per_round": 3,
    "local_steps": 2,
    "workers": 1,
}
TARGETS = np.arange(40) % 4


def lists(text: str) -> dict[str, Any]:
    return json.loads(Path(text.partition("path=")[2].partition(",")[0]).read_text())


def test_a_listed_split_is_what_the_file_says(tmp_path: Path) -> None:
    text = listed([np.array([5, 1]), np.array([7, 2, 30])], 40, "mine", tmp_path)
    partition = make_partition(text, TARGETS, 4, None, seed=3)
    assert [positions.tolist() for positions in partition.clients] == [[1, 5], [2, 7, 30]] and partition.text == text
    assert partition.describe(TARGETS, 4)["coverage"] == pytest.approx(5 / 40)
    assert lists(text)["made_by"] == {"name": "mine"}


def test_validation_examples_and_unseen_clients_are_removed_from_the_listed_clients(tmp_path: Path) -> None:
    text = listed(np.split(np.random.default_rng(0).permutation(40), 4), 40, "mine", tmp_path)
    whole = make_partition(text, TARGETS, 4, 4, seed=0).clients
    validated = make_partition(text, TARGETS, 4, 4, seed=0, validation=0.25)
    assert len(validated.validation) == 8  # round(2.5) of each of 4 classes
    assert [set(mine) for mine in validated.clients] == [set(mine) - set(validated.validation) for mine in whole]
    unseen = make_partition(f"{text}+held-out(share=0.5)", TARGETS, 4, None, seed=0)
    assert len(unseen.clients) == len(unseen.unseen) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"examples": 41, "clients": [[0]]}, "41 training examples, but this dataset has 40"),
        ({"examples": 40, "clients": [[0], [1, 0]]}, "example 0 2 times"),
        ({"examples": 40, "clients": [[0], [40]]}, "example 40; .* 0 to 39"),
        ({"examples": 40, "clients": [[0], []]}, "a client without examples"),
        ({"clients": [[0]]}, "is not a partition file"),
        ({"examples": 40, "clients": [["a"]]}, "is not a partition file"),
        ({"examples": 40, "clients": [[1.7]]}, "expected JSON such as"),
        ({"examples": 40, "clients": [[10**30]]}, "is not a partition file"),
        ([], "is not a partition file"),
    ],
)
def test_files_that_do_not_match_the_data_are_rejected(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        make_partition(f"listed(path={path})", TARGETS, 4, None, 0)


def test_an_invalid_partition_is_not_written(tmp_path: Path) -> None:
    for lists, message in [([[0, 40]], "example 40; expected positions from 0 to 39"), ([[1], [1]], "2 times")]:
        with pytest.raises(UserError, match=f"the partition 'mine' .*{message}"):
            listed([np.array(positions) for positions in lists], 40, "mine", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_changed_or_unnamed_file_is_reported(tmp_path: Path) -> None:
    text = listed([np.arange(40)], 40, "mine", tmp_path)
    path = Path(text.partition("path=")[2].partition(",")[0])
    path.write_text(path.read_text().replace("[0, 1,", "[1, 0,"))
    with pytest.raises(UserError, match="has changed: its hash is sha256-"):
        make_partition(text, TARGETS, 4, None, 0)
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        make_partition(text, TARGETS, 4, None, 0)
    with pytest.raises(UserError, match="write listed"):
        make_partition("listed", TARGETS, 4, None, 0)
    with pytest.raises(UserError, match="lists 1 clients, not 5"):
        make_partition(listed([np.arange(40)], 40, "mine", tmp_path), TARGETS, 4, 5, 0)
    quoted = listed([np.arange(40)], 40, "mine", tmp_path / "a,b (1)")
    assert len(make_partition(quoted, TARGETS, 4, None, 0).clients) == 1
    with pytest.raises(UserError, match=r"client 1 of .* longtail"):
        make_partition(
            f"{listed([np.arange(4, 40), np.array([3])], 40, 'mine', tmp_path)}+longtail(factor=10)",
            TARGETS,
            4,
            None,
            0,
        )


@pytest.fixture
def partitioners() -> Any:
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    return pytest.importorskip("flwr_datasets.partitioner")


def test_a_partitioner_divides_as_it_does_in_flower(partitioners: Any, tmp_path: Path) -> None:
    """The same lists as its own partitions of a table with the same labels."""
    datasets = pytest.importorskip("datasets")

    def made() -> Any:
        return partitioners.DirichletPartitioner(
            num_partitions=8, partition_by="label", alpha=0.3, min_partition_size=5, seed=7
        )

    labels = load("digits").train.targets
    alone = made()
    alone.dataset = datasets.Dataset.from_dict({"label": labels.tolist(), "row": list(range(len(labels)))})
    found = lists(from_flower(made(), "digits", tmp_path))
    assert found["clients"] == [sorted(alone.load_partition(number)["row"]) for number in range(8)]
    assert found["made_by"]["name"] == "DirichletPartitioner" and found["made_by"]["seed"] == 7
    assert found["made_by"]["alpha"] == [0.3] * 8 or found["made_by"]["alpha"] == 0.3


def test_a_run_by_a_partitioner_can_be_repeated_without_it(
    partitioners: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "data"))
    shards = partitioners.ShardPartitioner(num_partitions=6, partition_by="label", num_shards_per_partition=2)
    first = fedflat.run("scaffold", partition=shards, out=tmp_path / "run", **SETTINGS)
    assert first.config.data.partition.startswith(f"listed(path={tmp_path}/data/partitions/ShardPartitioner-")
    assert first.record.folder.partition()["clients"] == 6
    again = fedflat.run(base=tmp_path / "run" / "config.yaml", out=tmp_path / "again")
    assert (
        again.history == first.history
        and again.record.folder.partition()["hash"] == first.record.folder.partition()["hash"]
    )
    assert torch.equal(again.record.models["server"].weights, first.record.models["server"].weights)


def test_natural_ids_are_the_groups_of_the_data(partitioners: Any, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pairs = [
        (generator.normal(size=(count, 3)).astype("float32"), generator.integers(2, size=count)) for count in (4, 6, 5)
    ]
    data = fedflat.data.from_clients(pairs)
    text = from_flower(partitioners.NaturalIdPartitioner(partition_by="group"), data, tmp_path)
    assert lists(text)["clients"] == [list(range(4)), list(range(4, 10)), list(range(10, 15))]


def test_mistakes_raise_a_clear_error(partitioners: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="columns: label"):
        from_flower(
            partitioners.DirichletPartitioner(num_partitions=4, partition_by="class", alpha=1.0), "digits", tmp_path
        )
    used = partitioners.IidPartitioner(4)
    from_flower(used, "digits", tmp_path)
    with pytest.raises(UserError, match="only once"):
        from_flower(used, "digits", tmp_path)
    with pytest.raises(UserError, match="VerticalEvenPartitioner cannot"):
        from_flower(partitioners.VerticalEvenPartitioner(num_partitions=2), "digits", tmp_path)
