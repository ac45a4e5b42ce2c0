"""The folder in which every case runs, with a finished run and a file of every format; and ways to damage it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import fedflat
from fedflat.experiment.store import tensor_files
from fedflat.experiment.store.checkpoint import CHECKPOINT

DAMAGED_FOLDER = "run"
"""Damaging this folder damages one of its files, drawn at random."""
CONFIG = "rounds: 1\n"
BASE = (
    "{rounds: 1, local_steps: 1, clients: 4, clients_per_round: 2, model: mlp(hidden=2), dataset: data.npz, workers: 1}"
)
DESCRIBE = "data describe --clients 4 --partition iid"
RUN = "run fedavg --dataset data.npz --model mlp(hidden=2) --clients 4 --clients-per-round 2 --rounds 1 --workers 1"
SPECTRUM = "flatness spectrum --module module.py:build --dataset data.npz --examples 8 --iterations 2 --eigenvalues 1"
FILES: dict[str, tuple[str, ...]] = {
    "config.yaml": (f"{RUN} --partition iid --config config.yaml",),
    "sweep.yaml": ("sweep sweep.yaml --dry-run --out new",),
    "tune.yaml": ("tune tune.yaml --dry-run --out new",),
    "space.yaml": ("discover space.yaml --dry-run --out new",),
    "data.npz": (f"{DESCRIBE} data.npz",),
    "table.csv": (f"{DESCRIBE} table.csv",),
    "table.parquet": (f"{DESCRIBE} table.parquet",),
    "folder/inputs.npy": (f"{DESCRIBE} arrays(path=folder)",),
    "folder/targets.npy": (f"{DESCRIBE} arrays(path=folder)",),
    "partition.json": (f"{RUN} --partition listed(path=partition.json)",),
    "weights.pt": (f"{RUN} --partition iid --init weights.pt", f"{SPECTRUM} weights.pt"),
    "weights.safetensors": (f"{RUN} --partition iid --init weights.safetensors", f"{SPECTRUM} weights.safetensors"),
    "module.py": (f"{SPECTRUM} weights.pt",),
    "plugin.py": ("algorithms --plugin plugin.py",),
    "search/tune.journal": ("tune tune.yaml --out search",),
    "speeds.csv": (f"{RUN} --partition iid --clock trace(path=speeds.csv)",),
    "sessions.csv": (f"{RUN} --partition iid --clock lognormal+sessions(path=sessions.csv)",),
    "ca.crt": ("deploy check localhost:1 --root-certificates ca.crt",),
}
"""Command lines that read each file."""
STORED_RESULT = Path(__file__).parents[2] / "results/tuned/fedswa/table2/cifar10-lenet-5/fedswa-seed0.json"


def build(folder: Path) -> None:
    """Write a valid file of every format, and a finished run."""
    generator = np.random.default_rng(0)
    inputs, targets = generator.random((40, 3), dtype=np.float32), np.arange(40) % 2
    np.savez(folder / "data.npz", inputs=inputs, targets=targets)
    (folder / "speeds.csv").write_text("client,seconds_per_step\n" + "".join(f"{client},0.1\n" for client in range(4)))
    (folder / "sessions.csv").write_text("client,start,end\n" + "".join(f"{client},0,9e9\n" for client in range(4)))
    (folder / "folder").mkdir()
    np.save(folder / "folder/inputs.npy", inputs)
    np.save(folder / "folder/targets.npy", targets)
    rows = [f"{a},{b},{c},{target}" for (a, b, c), target in zip(inputs.tolist(), targets.tolist(), strict=True)]
    (folder / "table.csv").write_text("\n".join(["a,b,c,target", *rows]) + "\n")
    _write_parquet(folder)
    (folder / "config.yaml").write_text("training:\n  lr: 0.1\nseed: 1\n")
    (folder / "sweep.yaml").write_text(f"base: {BASE}\ngrid: {{seed: [0, 1], lr: [0.1, 0.2]}}\n")
    tune = "{trials: 2, space: {lr: {low: 0.1, high: 1.0}}}"
    (folder / "tune.yaml").write_text(f"base: {BASE[:-1]}, data.validation: 0.2}}\ntune: {tune}\n")
    slots = '{perturbation: [none, "sam(rho={rho})"]}'
    space = f"slots: {slots}\nparameters: {{rho: {{low: 0.1, high: 1.0}}}}\nconfirm: {{seeds: [1, 2]}}"
    (folder / "space.yaml").write_text(f"base: {BASE[:-1]}, data.validation: 0.2}}\n{space}\n")
    (folder / "partition.json").write_text('{"examples": 32, "clients": [[0, 2], [1, 3], [4], [5]]}')
    weights = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    torch.save(weights.state_dict(), folder / "weights.pt")
    save_file(weights.state_dict(), folder / "weights.safetensors")
    (folder / "module.py").write_text(
        "from torch import nn\n\n\ndef build():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))\n"
    )
    (folder / "plugin.py").write_text("import fedflat\n")
    (folder / "ca.crt").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    (folder / "search").mkdir()
    (folder / "search/tune.journal").write_text('{"op_code": 0}\n')
    (folder / "stored").mkdir()
    shutil.copy(STORED_RESULT, folder / "stored")
    settings: dict[str, Any] = {
        "dataset": str(folder / "data.npz"), "model": "mlp(hidden=2)", "partition": "iid", "clients": 4,
        "clients_per_round": 2, "rounds": 2, "local_steps": 1, "workers": 1, "save_every": 1, "device": "cpu",
    }  # fmt: skip
    fedflat.run("fedmoswa+wima", out=folder / "run", progress=False, **settings)
    rounds = fedflat.rounds("fedmoswa+wima", out=folder / "paused", **settings)
    next(rounds)
    rounds.close()
    other = {"model": "mlp(hidden=3)", "rounds": 4, "clients": 5, "seed": 1}
    fedflat.run("scaffold", out=folder / "other", progress=False, **{**settings, **other})


def _write_parquet(folder: Path) -> None:
    """Write the table as parquet, if pyarrow is installed; otherwise the file is damaged from the start."""
    import pandas as pd

    try:
        pd.read_csv(folder / "table.csv").to_parquet(folder / "table.parquet")
    except ImportError:
        (folder / "table.parquet").write_text("")


def _flip_bits(data: bytes, draw: random.Random) -> bytes:
    """Flip one bit in each of eight random bytes."""
    flipped = bytearray(data or b"\0")
    for _ in range(8):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "empty": lambda data, draw: b"",
    "truncated": lambda data, draw: data[: draw.randrange(len(data) or 1)],
    "flipped bits": _flip_bits,
    "other flipped bits": _flip_bits,
    "more flipped bits": _flip_bits,
    "random bytes": lambda data, draw: draw.randbytes(200),
    "NUL bytes": lambda data, draw: bytes(len(data)),
    "appended line": lambda data, draw: data + b"\nx: [\xff\n",
    "directory": lambda data, draw: None,
}
"""New content of a file from its content, by name; None replaces the file by a folder."""


def damage(path: Path, how: str, seed: str) -> Path:
    """Damage a file, or a random file of a folder; return it."""
    draw = random.Random(f"{path.name} {how} {seed}")
    if path.is_dir():
        path = draw.choice(sorted(file for file in path.rglob("*") if file.is_file()))
    content = DAMAGE[how](path.read_bytes(), draw)
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    return path


Change = Callable[[Path], object]


def copied(source: str, target: str) -> Change:
    """Replace a file of the workspace by another one."""
    return lambda folder: shutil.copy(folder / source, folder / target)


def with_values(file: str, **values: Any) -> Change:
    """Change values in a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | values) + "\n")

    return change


