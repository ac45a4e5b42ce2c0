"""Arrays that were costly to make, kept beside the datasets they were made from.

An entry is a folder of files that appears whole or not at all: it is written aside under a name that no reader looks for, and renamed.
Its name holds a fingerprint of everything that went into it, so that it is never out of date. Entries may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedflat.data.mapped import ArrayWriter, MappedTensor, open_mapped
from fedflat.errors import UserError

FOLDER = "decoded"
VERSION = 2
"""Part of every fingerprint: raised when the way of decoding changes."""
BLOCK = 256


class Room(NamedTuple):
    """How many bytes an entry takes on disk, for what, and what to do where they are not free."""

    size: int
    what: str
    remedy: str


def entry(folder: Path, name: str, fingerprint: str, write: Callable[[Path], None], room: Room | None = None) -> Path:
    """The entry of that name and fingerprint, written by ``write`` into an empty folder if it is not there."""
    root = folder / FOLDER if _writable(folder) else _own_cache() / FOLDER
    found = root / f"{name}-{fingerprint[:16]}"
    if found.is_dir():
        return found
    side = root / f".writing-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _clear_abandoned(root)
        side.mkdir(parents=True)
        if room is not None:
            _require(room, root)
        write(side)
        try:
            side.rename(found)
        except OSError:
            if not found.is_dir():  # otherwise another process was first, and wrote the same
                raise
    except OSError as error:
        raise UserError(
            f"{found} cannot be written ({error.strerror or error}); make room there, or set FEDFLAT_DATA"
        ) from error
    finally:
        shutil.rmtree(side, ignore_errors=True)
    return found


def open_kept(kept: Path, name: str) -> MappedTensor:
    """An array of an entry, mapped."""
    return open_mapped(kept / f"{name}.npy", f"delete {kept}, and it will be made again")


def fingerprint(parts: Iterable[object]) -> str:
    """sha256 over some values."""
    digest = hashlib.sha256(f"{VERSION}\n".encode())
    for part in parts:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def rows_of(inputs: torch.Tensor, rows: np.ndarray, folder: Path, name: str) -> torch.Tensor:
    """Some rows of an array: still mapped where they are consecutive, else in memory where they fit, else mapped from another file."""
    consecutive = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    if consecutive and isinstance(inputs, MappedTensor):
        return inputs.part(int(rows[0]), len(rows))
    if not isinstance(inputs, MappedTensor) or fits_in_memory(len(rows) * inputs[:1].nbytes):
        return inputs[torch.from_numpy(rows)]

    def copy(side: Path) -> None:
        with ArrayWriter(side / "rows.npy", tuple(inputs.shape[1:]), inputs[:0].numpy().dtype) as writer:
            for start in range(0, len(rows), BLOCK):
                writer.append(inputs[torch.from_numpy(rows[start : start + BLOCK])].numpy())

    stamp = inputs.path.stat()
    key = fingerprint(
        (inputs.path, stamp.st_size, stamp.st_mtime_ns, hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest())
    )
    return open_kept(entry(folder, name, key, copy), "rows")


def _require(room: Room, root: Path) -> None:
    """Refuse what would fill the disk, before hours of decoding."""
    free = shutil.disk_usage(root).free
    if room.size > free:
        needed, there = (f"{size / 1e9:.1f} GB" if size > 1e8 else f"{size / 1e6:.3f} MB" for size in (room.size, free))
        raise UserError(
            f"{room.what} takes {needed} once decoded, but {root} has {there} free; make room there, or {room.remedy}"
        )


def fits_in_memory(size: int) -> bool:
    """Whether so many bytes are at most a quarter of the machine's memory, or of what this container may use."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (allowed := limit.read_text().strip()).isdigit():
        memory = min(memory, int(allowed))
    return 4 * size <= memory


def _writable(folder: Path) -> bool:
    """Whether entries can be written below a folder, or below what exists of it."""
    existing = next(place for place in (folder / FOLDER, folder, *folder.absolute().parents) if place.is_dir())
    return os.access(existing, os.W_OK)


def _own_cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedflat"


def _clear_abandoned(root: Path) -> None:
    """Remove what processes of this machine left behind that were killed while writing."""
    mine = f".writing-{socket.gethostname()}-"
    for side in root.glob(f"{mine}*"):
        process = int(side.name.removeprefix(mine).partition("-")[0])
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            shutil.rmtree(side, ignore_errors=True)
        except PermissionError:
            continue
