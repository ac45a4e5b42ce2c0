"""Reading datasets from their published formats, and rejecting anything else."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedflat.data import canonical_dataset, data_dir, load, names, registry, verify
from fedflat.data.sources.idx import FILES
from fedflat.errors import UserError

BATCH = "cifar-10-batches-py/data_batch_3"
IMAGES = f"MNIST/raw/{FILES[0]}"


def content_hash(pixels: np.ndarray, *labels: list[int]) -> str:
    """The hash of the binary layout, image by image, as slowly as it is defined."""
    rows = (bytes(label[i] for label in labels) + pixels[i].tobytes() for i in range(len(pixels)))
    return hashlib.sha256(b"".join(rows)).hexdigest()


@pytest.mark.filterwarnings("error")
def test_cifar10_as_python_2_wrote_it(small_cifar10: SimpleNamespace) -> None:
    dataset = small_cifar10.source.read(small_cifar10.folder)
    written = list(small_cifar10.written.values())
    assert dataset.input_shape == (3, 32, 32) and dataset.train.inputs.dtype == torch.uint8
    assert np.array_equal(
        dataset.train.inputs.numpy().reshape(-1, 3072), np.concatenate([pixels for pixels, _ in written[:5]])
    )
    assert dataset.train.targets.tolist() == [label for _, labels in written[:5] for label in labels]
    assert dataset.test.targets.tolist() == written[5][1] and dataset.train.coarse is None


def test_cifar10_as_python_3_would_write_it(small_cifar10: SimpleNamespace) -> None:
    before = small_cifar10.source.read(small_cifar10.folder).content
    for file, (pixels, labels) in small_cifar10.written.items():
        (small_cifar10.folder / file).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2))
    assert small_cifar10.source.read(small_cifar10.folder).content == before


def test_cifar100_has_fine_and_coarse_labels_and_its_own_names(small_cifar100: SimpleNamespace) -> None:
    dataset = small_cifar100.source.read(small_cifar100.folder)
    _, fine, coarse = small_cifar100.written["train"]
    assert dataset.train.targets.tolist() == fine
    assert dataset.train.coarse is not None and dataset.train.coarse.tolist() == coarse
    assert dataset.classes[99] == "fine99" and dataset.num_classes == 100


def test_cifar100_is_refused_when_it_is_too_small(small_cifar100: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"5 images; expected 50000; .*fedflat data get cifar100"):
        load("cifar100", small_cifar100.folder, download=False)


def test_mnist_gzipped_and_not(small_mnist: SimpleNamespace) -> None:
    dataset = small_mnist.source.read(small_mnist.folder)
    assert np.array_equal(dataset.train.inputs.numpy()[:, 0], small_mnist.written[FILES[0]])
    assert dataset.test.targets.tolist() == small_mnist.written[FILES[3]].tolist()
    for file in FILES:
        packed = small_mnist.folder / "MNIST/raw" / file
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    assert small_mnist.source.read(small_mnist.folder).content == dataset.content


def test_hashes_are_of_the_content_in_the_binary_layout(
    small_cifar10: SimpleNamespace, small_cifar100: SimpleNamespace
) -> None:
    digests = {file: content_hash(pixels, labels) for file, (pixels, labels) in small_cifar10.written.items()}
    exact = dataclasses.replace(small_cifar10.source, digests=digests)
    assert exact.read(small_cifar10.folder).num_classes == 10
    assert [report.sha256 for report in exact.verify(small_cifar10.folder)] == list(digests.values())
    pixels, fine, coarse = small_cifar100.written["train"]
    assert small_cifar100.source.verify(small_cifar100.folder)[0].sha256 == content_hash(pixels, coarse, fine)


def test_verify_reports_known_hashes(small_cifar100: SimpleNamespace) -> None:
    assert [report.as_published for report in small_cifar100.source.verify(small_cifar100.folder)] == [None, None, None]
    md5s = {
        file: hashlib.md5((small_cifar100.folder / file).read_bytes()).hexdigest()
        for file in small_cifar100.source.files
    }
    known = dataclasses.replace(small_cifar100.source, file_md5s=md5s)
    assert [report.as_published for report in known.verify(small_cifar100.folder)] == [True, True, True]
    assert verify("digits") == ()


def test_one_changed_pixel_is_rejected(
    small_cifar10: SimpleNamespace, pickled: Callable[[dict[str, object]], bytes]
) -> None:
    digests = {file: content_hash(pixels, labels) for file, (pixels, labels) in small_cifar10.written.items()}
    exact = dataclasses.replace(small_cifar10.source, digests=digests)
    pixels, labels = small_cifar10.written[BATCH]
    pixels[3, 3000] ^= 1
    (small_cifar10.folder / BATCH).write_bytes(pickled({"labels": labels, "data": pixels}))
    with pytest.raises(UserError) as raised:
        exact.read(small_cifar10.folder)
    assert (
        "data_batch_3" in str(raised.value)
        and digests[BATCH] in str(raised.value)
        and "fedflat data get cifar10" in str(raised.value)
    )
    with pytest.raises(UserError, match=r"data_batch_3 .*sha256"):
        exact.verify(small_cifar10.folder)


def test_the_full_datasets_reject_small_files(small_mnist: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="sha256"):
        load("mnist", small_mnist.folder, download=False)


class Marker:
    """Pickles into a call of os.mkdir."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_forged_pickle_is_rejected_and_not_run(small_cifar10: SimpleNamespace, tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "was-run"
    (small_cifar10.folder / BATCH).write_bytes(pickle.dumps({b"data": Marker(marker)}, protocol=protocol))
    with pytest.raises(UserError, match=r"data_batch_3 .*(posix|nt)\.mkdir"):
        small_cifar10.source.read(small_cifar10.folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins\neval",
        "numpy\nload",
        "numpy.core.multiarray\nfromfile",
        "os\nsystem",
        "codecs\nopen",
        "numpy\ndtype.mro",
    ],
)
def test_only_the_names_that_cifar_needs_are_unpickled(small_cifar10: SimpleNamespace, name: str) -> None:
    (small_cifar10.folder / BATCH).write_bytes(b"\x80\x02c" + name.encode() + b"\n.")
    with pytest.raises(UserError, match=r"data_batch_3 .*" + name.replace("\n", r"\.")):
        small_cifar10.source.read(small_cifar10.folder)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -1])
