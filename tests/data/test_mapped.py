"""Arrays in files: written without a known length, memory-mapped, and pickled by path."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing  # registers how tensors are sent to other processes

from fedflat.data import Dataset, Examples, MappedTensor, describe, from_arrays, open_mapped
from fedflat.data.files.mapped import ArrayWriter
from fedflat.errors import UserError

ROWS = np.arange(60, dtype=np.uint8).reshape(5, 3, 2, 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", ROWS)
    return tmp_path / "rows.npy"


def sent(value: object) -> bytes:
    """What goes through a pipe to a worker."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def test_a_mapped_tensor_is_a_tensor_whose_results_are_plain(file: Path) -> None:
    mapped = open_mapped(file)
    assert isinstance(mapped, torch.Tensor) and np.array_equal(mapped.numpy(), ROWS)
    for result in (
        mapped[[0, 2]],
        mapped[1:],
        mapped.float(),
        mapped + 1,
        mapped.permute(0, 2, 3, 1),
        torch.stack([mapped, mapped]),
    ):
        assert type(result) is torch.Tensor
    assert mapped.to("cpu") is mapped and mapped.cpu() is mapped and torch.as_tensor(mapped) is mapped
    assert copy.deepcopy(mapped) is mapped


@pytest.mark.parametrize(
    "view",
    [
        lambda m: m,
        lambda m: m.part(1, 3),
        lambda m: m.part(1, 1, dim=2),
        lambda m: m.part(2, 2).part(1, 1),
        lambda m: m.channels_first(),
        lambda m: m.channels_first().part(3, 2),
    ],
)
def test_every_view_is_pickled_by_file_name(file: Path, view: object) -> None:
    mapped = view(open_mapped(file))  # type: ignore[operator]
    for message in (
        pickle.dumps(mapped),
        sent(mapped),
        sent(Examples(mapped, torch.zeros(len(mapped), dtype=torch.int64))),
    ):
        back = pickle.loads(message)
        back = back.inputs if isinstance(back, Examples) else back
        assert isinstance(back, MappedTensor) and torch.equal(back, mapped) and back.stride() == mapped.stride()
        assert b"rows.npy" in message


def test_a_message_does_not_grow_with_the_data(tmp_path: Path) -> None:
    np.save(tmp_path / "large.npy", np.zeros((1000, 1000)))
    assert len(sent(open_mapped(tmp_path / "large.npy"))) < 1000


def test_sharing_leaves_a_map_in_its_file(file: Path) -> None:
    examples = Examples(open_mapped(file), torch.zeros(5, dtype=torch.int64))
    before = examples.inputs.data_ptr()
    examples.share()
    assert (
        examples.inputs.data_ptr() == before
        and examples.targets.is_shared()
        and isinstance(examples.inputs, MappedTensor)
    )


def test_taking_from_a_map_and_datasets_of_maps(file: Path) -> None:
    mapped = open_mapped(file)
    examples = Examples(mapped, torch.arange(5) % 2)
    assert torch.equal(examples.take(np.array([4, 0])).inputs, torch.from_numpy(ROWS[[4, 0]]))
    dataset = Dataset(
        "maps", examples, Examples(mapped.part(0, 2), torch.tensor([0, 1])), ("a", "b"), (0.5,) * 3, (0.5,) * 3
    )
    in_memory = from_arrays(ROWS, [0, 1, 0, 1, 0], ROWS[:2], [0, 1])
    assert dataset.content == in_memory.content, "where the data lie plays no role"
    assert describe(dataset)["mapped"] and not describe(in_memory)["mapped"]


