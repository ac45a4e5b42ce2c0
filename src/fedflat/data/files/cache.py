"""Cache of arrays that are costly to produce, in ``decoded/`` of the data directory.

An entry is a folder that appears atomically: it is written under a temporary name and then renamed. Its name contains a
fingerprint of everything it was made from, so it never goes stale. Entries may be deleted at any time.
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

from fedflat.data.files.mapped import ArrayWriter, MappedTensor, open_mapped
from fedflat.data.sources.source import user_cache
from fedflat.errors import MachineFailed, UserError
from fedflat.operating_system import total_memory

FOLDER = "decoded"
VERSION = 3
"""Part of every fingerprint; increase it when decoding changes."""
BLOCK_ROWS = 256


class DiskSpace(NamedTuple):
    """Disk space that an entry needs: its size in bytes, what it is for, and what to do if the disk is too full."""

    size: int
    purpose: str
    remedy: str


def cache_entry(
    data_dir: Path, name: str, content_key: str, write: Callable[[Path], None], space: DiskSpace | None = None
) -> Path:
    """Return the folder of a cache entry, creating it if needed.

    The folder appears only once it is complete, so other processes never see a partial entry.

    Args:
        data_dir: the data directory; if it is read-only, the entry goes to the user's cache.
        name: readable prefix of the entry's name.
        content_key: the ``fingerprint`` of everything that determines the content.
        write: writes the content into an empty folder.
        space: disk space that ``write`` needs, which is checked before the call; None skips the check.
    """
    root = data_dir / FOLDER if _is_writable(data_dir) else user_cache() / FOLDER
    entry = root / f"{name}-{content_key[:16]}"
    if entry.is_dir():
        return entry
    temporary = root / f".writing-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _remove_abandoned(root)
        temporary.mkdir(parents=True)
        if space is not None:
            require_space(space, root)
        write(temporary)
        try:
            temporary.rename(entry)
        except OSError:
            if not entry.is_dir():  # otherwise another process wrote the same entry first
                raise
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(root):
            raise  # ``write`` cannot read its input
        raise MachineFailed(
            f"cannot write {entry} ({error.strerror or error}); free disk space there, or set FEDFLAT_DATA"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return entry


def open_cached(entry: Path, name: str) -> MappedTensor:
    """Map the array ``name`` of a cache entry."""
    return open_mapped(entry / f"{name}.npy", f"delete {entry} to have it rebuilt")


def fingerprint(values: Iterable[object]) -> str:
    """Hash (sha256) the text of ``values`` and the cache version, to identify a cache entry."""
    digest = hashlib.sha256(f"{VERSION}\n".encode())
    for value in values:
        digest.update(f"{value}\n".encode())
    return digest.hexdigest()


def select_rows(inputs: torch.Tensor, rows: np.ndarray, data_dir: Path, name: str) -> torch.Tensor:
    """Select rows of an array without exceeding memory.

    Consecutive rows of a mapped array stay mapped. Other rows are copied to memory if they fit there, else to a cache
    entry that is mapped.

    Args:
        inputs: the array [n, ...], in memory or mapped.
        rows: positions of the rows to return [m].
        data_dir: directory whose cache may hold the copy.
        name: readable prefix of the cache entry's name.
    """
    are_consecutive = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    if are_consecutive and isinstance(inputs, MappedTensor):
        return inputs.part(int(rows[0]), len(rows))
    if not isinstance(inputs, MappedTensor) or fits_in_memory(len(rows) * inputs[:1].nbytes):
        return inputs[torch.from_numpy(rows)]

    def copy_rows(folder: Path) -> None:
        """Write the selected rows to ``rows.npy`` in ``folder``, block by block."""
        with ArrayWriter(folder / "rows.npy", tuple(inputs.shape[1:]), inputs[:0].numpy().dtype) as writer:
            for start in range(0, len(rows), BLOCK_ROWS):
                writer.append(inputs[torch.from_numpy(rows[start : start + BLOCK_ROWS])].numpy())

    source = inputs.path.stat()
    rows_hash = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    content_key = fingerprint((inputs.path, source.st_size, source.st_mtime_ns, rows_hash))
    return open_cached(cache_entry(data_dir, name, content_key, copy_rows), "rows")


def require_space(space: DiskSpace, root: Path) -> None:
    """Raise a ``UserError`` if the disk of the folder ``root`` has too little space, before hours of decoding."""

    def size_text(size: int) -> str:
        return f"{size / 1e9:.1f} GB" if size > 1e8 else f"{size / 1e6:.3f} MB"

    free = shutil.disk_usage(root).free
    if space.size > free:
        raise UserError(
            f"{space.purpose} needs {size_text(space.size)} once decoded, but {root} has {size_text(free)} free; "
            f"free disk space there, or {space.remedy}"
        )


def fits_in_memory(size: int) -> bool:
    """Whether ``size`` bytes are at most a quarter of the memory of this machine or container."""
    memory = total_memory()
    container_limit_file = Path("/sys/fs/cgroup/memory.max")
    container_limit = container_limit_file.read_text().strip() if container_limit_file.is_file() else ""
    if container_limit.isdigit():  # "max" means no limit
        memory = min(memory, int(container_limit))
    return 4 * size <= memory


def _is_writable(data_dir: Path) -> bool:
    """Whether entries can be written below ``data_dir``, or below its nearest existing parent."""
    folders = (data_dir / FOLDER, data_dir, *data_dir.absolute().parents)
    nearest = next(folder for folder in folders if folder.is_dir())
    return os.access(nearest, os.W_OK)


def _remove_abandoned(root: Path) -> None:
    """Remove temporary folders in ``root`` whose process, on this machine, was killed while writing."""
    for folder in root.glob(".writing-*"):
        host, process_id, _ = folder.name.removeprefix(".writing-").rsplit("-", 2)  # names of hosts may contain hyphens
        if host != socket.gethostname():
            continue
        try:
            os.kill(int(process_id), 0)  # signal 0 only checks that the process exists
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:  # the process exists, but belongs to another user
            continue
