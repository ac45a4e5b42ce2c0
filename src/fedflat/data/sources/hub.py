"""Any dataset of the Hugging Face hub, through Flower's ``flwr-datasets``.

The first time it is fetched and kept as arrays in the data folder; from then on nothing is asked of any server.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedflat.data.arrays import channel_statistics
from fedflat.data.cache import entry, fingerprint, open_kept
from fedflat.data.dataset import Dataset
from fedflat.data.images import PictureOptions, to_pixels
from fedflat.data.mapped import open_mapped
from fedflat.data.sources.array_files import dataset_of_arrays
from fedflat.data.sources.source import Source
from fedflat.data.torch_dataset import collected
from fedflat.errors import UserError
from fedflat.text import changed, param, show

GREY = ("1", "L", "I", "I;16", "I;16L", "I;16B")
"""The modes of pictures without colours."""
INSTALL = "pip install 'fedflat[hub]'"


@dataclass(frozen=True)
class HubOptions(PictureOptions):
    """Which dataset, and which of its columns."""

    size: int = param(32, "height and width in pixels to which pictures are brought", low=1)
    path: str = param("", "its name on the hub, such as ylecun/mnist")
    subset: str | None = param(None, "the configuration, where it has several")
    inputs: str | None = param(None, "the column of inputs; none: the first column of pictures")
    target: str | None = param(None, "the column of classes; none: the first column of class labels")
    group: str | None = param(None, "the column of natural clients")
    train: str = param("train", "the name of the training split")
    test: str | None = param(
        "test", "the name of the test split; none, or no split test: every fifth example of a class is for testing"
    )


@dataclass(frozen=True)
class Hub(Source):
    """A dataset of the hub."""

    options: HubOptions = field(default=HubOptions(), kw_only=True)

    def read(self, folder: Path) -> Dataset:
        """The dataset, from the data folder after the first time."""
        if not self.options.path:
            raise UserError(
                "hub needs to know which dataset; write hub(path=NAME), with the name it has on huggingface.co/datasets"
            )
        short = f"hub-{self.options.path.rpartition('/')[2]}"
        kept = entry(folder, short, fingerprint([show(self.name, changed(self.options))]), self._write)
        arrays: dict[str, Any] = {file.stem: open_kept(kept, file.stem) for file in sorted(kept.glob("*_inputs.npy"))}
        arrays |= {file.stem: np.load(file) for file in sorted(kept.glob("*.npy")) if file.stem not in arrays}
        arrays |= json.loads((kept / "about.json").read_text(encoding="utf-8"))
        return dataset_of_arrays(self.text, arrays, kept, folder)

    def _write(self, side: Path) -> None:
        splits = self._splits()
        features = splits["train"].features
        columns = self._columns(features)
        grey = all(getattr(row[columns[0]], "mode", None) in GREY for split in splits.values() for row in split)
        for part, split in splits.items():
            what = f"the {part} split of {self.options.path}"
            parts = collected(
                self._items(split, columns, what, "L" if grey else "RGB"), what, side / f"{part}_inputs.npy"
            )
            for name, values in zip(("targets", "groups"), parts[1:], strict=False):
                np.save(side / f"{part}_{name}.npy", values)
        about = {"classes": getattr(features[columns[1]], "names", None), "mean": None, "std": None}
        images = open_mapped(side / "train_inputs.npy")
        if "test" in splits and images.dtype == torch.uint8 and images.ndim == 4:
            about["mean"], about["std"] = channel_statistics(images)
        (side / "about.json").write_text(json.dumps(about), encoding="utf-8")

    def _splits(self) -> dict[str, Any]:
        """The training split, and the test split where there is one."""
        if importlib.util.find_spec("flwr_datasets") is None:
            raise UserError(f"{self.text} needs flwr-datasets, which is not installed; install it with: {INSTALL}")
        os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # it would report each use to its makers
        wanted = importlib.import_module("flwr_datasets").FederatedDataset(
            dataset=self.options.path, subset=self.options.subset, partitioners={}, shuffle=False
        )
        try:
            splits = {"train": wanted.load_split(self.options.train)}
        except Exception as error:  # the hub's client has many kinds of errors, and none of them is ours
            raise UserError(
                f"{self.options.path} cannot be had from the hub ({' '.join(str(error).split())}); check its name"
            ) from error
        if self.options.test is not None:
            try:
                splits["test"] = wanted.load_split(self.options.test)
            except ValueError as error:  # there is no such split
                if self.options.test != HubOptions.test:
                    raise UserError(
                        f"{self.options.path} has no split {self.options.test} to test on ({' '.join(str(error).split())}); "
                        "name another, or test=none for every fifth example of a class"
                    ) from error
        return splits

    def _columns(self, features: Any) -> tuple[str, str, str | None]:
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        inputs = self.options.inputs or next((name for name, kind in kinds.items() if kind == "Image"), None)
        target = self.options.target or next((name for name, kind in kinds.items() if kind == "ClassLabel"), None)
        for parameter, name in (("inputs", inputs), ("target", target), ("group", self.options.group)):
            if name not in kinds and not (parameter == "group" and name is None):
                asked = f"no column {name}" if name else "no column that could be it"
                raise UserError(f"{self.options.path} has {asked} for {parameter}=; its columns are {', '.join(kinds)}")
        assert inputs is not None and target is not None
        return inputs, target, self.options.group

    def _items(
        self, split: Any, columns: tuple[str, str, str | None], what: str, mode: Literal["L", "RGB"]
    ) -> Iterator[tuple[Any, ...]]:
        inputs, target, group = columns
        for place, row in enumerate(split):
            value = row[inputs]
            if hasattr(value, "getbands"):
                value = to_pixels(value, self.options, mode)
            elif isinstance(value, str):
                raise UserError(
                    f"item {place} of {what} is text; expected pictures or lists of numbers in column {inputs}"
                )
            yield (value, row[target]) if group is None else (value, row[target], row[group])


HUB = Hub("hub", "any dataset of the Hugging Face hub, by flwr-datasets")