def test_arrays_that_numpy_mapped_stay_mapped(file: Path) -> None:
    whole = np.load(file, mmap_mode="r")
    dataset = from_arrays(whole, [0, 1, 0, 1, 0], open_mapped(file).part(0, 2), [0, 1])
    assert isinstance(dataset.train.inputs, MappedTensor) and isinstance(dataset.test.inputs, MappedTensor)
    assert torch.equal(pickle.loads(pickle.dumps(dataset)).train.inputs, torch.from_numpy(ROWS))
    grey = np.load(file, mmap_mode="r")
    np.save(file.with_name("grey.npy"), grey[:, 0])
    shaped = from_arrays(np.load(file.with_name("grey.npy"), mmap_mode="r"), [0, 1, 0, 1, 0], ROWS[:2, 0], [0, 1])
    assert isinstance(shaped.train.inputs, MappedTensor) and shaped.input_shape == (1, 2, 2)


@pytest.mark.filterwarnings("error")
def test_changes_in_a_copy_on_write_map_are_kept(file: Path) -> None:
    private = np.load(file, mmap_mode="c")
    private[0] = 7
    dataset = from_arrays(private, np.zeros(5, int), private, np.zeros(5, int))
    assert not isinstance(dataset.train.inputs, MappedTensor) and (dataset.train.inputs[0] == 7).all()


def test_opening_raises_no_warning(file: Path) -> None:
    open_mapped(file)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1], lambda raw: raw[:20], lambda raw: b"", lambda raw: b"x" + raw]
)
def test_a_damaged_file_is_rejected(file: Path, damage: object) -> None:
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match=r"rows\.npy "):
        open_mapped(file)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"objects\.npy .*\.npy file of numbers"):
        open_mapped(tmp_path / "objects.npy")


@pytest.mark.parametrize("counts", [[], [1], [3, 0, 12345], [100_000]])
def test_numpy_reads_the_files_of_array_writer(tmp_path: Path, counts: list[int]) -> None:
    blocks = [np.random.default_rng(count).integers(-9, 9, (count, 2)) for count in counts]
    with ArrayWriter(tmp_path / "a.npy", (2,), np.int16) as writer:
        for block in blocks:
            writer.append(block)
    read = np.load(tmp_path / "a.npy")
    assert read.dtype == np.int16 and np.array_equal(read, np.concatenate([np.zeros((0, 2)), *blocks]))


LARGER_THAN_MEMORY = """
    import json, resource, sys
    from pathlib import Path
    import torch
    import fedflat
    from fedflat.data import Dataset, Examples, open_mapped

    gigabyte = 1 << 30
    resource.setrlimit(resource.RLIMIT_DATA, (gigabyte, gigabyte))
    mapped = open_mapped(Path(sys.argv[1]))
    labels = torch.arange(len(mapped)) % 10
    train, test = Examples(mapped, labels), Examples(mapped.part(0, 100), labels[:100])
    data = Dataset("large", train, test, tuple("0123456789"), (0.5,) * 3, (0.5,) * 3)
    result = fedflat.run(
        "fedavg", dataset=data, model="lenet5", clients=100, clients_per_round=4, rounds=1, local_steps=3,
        batch_size=50, partition="iid", augmentation="crop-flip", workers=1
    )
    own = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
    try:
        torch.zeros(gigabyte, dtype=torch.uint8)
        limited = False
    except RuntimeError:
        limited = True
    print(json.dumps({"own": own, "mapped": mapped.nbytes, "limited": limited, "rounds": len(result.history)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and measures memory as Linux does")
def test_a_dataset_larger_than_memory_trains_through_the_map(tmp_path: Path) -> None:
    """2 GB of images (a sparse file) under a memory limit of 1 GB."""
    count = (2 << 30) // (3 * 64 * 64)
    with (tmp_path / "large.npy").open("wb") as stream:
        np.lib.format.write_array_header_1_0(
            stream, {"descr": "|u1", "fortran_order": False, "shape": (count, 3, 64, 64)}
        )
        stream.truncate(stream.tell() + count * 3 * 64 * 64)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LARGER_THAN_MEMORY))
    done = subprocess.run(
        [sys.executable, script, tmp_path / "large.npy"], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["mapped"] > 2.1e9 and measured["limited"], "the data are larger than the limit, and the limit holds"
    assert measured["own"] < 500e6, "private memory is that of a small dataset"
    assert measured["rounds"] == 2, "before and after"