def with_text(file: str, old: str, new: str) -> Change:
    """Replace text that a file contains."""

    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text, f"{file} does not contain {old!r}"
        (folder / file).write_text(text.replace(old, new))

    return change


def with_arrays(**arrays: Any) -> Change:
    """Replace arrays in data.npz."""
    return lambda folder: np.savez(folder / "data.npz", **{**np.load(folder / "data.npz"), **arrays})


def with_format(file: str, version: int) -> Change:
    """Write a safetensors file as another version of fedflat."""

    def change(folder: Path) -> None:
        tensors, header = tensor_files.read_tensors(folder / file)
        header["format"] = version
        header["sha256"] = tensor_files.checksum(tensors, header)
        save_file(tensors, folder / file, {"fedflat": json.dumps(header)})

    return change


def with_linear_layer(folder: Path) -> None:
    """Replace the weights by those of another model."""
    weights = torch.nn.Linear(4, 2).state_dict()
    torch.save(weights, folder / "weights.pt")
    save_file(weights, folder / "weights.safetensors")


PAUSED = f"paused/{CHECKPOINT}"
READERS = ("show run", "report run --out new", "watch run --once", "evaluate run", "report run other --apart --out new")
STATE_READERS = ("resume paused", "branch paused fedavg --rounds 6 --dry-run --out new", "flatness clients paused")
USERS_OF_WEIGHTS = (*FILES["weights.pt"], *FILES["weights.safetensors"])
WRONG_CONTENT: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "metrics of another run": (copied("other/metrics.jsonl", "run/metrics.jsonl"), "metrics.jsonl", READERS),
    "metrics of another paused run": (
        lambda folder: (folder / "paused/metrics.jsonl").write_text(
            "".join((folder / "other/metrics.jsonl").read_text().splitlines(keepends=True)[:2]) + " " * 9999
        ),
        "metrics.jsonl",
        ("resume paused",),
    ),
    "more rounds than the run": (with_values("run/status.json", rounds=7), "status.json", READERS),
    "rounds in words": (with_values("run/status.json", rounds="many"), "status.json", READERS),
    "averages without a list": (with_values("run/status.json", averages=5), "status.json", READERS),
    "another metric": (with_values("run/status.json", metric="rmse"), "status.json", READERS),
    "checkpoint of another run": (copied(f"other/{CHECKPOINT}", PAUSED), "checkpoint", STATE_READERS),
    "a model as checkpoint": (copied("paused/model.safetensors", PAUSED), "state.safetensors", STATE_READERS),
    "checkpoint of a newer version": (with_format(PAUSED, 3), "upgradefedflat", STATE_READERS),
    "model of a newer version": (
        with_format("run/model.safetensors", 3),
        "upgradefedflat",
        ("evaluate run", "export run --average server --out new.pt", "flatness sharpness run:server --examples 8"),
    ),
    "run of a newer version": (
        with_text("run/config.yaml", "format: 1", "format: 2"),
        "upgradefedflat",
        (*READERS, "resume run", "branch run fedavg --rounds 6 --dry-run --out new", "flatness clients run"),
    ),
    "partition of another run": (
        copied("other/partition.json", "paused/partition.json"),
        "partition.json",
        ("show paused", "show paused --json", "report paused --out new", "resume paused"),
    ),
    "partition without sizes": (
        with_values("run/partition.json", sizes=[1, 2]),
        "partition.json",
        ("show run", "report run --out new"),
    ),
    "indices out of range": (
        with_values("partition.json", clients=[[0, 99], [1]]),
        "listsexample99",
        FILES["partition.json"],
    ),
    "more clients than examples": (
        with_values("partition.json", clients=[[0]] * 4),
        "4times",
        FILES["partition.json"],
    ),
    "partition of a larger dataset": (with_values("partition.json", examples=99), "99", FILES["partition.json"]),
    "edited seed": (with_text("paused/config.yaml", "\nseed: 0", "\nseed: 1"), "seed=1insteadof0", STATE_READERS),
    "edited model": (with_text("paused/config.yaml", "(hidden=2)", "(hidden=5)"), "hidden=5", STATE_READERS),
    "edited algorithm": (with_text("paused/config.yaml", "fedmoswa", "fedmosaw"), "fedmosaw", STATE_READERS),
    "edited rounds": (with_text("run/config.yaml", "rounds: 2", "rounds: 1"), "config.yaml", READERS),
    "complex labels": (with_arrays(targets=np.ones(40, complex)), "neitherintegersnorwords", FILES["data.npz"]),
    "dates as labels": (with_arrays(targets=np.zeros(40, "M8[s]")), "neitherintegersnorwords", FILES["data.npz"]),
    "struct labels": (with_arrays(targets=np.zeros(40, [("a", "f4")])), "neitherintegersnorwords", FILES["data.npz"]),
    "weights of another model": (with_linear_layer, "weights.", USERS_OF_WEIGHTS),
    "sweep file of another version": (
        lambda folder: (folder / "sweep.yaml").write_text("format: 2\nruns: {lr: [0.1]}\n"),
        "sweep.yaml",
        FILES["sweep.yaml"],
    ),
    "result with another hash": (
        with_text(f"stored/{STORED_RESULT.name}", '"protocol_hash": "', '"protocol_hash": "0'),
        "protocol_hash",
        ("papers --measured --results stored",),
    ),
    "result with another protocol": (
        with_text(f"stored/{STORED_RESULT.name}", '"lr": ', '"lr": 1'),
        "protocol_hash",
        ("papers --measured --results stored",),
    ),
}
"""Files that are valid by themselves but do not fit the others: by name, a change of the workspace, a text that the
output must contain (without spaces), and command lines to try."""
