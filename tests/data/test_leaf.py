"""FEMNIST and Shakespeare from files in LEAF's format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedflat.data import MappedTensor, describe, load, make_partition, normalise, verify
from fedflat.data.sources.shakespeare import CHARACTERS
from fedflat.errors import UserError

Users = dict[str, tuple[list[Any], list[Any]]]


def write(folder: Path, name: str, part: str, users: Users, number: int = 0) -> Path:
    """A file as LEAF's preprocess.sh writes it."""
    path = folder / name / "data" / part / f"all_data_{number}_niid_0_keep_0_{part}_9.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(body))
    return path


def drawn(count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Images and labels of a writer."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 256, (count, 784)) / 255).tolist(), rng.integers(0, 62, count).tolist()


WRITERS: Users = {"f1000_45": drawn(3, 0), "f0001_41": drawn(2, 1), "f0500_10": drawn(4, 2)}


@pytest.fixture
def femnist(tmp_path: Path) -> Path:
    write(tmp_path, "femnist", "train", {name: WRITERS[name] for name in ("f1000_45", "f0001_41")}, 0)
    write(tmp_path, "femnist", "train", {"f0500_10": WRITERS["f0500_10"]}, 1)
    write(tmp_path, "femnist", "test", {"f0500_10": drawn(1, 3), "f0001_41": ([], []), "f2000_00": drawn(2, 4)})
    return tmp_path


def test_femnist_has_the_pixels_labels_and_writers_of_the_files(femnist: Path) -> None:
    dataset = load("femnist", femnist)
    assert (
        dataset.input_shape == (1, 28, 28)
        and dataset.num_classes == 62
        and dataset.classes[10] == "A"
        and dataset.classes[36] == "a"
    )
    assert dataset.group_names == ("f0001_41", "f0500_10", "f1000_45", "f2000_00")
    assert dataset.train.groups is not None and dataset.test.groups is not None
    assert dataset.train.groups.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2] and dataset.test.groups.tolist() == [1, 3, 3]
    for group, name in enumerate(("f0001_41", "f0500_10", "f1000_45")):
        mine = dataset.train.groups == group
        pixels, labels = WRITERS[name]
        assert dataset.train.targets[mine].tolist() == labels
        assert np.array_equal(dataset.train.inputs[mine].flatten(1).numpy(), np.rint(np.array(pixels) * 255))


def test_femnist_is_parsed_once_and_then_mapped(femnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("femnist", femnist)
    monkeypatch.setattr(
        json, "loads", lambda raw, loads=json.loads: loads(raw) if isinstance(raw, str) else pytest.fail("parsed again")
    )
    second = load("femnist", femnist)
    assert isinstance(second.train.inputs, MappedTensor) and second.content == first.content
    assert normalise(second.train.inputs, second.mean, second.std).mean().abs() < 1e-5, "its own mean"
    assert normalise(second.train.inputs, second.mean, second.std).std(correction=0).item() == pytest.approx(
        1, abs=1e-5
    )


def test_the_order_of_files_and_users_does_not_matter(femnist: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, "femnist", "train", dict(sorted(WRITERS.items())))
    write(other, "femnist", "test", {"f2000_00": drawn(2, 4), "f0500_10": drawn(1, 3)})
    first, second = load("femnist", femnist), load("femnist", other)
    assert first.content == second.content and first.group_names == second.group_names


def test_changed_files_are_read_again(femnist: Path) -> None:
    before = load("femnist", femnist)
    write(femnist, "femnist", "train", {"f0500_10": drawn(5, 9)}, 1)
    assert len(load("femnist", femnist).train) == len(before.train) + 1


def test_writers_are_natural_clients(femnist: Path) -> None:
    dataset = load("femnist", femnist)
    partition = make_partition("natural", dataset.train.targets, 62, None, 0, groups=dataset.train.groups)
    assert [len(client) for client in partition.clients] == [2, 4, 3]
    described = describe(dataset)
    assert (
        described["groups"] == 3
        and described["group_sizes"] == {"min": 2, "median": 3.0, "max": 4}
        and described["mapped"]
    )
    assert json.loads(json.dumps(described)) == described


def line(start: int) -> str:
    return "".join(CHARACTERS[(start + i) % 80] for i in range(80))


ROLES: Users = {"HAMLET": ([line(0), line(1)], [CHARACTERS[0], CHARACTERS[1]]), "BANQUO": ([line(7)], ["z"])}


@pytest.fixture
def shakespeare(tmp_path: Path) -> Path:
    write(tmp_path, "shakespeare", "train", ROLES)
    write(tmp_path, "shakespeare", "test", {"HAMLET": ([line(5)], ["!"])})
    return tmp_path


def test_shakespeare_targets_are_the_inputs_shifted_by_one(shakespeare: Path) -> None:
    dataset = load("shakespeare", shakespeare)
    assert dataset.kind == "text" and dataset.num_classes == 80 and dataset.input_shape == (80,)
    assert dataset.train.targets.shape == (3, 80) and dataset.train.inputs.dtype == torch.int64
    texts = ["".join(dataset.classes[i] for i in row) for row in dataset.train.inputs.tolist()]
    nexts = ["".join(dataset.classes[i] for i in row) for row in dataset.train.targets.tolist()]
    assert texts == [line(7), line(0), line(1)], "roles in alphabetical order"
    assert nexts == [texts[0][1:] + "z", texts[1][1:] + CHARACTERS[0], texts[2][1:] + CHARACTERS[1]]
    assert (
        dataset.group_names == ("BANQUO", "HAMLET")
        and dataset.test.groups is not None
        and dataset.test.groups.tolist() == [1]
    )
    assert dataset.train.inputs.data_ptr() + 8 == dataset.train.targets.data_ptr(), "two views of one file"


def test_shakespeare_with_only_the_last_target(shakespeare: Path) -> None:
    every, last = load("shakespeare", shakespeare), load("shakespeare(targets=last)", shakespeare)
    assert last.train.targets.shape == (3,) and torch.equal(last.train.targets, every.train.targets[:, -1])
    assert last.name == "shakespeare(targets=last)" and len(list((shakespeare / "decoded").iterdir())) == 1
    assert sum(describe(every)["train_class_counts"]) == 240 and sum(describe(last)["train_class_counts"]) == 3


def test_shakespeare_in_tokens_joins_the_sequences_of_a_role(shakespeare: Path) -> None:
    write(shakespeare, "shakespeare", "train", {"HAMLET": ([line(9)], ["?"])}, 1)  # a gap separates two texts
    data = load("shakespeare(tokeniser=bytes,length=100)", shakespeare)
    rows = [
        "".join("." if token == 256 else chr(token) for token in [inputs[0], *targets] if token >= 0)
        for examples in (data.train, data.test)
        for inputs, targets in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True)
    ]
    hamlet = line(0) + CHARACTERS[:2] + "." + line(9) + "?."
    assert rows == [hamlet[:101], line(7) + "z.", hamlet[100:], "!."]
    assert isinstance(data.train.targets, MappedTensor) and data.group_names == ("BANQUO", "HAMLET")
    with pytest.raises(UserError, match="targets=last predicts characters; remove it"):
        load("shakespeare(tokeniser=bytes,targets=last)", shakespeare)


