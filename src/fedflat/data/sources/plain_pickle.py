"""Pickles that hold nothing but arrays and plain values, read without running anything they name.

A pickle is a program; what makes it dangerous is that it may import any function and call it. Here a name is looked up in a table
of five, nothing is ever imported, and every other name ends the reading.
"""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.errors import UserError

_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _Refused(Exception):
    """A pickle names something that is not in the table."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise _Refused(f"{module}.{name}")
        return _ADMITTED[module, name]


def read_plain_pickle(path: Path, remedy: str) -> dict[str, Any]:
    """The dictionary in a pickle of Python 2 or 3, its keys as text; byte strings stay bytes."""
    try:
        with path.open("rb") as stream:
            content = _PlainUnpickler(stream, encoding="bytes").load()
    except _Refused as refused:
        raise UserError(
            f"{path} was not read, because its pickle asks for {refused}, which no array needs; {remedy}"
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way that its instructions can
        raise UserError(f"{path} is not a whole pickle ({error or type(error).__name__}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, but a dictionary was expected; {remedy}")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in content.items()}
