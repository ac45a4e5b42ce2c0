"""The folder in which every case runs, with a finished run and a file of every format; and ways to damage it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import fedflat

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
    "data.npz": (f"{DESCRIBE} data.npz",),
    "table.csv": (f"{DESCRIBE} table.csv",),
    "table.parquet": (f"{DESCRIBE} table.parquet",),
    "folder/inputs.npy": (f"{DESCRIBE} arrays(path=folder)",),
    "folder/targets.npy": (f"{DESCRIBE} arrays(path=folder)",),
    "partition.json": (f"{RUN} --partition listed(path=partition.json) --set data.clients=null",),
    "weights.pt": (f"{RUN} --partition iid --init weights.pt", f"{SPECTRUM} weights.pt"),
    "weights.safetensors": (f"{RUN} --partition iid --init weights.safetensors", f"{SPECTRUM} weights.safetensors"),
    "module.py": (f"{SPECTRUM} weights.pt",),
    "plugin.py": ("algorithms --plugin plugin.py",),
    "search/tune.journal": ("tune tune.yaml --out search",),
    "ca.crt": ("deploy check localhost:1 --root-certificates ca.crt",),
}
"""Command lines that read each file."""


def build(folder: Path) -> None:
    """Write a valid file of every format, and a finished run."""
    generator = np.random.default_rng(0)
    inputs, targets = generator.random((40, 3), dtype=np.float32), np.arange(40) % 2
    np.savez(folder / "data.npz", inputs=inputs, targets=targets)
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
    fedflat.run(
        "fedmoswa+wima", out=folder / "run", dataset=str(folder / "data.npz"), model="mlp(hidden=2)", partition="iid",
        clients=4, clients_per_round=2, rounds=2, local_steps=1, workers=1, save_every=1, device="cpu", progress=False,
    )  # fmt: skip


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