def test_roles_are_natural_clients_and_examples_can_be_taken(shakespeare: Path) -> None:
    dataset = load("shakespeare", shakespeare)
    partition = make_partition("natural", dataset.train.targets, 80, None, 0, groups=dataset.train.groups)
    hamlet = dataset.train.take(partition.clients[1])
    assert hamlet.inputs.shape == hamlet.targets.shape == (2, 80)


def test_leaf_s_vocabulary() -> None:
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80


def test_every_file_has_a_hash(shakespeare: Path) -> None:
    reports = verify("shakespeare", shakespeare)
    assert len(reports) == 2 and all(report.as_published is None and len(report.sha256) == 64 for report in reports)


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        body = json.loads(path.read_text())
        change(body)
        path.write_text(json.dumps(body))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), r"all_data_0\S*\.json .*JSON .*preprocess\.sh"),
        (lambda path: path.write_bytes(b""), "JSON"),
        (lambda path: path.write_text("[]"), "LEAF.*users, num_samples and user_data"),
        (damaged(lambda body: body.pop("num_samples")), "LEAF's format"),
        (damaged(lambda body: body["num_samples"].pop()), "2 users but 1 .*num_samples"),
        (damaged(lambda body: body["user_data"].pop("f0001_41")), "user f0001_41 in .* has no lists x and y"),
        (
            damaged(lambda body: body["user_data"]["f0001_41"]["y"].pop()),
            "user f0001_41 in .* 2 inputs and 1 labels; expected 2",
        ),
        (
            damaged(lambda body: body["user_data"]["f0001_41"]["y"].__setitem__(0, 62)),
            "user f0001_41 in .*labels .*from 0 to 61",
        ),
        (
            damaged(lambda body: body["user_data"]["f0001_41"]["y"].__setitem__(0, -1)),
            "user f0001_41 in .*labels .*from 0 to 61",
        ),
        (damaged(lambda body: body["user_data"]["f0001_41"]["x"][0].pop()), "user f0001_41 in .*"),
        (damaged(lambda body: body["user_data"]["f0001_41"]["x"][0].__setitem__(5, 200)), "pixels from 0 to 1"),
        (
            damaged(
                lambda body: (
                    body["num_samples"].__setitem__(1, 0),
                    body["user_data"].update({"f0001_41": {"x": [], "y": []}}),
                )
            ),
            "user f0001_41 in .* no examples; .* -k ",
        ),
    ],
)
def test_damaged_files_raise_a_clear_error_and_leave_no_cache_entry(
    femnist: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(next((femnist / "femnist/data/train").glob("all_data_0*")))
    with pytest.raises(UserError, match=message) as raised:
        load("femnist", femnist)
    assert "\n" not in str(raised.value) and list((femnist / "decoded").iterdir()) == []


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([line(0)[:-1]], ["a"], "80 characters"),
        ([line(0)], ["ab"], "80 characters"),
        ([line(0).replace("a", "ä")], ["a"], "'ä' .*80 characters"),
    ],
)
def test_text_outside_the_alphabet_is_rejected(shakespeare: Path, x: list[str], y: list[str], message: str) -> None:
    write(shakespeare, "shakespeare", "train", {"GHOST": (x, y)}, 1)
    with pytest.raises(UserError, match=f"user GHOST in .*{message}"):
        load("shakespeare", shakespeare)


def test_the_error_for_missing_files_says_how_to_generate_them(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load("femnist", tmp_path)
    for part in (
        "femnist/data/train",
        "femnist/data/test",
        str(tmp_path),
        "https://github.com/TalwalkarLab/leaf",
        "./preprocess.sh",
    ):
        assert part in str(raised.value)
    (tmp_path / "femnist/data/train").mkdir(parents=True)
    with pytest.raises(UserError, match=r"femnist .*femnist/data/train"):
        load("femnist", tmp_path)
