"""Any dataset on the Hugging Face Hub, through Flower Datasets (``flwr-datasets``).

It is downloaded once and stored as arrays in the data directory; later runs need no network.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedflat.data.batches import channel_statistics
from fedflat.data.dataset import Dataset
from fedflat.data.files.cache import cache_entry, fingerprint, open_cached
from fedflat.data.files.images import ImageOptions, to_pixels
from fedflat.data.files.mapped import open_mapped
from fedflat.data.sources.array_files import dataset_of_arrays
from fedflat.data.sources.source import DatasetSource
from fedflat.data.torch_dataset import collect_examples
from fedflat.errors import UserError
from fedflat.registry import require_package
from fedflat.text import param

GREY_MODES = ("1", "L", "I", "I;16", "I;16L", "I;16B")
"""Pillow modes of images without colour."""


@dataclass(frozen=True)
class HubOptions(ImageOptions):
    """Which dataset of the Hub, and which of its columns."""

    size: int = param(32, "height and width in pixels to which images are resized", low=1)
    path: str = param("", "name on the Hub, e.g. ylecun/mnist", positional=True)
    revision: str | None = param(None, "commit, tag or branch on the Hub; none means the newest commit")
    subset: str | None = param(None, "configuration, if the dataset has several")
    inputs: str | None = param(None, "column of inputs; none means the first column of images")
    target: str | None = param(None, "column of classes; none means the first column of class labels")
    group: str | None = param(None, "column of natural clients")
    train: str = param("train", "name of the training split")
    test: str | None = param(
        "test", "name of the test split; none, or no split 'test': every fifth example of each class is a test example"
    )


@dataclass(frozen=True)
class Hub(DatasetSource):
    """A dataset on the Hugging Face Hub, downloaded with Flower's ``flwr-datasets``, converted to arrays and cached."""

    options: HubOptions = field(default=HubOptions(), kw_only=True)

    def read(self, data_dir: Path) -> Dataset:
        """Download the dataset unless it is cached, and load its arrays; inputs are memory-mapped."""
        name = f"hub-{self.path.rpartition('/')[2]}"
        entry = cache_entry(data_dir, name, fingerprint([self.text]), self._write_arrays)
        arrays: dict[str, Any] = {}
        for file in sorted(entry.glob("*.npy")):
            is_large = file.stem.endswith("_inputs")
            arrays[file.stem] = open_cached(entry, file.stem) if is_large else np.load(file)
        arrays |= json.loads((entry / "about.json").read_text(encoding="utf-8"))
        return dataset_of_arrays(self.text, arrays, entry, data_dir)

    def is_local(self, data_dir: Path) -> bool:
        """Always False: whether the dataset is cached becomes clear only when it is read."""
        return False

    def _write_arrays(self, folder: Path) -> None:
        """Download the dataset and write its arrays, class names and statistics to ``folder``.

        Images become greyscale if all of them are, otherwise RGB.
        """
        revision = self._resolve_revision()
        splits = self._load_splits(revision)
        features = splits["train"].features
        inputs = self._choose_column(features, "inputs", "Image")
        target = self._choose_column(features, "target", "ClassLabel")
        labels = [target] if self.options.group is None else [target, self._choose_column(features, "group")]
        is_grey = all(getattr(row[inputs], "mode", None) in GREY_MODES for split in splits.values() for row in split)
        for name, split in splits.items():
            split_name = f"the {name} split of {self.path}"
            items = self._read_items(split, inputs, labels, split_name, "L" if is_grey else "RGB")
            # The inputs are written to the given file; only targets and groups (which may be absent) are left to save.
            _, *label_arrays = collect_examples(items, split_name, folder / f"{name}_inputs.npy")
            for column, values in zip(("targets", "groups"), label_arrays, strict=False):
                np.save(folder / f"{name}_{column}.npy", values)
        about = {"classes": getattr(features[target], "names", None), "mean": None, "std": None, "revision": revision}
        images = open_mapped(folder / "train_inputs.npy")
        # Without a test split, examples are split off when the dataset is read, and the statistics computed then.
        if "test" in splits and images.dtype == torch.uint8 and images.ndim == 4:
            about["mean"], about["std"] = channel_statistics(images)
        (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")

    def _resolve_revision(self) -> str | None:
        """Return the commit hash of the option ``revision``, or the option itself if the Hub cannot be queried."""
        try:
            api = importlib.import_module("huggingface_hub").HfApi()
            return str(api.dataset_info(self.path, revision=self.options.revision, timeout=10).sha)
        except Exception:  # a wrong name or a network failure is reported when the dataset is loaded
            return self.options.revision

    def _load_splits(self, revision: str | None) -> dict[str, Any]:
        """Load the splits ``train`` and, if it exists, ``test`` from the Hub.

        A test split that the user named must exist; the default name ``test`` may be absent.
        """
        os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
        dataset = require_package("flwr_datasets", self.text, extra="hub").FederatedDataset(
            dataset=self.path, subset=self.options.subset, partitioners={}, shuffle=False, revision=revision
        )
        try:
            splits = {"train": dataset.load_split(self.options.train)}
        except Exception as error:  # the Hub's client has many exception types
            reason = " ".join(str(error).split())
            raise UserError(f"cannot load {self.path} from the Hugging Face Hub ({reason}); check its name") from error
        if self.options.test is not None:
            try:
                splits["test"] = dataset.load_split(self.options.test)
            except ValueError as error:  # no such split
                if self.options.test != HubOptions.test:
                    raise UserError(
                        f"{self.path} has no split {self.options.test} ({' '.join(str(error).split())}); "
                        "name another, or use test=none to test on every fifth example of each class"
                    ) from error
        return splits

    def _choose_column(self, features: Any, option: str, default_type: str = "") -> str:
        """Return the column that an option names, by default the first column of a Hugging Face type."""
        chosen = getattr(self.options, option)
        for name, feature in features.items():
            if name == chosen or (not chosen and type(feature).__name__ == default_type):
                return str(name)
        problem = f"no column {chosen}" if chosen else "no suitable column"
        raise UserError(f"{self.path} has {problem} for {option}=; its columns are {', '.join(features)}")

    def _read_items(
        self, split: Any, inputs: str, labels: list[str], split_name: str, mode: Literal["L", "RGB"]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield (input, class) or (input, class, client) for each row; images are resized to uint8 arrays.

        Args:
            split: rows of the Hugging Face dataset, as dictionaries.
            inputs: column of inputs.
            labels: column of classes and, if there is one, that of natural clients.
            split_name: e.g. ``the train split of ylecun/mnist``, for messages.
            mode: ``L`` for greyscale images, else ``RGB``.
        """
        for position, row in enumerate(split):
            value = row[inputs]
            if hasattr(value, "getbands"):  # a Pillow image
                value = to_pixels(value, self.options, mode)
            elif isinstance(value, str):
                raise UserError(
                    f"item {position} of {split_name} is text; expected images or lists of numbers in column {inputs}; "
                    f"for texts use the dataset text(hub={self.path})"
                )
            yield value, *(row[column] for column in labels)


HUB = Hub("hub", "any dataset on the Hugging Face Hub", example="hub(path=ylecun/mnist)")
SOURCES = (HUB,)
