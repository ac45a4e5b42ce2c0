"""Run the code that the FedSWA paper released and record its test accuracy.

Example:
    python studies/released_fedswa.py CHECKOUT/main.py --data-dir DATA --out swa.json -- --alg FedSWA --alpha 1.5 \
        --rho 0.1 --data_name CIFAR100 --alpha_value 0.6 --CNN lenet5 --epoch 1001 --E 5 --batch_size 50 --p 1 --print 0

CHECKOUT is a checkout of github.com/junkangLiu0/FedSWA; the words after ``--`` go to its script. The script runs
unchanged: model, partition, local updates, server and evaluation are the authors'. This driver replaces three parts
around them, so that a run takes minutes instead of hours:

- **Data loading.** Images stay on the device, and the script's transforms (random crop, flip, normalisation) apply to
  whole batches. Each image is transformed as torchvision would do it, with other random numbers.
- **Ray.** Workers run one after another in this process. Like Ray, every call copies its arguments and its result.
- **Unused packages** (plots, TensorBoard, models and datasets that the chosen arguments do not need) become empty
  stand-ins.

Workers share one state of ``args``. That is safe for FedAvg, FedSAM and FedSWA; other methods change it in a worker.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.abc
import importlib.util
import json
import math
import os
import random
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.data import Examples, load
from fedflat.errors import UserError
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.papers import find_table
from fedflat.papers.cells import Cell
from fedflat.papers.library import find_cell
from fedflat.papers.results import RunCost, StoredNumber, StoredResult, cell_key, experiment_name, write_result

UNUSED = ("datasets", "dataset", "imageio", "matplotlib", "mpl_toolkits", "peft", "timm", "torchsummary")
"""Packages that the scripts import, but that LeNet-5 on CIFAR does not need."""
REPLACED = (*UNUSED, "ray", "tensorboardX", "torchvision")
METHODS = ("FedAvg", "FedSAM", "FedSWA")
CHUNK = 2000
"""Largest number of images that are transformed at once."""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("script", type=Path, help="main.py (May 2025) or main_FedSWA.py (February 2026) of a checkout")
    add("--data-dir", type=Path, required=True, help="directory of the datasets")
    add("--out", type=Path, required=True, help="JSON file, rewritten after every evaluation")
    add("--seed", type=int, default=0, help="main.py sets no seed, main_FedSWA.py sets its own (default: %(default)s)")
    add("--cell", help="store the last accuracy as this cell's released number, e.g. fedswa/table2/fedswa/COLUMN")
    add("--results", type=Path, default=Path("results"), help="directory of the results (default: %(default)s)")
    add("arguments", nargs="+", metavar="-- ARGUMENTS", help="arguments of the script")
    return parser.parse_args(words)


def value_after(flag: str, words: Sequence[str]) -> str:
    """The value of a flag that must be given to the script."""
    if flag not in words[:-1]:
        raise UserError(f"give {flag} with a value to the script, after --")
    return words[words.index(flag) + 1]


class Recorder:
    """The accuracies of a run in a JSON file.

    Args:
        path: the file.
        about: what identifies the run.
        local_epochs: factor of the steps that the script reports.
    """

    def __init__(self, path: Path, about: dict[str, Any], local_epochs: int) -> None:
        self.path, self.local_epochs = path, local_epochs
        self.values = {**about, "finished": False, "seconds": 0.0, "curve": []}
        self._start = time.monotonic()
        create_folder(path.parent)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Take a number that the script reports; ``step`` counts local epochs from 0."""
        if name == "accuracy":
            self.values["curve"].append([step // self.local_epochs + 1, round(float(value), 2)])
            self.save()

    def save(self, **values: Any) -> None:
        """Write the file, with further values."""
        self.values |= {"seconds": round(time.monotonic() - self._start, 1), **values}
        write_atomically(self.path, json.dumps(self.values) + "\n")


class Unused(ModuleType):
    """A module of which every name exists: a stand-in that can be called, and subclassed as a module of torch."""

    __path__: list[str] = []  # noqa: RUF012 (a package: its submodules are looked up too)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (torch.nn.Module,)


class UnusedPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an ``Unused`` module for each of the unused packages and their submodules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] in UNUSED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Unused(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class RemoteClass:
    """A Ray actor class whose actors run in this process."""

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self._wrapped = wrapped

    def remote(self, *arguments: Any, **named: Any) -> Actor:
        return Actor(self._wrapped(*deepcopy(arguments), **deepcopy(named)))


class Actor:
    """An actor; ``actor.method.remote(...)`` calls the method at once."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> RemoteMethod:
        return RemoteMethod(getattr(self._instance, name))


class RemoteMethod:
    """A method of an actor. Arguments and result are copied, as by Ray's serialisation."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return deepcopy(self._method(*deepcopy(arguments), **deepcopy(named)))


def ray_module() -> ModuleType:
    """Ray's functions for actors in this process; results are available at once, so ``get`` returns its argument."""
    ray = ModuleType("ray")

    def remote(*wrapped: Any, **options: Any) -> Any:
        return RemoteClass(wrapped[0]) if wrapped else RemoteClass

    names = {"remote": remote, "get": lambda value: value, "put": lambda value: value}
    silent = {name: lambda **options: None for name in ("init", "shutdown")}
    vars(ray).update(names | silent)
    return ray


class RandomCrop:
    """Pad images with black and cut a window of ``size`` at a random position per image."""

    def __init__(self, size: int, padding: int) -> None:
        self.size, self.padding = size, padding

    def __call__(self, images: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        window = torch.arange(self.size, device=images.device)
        corners = torch.randint(padded.shape[-1] - self.size + 1, (2, len(images), 1), device=images.device)
        rows, columns = corners + window
        image = torch.arange(len(images), device=images.device)[:, None, None]
        return padded.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()


class RandomHorizontalFlip:
    """Mirror every image with probability 1/2."""

    def __call__(self, images: Tensor) -> Tensor:
        mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
        return torch.where(mirrored, images.flip(-1), images)


class ToTensor:
    """Scale uint8 images to the range from 0 to 1."""

    def __call__(self, images: Tensor) -> Tensor:
        return images.float() / 255


class Normalize:
    """Standardise every channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, images: Tensor) -> Tensor:
        return (images - self.mean.to(images.device)) / self.std.to(images.device)


class Compose:
    """Transforms in order."""

    def __init__(self, transforms: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.transforms = transforms

    def __call__(self, images: Tensor) -> Tensor:
        for transform in self.transforms:
            images = transform(images)
        return images


class Images:
    """A dataset on the device. Single examples have a label only, which is what the partition reads."""

    def __init__(self, examples: Examples, transform: Callable[[Tensor], Tensor]) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.images, self.labels = examples.inputs.to(device), examples.targets.to(device)
        self.transform = transform
        self._labels: list[int] = examples.targets.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[None, int]:
        return None, self._labels[index]


class Loader:
    """Batches of images [n, 3, 32, 32] and labels [n] on the device, with the arguments of torch's ``DataLoader``."""

    def __init__(self, dataset: Any, batch_size: int, sampler: Any = None, **unused: Any) -> None:
        indices = range(len(dataset))
        if isinstance(dataset, torch.utils.data.Subset):
            dataset, indices = dataset.dataset, dataset.indices
        self.dataset, self.batch_size = dataset, batch_size
        self.order = indices if sampler is None else sampler

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        indices = torch.tensor(list(self.order), device=self.dataset.labels.device)
        for rows in indices.split(max(1, CHUNK // self.batch_size) * self.batch_size):
            images = self.dataset.transform(self.dataset.images[rows])
            labels = self.dataset.labels[rows]
            yield from zip(images.split(self.batch_size), labels.split(self.batch_size), strict=True)


def torchvision_modules(data_dir: Path) -> dict[str, ModuleType]:
    """Stand-ins for torchvision: the CIFAR datasets and their transforms."""

    @cache
    def read(name: str) -> Any:
        return load(name, data_dir)

    def dataset(name: str) -> Callable[..., Images]:
        def open_split(root: str, train: bool, transform: Callable[[Tensor], Tensor], download: bool = False) -> Images:
            return Images(read(name).train if train else read(name).test, transform)

        return open_split

    modules: dict[str, ModuleType] = {name: Unused(name) for name in ("torchvision", "torchvision.models")}
    modules |= {f"torchvision.{name}": ModuleType(name) for name in ("datasets", "transforms")}
    openers = {"CIFAR10": dataset("cifar10"), "CIFAR100": dataset("cifar100")}
    cifar = ModuleType("cifar")
    vars(cifar).update(openers)
    vars(modules["torchvision.datasets"]).update(openers, cifar=cifar)
    transforms = (Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor)
    vars(modules["torchvision.transforms"]).update({transform.__name__: transform for transform in transforms})
    for name in ("datasets", "transforms", "models"):
        setattr(modules["torchvision"], name, modules[f"torchvision.{name}"])
    return modules


def take_replaced_modules() -> dict[str, ModuleType]:
    """Remove the packages that have stand-ins from the imported modules, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in REPLACED}


@contextmanager
def stand_ins(data_dir: Path, recorder: Recorder, checkout: Path) -> Iterator[None]:
    """Replace the packages around the script, and work in an empty directory to which it writes its logs and plots."""
    board = ModuleType("tensorboardX")
    vars(board)["SummaryWriter"] = lambda **options: recorder
    finder, before = UnusedPackages(), take_replaced_modules()
    directory, path, arguments = Path.cwd(), list(sys.path), list(sys.argv)
    loader = torch.utils.data.DataLoader
    sys.modules |= {"ray": ray_module(), "tensorboardX": board, **torchvision_modules(data_dir.resolve())}
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, str(checkout))
    torch.utils.data.DataLoader = Loader  # type: ignore[assignment, misc]
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("log", "plot", "model", "div"):
            (Path(scratch) / name).mkdir()
        os.chdir(scratch)
        try:
            yield
        finally:
            os.chdir(directory)
            torch.utils.data.DataLoader = loader  # type: ignore[misc]
            sys.meta_path.remove(finder)
            sys.path[:], sys.argv[:] = path, arguments
            take_replaced_modules()
            sys.modules |= before


def stored_result(cell: Cell, values: dict[str, Any]) -> StoredResult:
    """A finished run as a stored result.

    Args:
        cell: the cell that it measures.
        values: the values of the recorder.
    """
    table, (rounds, accuracy) = find_table(cell.table), values["curve"][-1]
    paper_rounds = cell.configs[0].training.rounds
    number = StoredNumber(
        published=cell.published.text if cell.published else None,
        measured=accuracy,
        unit=cell.unit,
        statistic=cell.statistic.text,
    )
    return StoredResult(
        format=1,
        kind="released",
        paper=table.paper.name,
        experiment=experiment_name(table, cell.configs[0]),
        seed=values["seed"],
        status="finished",
        reason=f"{rounds:,} of {paper_rounds:,} rounds" if rounds < paper_rounds else "",
        cells={cell_key(cell): number},
        metric="accuracy",
        protocol={name: values[name] for name in ("script", "arguments")},
        protocol_hash=values["sha256"][:16],
        cost=RunCost(seconds=values["seconds"]),
        environment=values["environment"],
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        curve_rounds=[rounds for rounds, _ in values["curve"]],
        curve={"server": [round(accuracy / 100, 4) for _, accuracy in values["curve"]]},
    )


def main(words: Sequence[str] | None = None) -> str:
    """Run the script; returns its last accuracy as text."""
    options = parse_arguments(sys.argv[1:] if words is None else words)
    script = options.script.resolve()
    method = value_after("--alg", options.arguments)
    if method not in METHODS:
        raise UserError(f"{method} needs separate processes for its workers; choose one of {', '.join(METHODS)}")
    if not script.is_file():
        raise UserError(f"there is no script {script}; expected main.py of a checkout")
    paper, _, key = (options.cell or "").partition("/")
    cell = find_cell(paper, key) if options.cell else None  # a wrong name fails before the run
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {
        "script": script.name,
        "sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
        "arguments": " ".join(options.arguments),
        "seed": options.seed,
        "environment": {"torch": torch.__version__, "hardware": device},
    }
    recorder = Recorder(options.out.resolve(), about, int(value_after("--E", options.arguments)))
    random.seed(options.seed)
    np.random.seed(options.seed)  # noqa: NPY002 (the script draws from this generator)
    torch.manual_seed(options.seed)
    with stand_ins(options.data_dir, recorder, script.parent):
        sys.argv[:] = [str(script), *options.arguments]
        runpy.run_path(str(script), run_name="__main__")
    recorder.save(finished=True)
    if cell is not None:
        write_result(options.results, stored_result(cell, recorder.values))
    rounds, accuracy = recorder.values["curve"][-1]
    return f"{method}: {accuracy} % after {rounds} rounds, {recorder.values['seconds']} s"


if __name__ == "__main__":
    try:
        print(main())
    except UserError as error:
        raise SystemExit(f"released_fedswa.py: {error}") from None