def test_a_truncated_cifar_file_is_rejected(small_cifar10: SimpleNamespace, keep: int) -> None:
    path = small_cifar10.folder / BATCH
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"data_batch_3 is not a complete pickle .*fedflat data get cifar10"):
        small_cifar10.source.read(small_cifar10.folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": [0]}, "has no images of 3072 bytes"),
        ({"labels": [0], "data": np.zeros((1, 3071), np.uint8)}, "has no images of 3072 bytes"),
        ({"labels": [0, 1], "data": np.zeros((1, 3072), np.uint8)}, "label from 0 to 255 for each of its 1 images"),
        ({"labels": [300], "data": np.zeros((1, 3072), np.uint8)}, "label from 0 to 255"),
        ({"labels": [12], "data": np.zeros((1, 3072), np.uint8)}, "label 12;.* 0 to 9"),
    ],
)
def test_a_cifar_file_in_another_format_is_rejected(
    small_cifar10: SimpleNamespace,
    pickled: Callable[[dict[str, object]], bytes],
    fields: dict[str, object],
    message: str,
) -> None:
    (small_cifar10.folder / BATCH).write_bytes(pickled(fields))
    with pytest.raises(UserError, match=message):
        small_cifar10.source.read(small_cifar10.folder)


def test_a_pickle_of_another_type_is_rejected(small_cifar10: SimpleNamespace) -> None:
    (small_cifar10.folder / BATCH).write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(UserError, match="list; expected a dictionary"):
        small_cifar10.source.read(small_cifar10.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: gzip.compress(raw)[:-20], "is not a complete gzip file"),
        (lambda raw: raw, "is not a complete gzip file"),
        (lambda raw: gzip.compress(raw[:-1]), "contains 4703 values.*6 x 28 x 28"),
        (lambda raw: gzip.compress(raw + b"x"), "contains 4705 values"),
        (lambda raw: gzip.compress(b"\0\0\x09\x03" + raw[4:]), "is not an idx file"),
        (lambda raw: gzip.compress(raw[:9]), "is not an idx file"),
    ],
)
def test_a_damaged_idx_file_is_rejected(
    small_mnist: SimpleNamespace, change: Callable[[bytes], bytes], message: str
) -> None:
    path = small_mnist.folder / IMAGES
    path.write_bytes(change(gzip.decompress(path.read_bytes())))
    with pytest.raises(UserError, match=f"train-images-idx3-ubyte.gz {message}.*fedflat data get mnist"):
        small_mnist.source.read(small_mnist.folder)


