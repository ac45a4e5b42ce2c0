"""Arrays in ``.npy`` files, read through a memory map.

Pages are read when examples are accessed, so an array may be larger than memory. The map is read-only and shared: all
processes on a machine use the same pages.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from fedflat.errors import UserError


class MappedTensor(torch.Tensor):
    """A read-only tensor backed by an ``.npy`` file; operations on it return ordinary tensors.

    Pickling sends the path, shape and strides, never the values.
    """

    path: Path
    """The ``.npy`` file."""
    # As for torch's own Parameter: results of operations are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, tensor: torch.Tensor, path: Path) -> MappedTensor:
        """Wrap ``tensor``, a view of the array in the ``.npy`` file ``path``."""
        mapped = torch.Tensor._make_subclass(cls, tensor)
        mapped.path = path
        return mapped

    def part(self, start: int, length: int, dim: int = 0) -> MappedTensor:
        """Return ``length`` consecutive entries along dimension ``dim``, from ``start`` on, still mapped."""
        return MappedTensor.of(self.narrow(dim, start, length), self.path)

    def channels_first(self) -> MappedTensor:
        """View images [n, height, width, channels] as [n, channels, height, width], still mapped."""
        return MappedTensor.of(self.permute(0, 3, 1, 2), self.path)

    def share_memory_(self) -> Self:
        """Do nothing: other processes map the file themselves."""
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _reopen, (str(self.path), tuple(self.shape), tuple(self.stride()), self.storage_offset())

    def __deepcopy__(self, memo: object) -> MappedTensor:
        return self


def open_mapped(path: Path, remedy: str = "write it again with numpy.save") -> MappedTensor:
    """Map the array in an ``.npy`` file without reading its values.

    Args:
        path: the file.
        remedy: advice in the error message if the file cannot be read.
    """
    try:
        array = np.load(path, mmap_mode="r")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            return MappedTensor.of(torch.from_numpy(array), path)
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise UserError(f"{path} is not a complete .npy file of numbers ({error}); {remedy}") from error


def _reopen(path: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> MappedTensor:
    """Map a file again, after unpickling, as a view of the given shape, stride and storage offset (in elements)."""
    return MappedTensor.of(open_mapped(Path(path)).as_strided(shape, stride, offset), Path(path))


class ArrayWriter:
    """Context manager that writes an ``.npy`` file in blocks of rows; the number of rows need not be known in advance.

    Args:
        path: the file to write.
        row_shape: shape of one row.
        dtype: type of the values.
    """

    def __init__(self, path: Path, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        """Create the file, with the header of an array without rows."""
        self.row_shape, self.dtype, self.rows = row_shape, np.dtype(dtype), 0
        self._stream = path.open("wb")
        self._write_header()

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Append rows [n, *row_shape]."""
        self._stream.write(np.ascontiguousarray(rows, dtype=self.dtype).reshape(-1, *self.row_shape).data)
        self.rows += len(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the final number of rows into the header, unless an error occurred, and close the file."""
        if kind is None:
            self._stream.seek(0)
            self._write_header()
        self._stream.close()

    def _write_header(self) -> None:
        """Write the ``.npy`` header at the current position; numpy pads it so that the number of rows can grow."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.rows, *self.row_shape),
        }
        np.lib.format.write_array_header_1_0(self._stream, header)