def test_missing_files_are_named_with_folder_and_url(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load("cifar10", tmp_path, download=False)
    message = str(raised.value)
    for part in (
        "data_batch_1",
        "test_batch",
        str(tmp_path),
        "https://www.cs.toronto.edu/~kriz/",
        "fedflat data get cifar10",
    ):
        assert part in message


def test_digits_equal_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    from fedflat.data.sources import digits

    levels, labels = digits._published_digits()
    expected, classes = load_digits(return_X_y=True)
    assert np.array_equal(levels, expected) and np.array_equal(labels, classes)


def test_digits_are_deterministic() -> None:
    first, second = load("digits"), load("digits")
    assert first.content == second.content
    assert len(first.train) + len(first.test) == 1797 and 0.19 < len(first.test) / 1797 < 0.21
    shares = torch.bincount(first.test.targets) / (
        torch.bincount(first.test.targets) + torch.bincount(first.train.targets)
    )
    assert shares.min() > 0.18 and shares.max() < 0.22
    assert first.train.inputs.max() == 255 and len(first.train.inputs.unique()) == 17
    assert first.input_shape == (1, 8, 8)


def test_digits_scale_exactly() -> None:
    from sklearn.datasets import load_digits

    levels = load_digits().images
    every_fifth_zero = np.flatnonzero(load_digits().target == 0)[4::5]
    expected = np.round(levels[every_fifth_zero] * 255 / 16)
    dataset = load("digits")
    assert np.array_equal(dataset.test.inputs[dataset.test.targets == 0][:, 0].numpy(), expected)


def test_names_and_unknown_names() -> None:
    small, large = (
        {"digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "cifar10_c", "cifar100_c"},
        {"tiny_imagenet", "landmarks"},
    )
    grouped, masked = {"femnist", "shakespeare", "office_home", "pacs"}, {"camvid", "cityscapes", "idda", "digit_masks"}
    assert set(names()) == small | large | grouped | masked
    with pytest.raises(UserError, match=r"'cifar'.*cifar10"):
        load("cifar")


@pytest.mark.parametrize(
    ("text", "name"),
    [("CIFAR-10", "cifar10"), ("cifar_10", "cifar10"), ("Fashion-MNIST", "fashion_mnist"), ("CIFAR-10-C", "cifar10_c")],
)
def test_spelling_of_names_is_free(text: str, name: str) -> None:
    assert canonical_dataset(text) == name


def test_registered_names_are_unique() -> None:
    with pytest.raises(UserError, match="'cifar10' is already registered"):
        registry.DATASETS.register("CIFAR_10", registry.DATASETS["mnist"])


def test_location_of_the_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "set"))
    assert data_dir(tmp_path) == tmp_path
    assert data_dir() == tmp_path / "set"
    monkeypatch.delenv("FEDFLAT_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_dir() == tmp_path / "fedflat" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir() == tmp_path / ".cache" / "fedflat" / "data"


def test_users_without_a_home_directory_can_read_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown_home)
    for variable in ("FEDFLAT_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert load("digits").name == "digits"
    assert data_dir("~ann/data") == Path("~ann/data")
