"""Safe reading of pickles that contain only arrays and plain values.

A pickle can import and call any function. This unpickler resolves five names from a table, imports nothing, and rejects
every other name.
"""

from __future__ import annotations

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.errors import UserError

_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _ForbiddenName(Exception):
    """A pickle refers to a name outside the table."""


class _PlainUnpickler(pickle.Unpickler):
    """Resolves only the names in ``_ALLOWED`` and imports nothing, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up a name that the pickle refers to, instead of importing it."""
        if (module, name) not in _ALLOWED:
            raise _ForbiddenName(f"{module}.{name}")
        return _ALLOWED[module, name]


def read_plain_pickle(path: Path, remedy: str) -> dict[str, Any]:
    """Read the dictionary in a pickle of Python 2 or 3; keys become text, byte strings stay bytes.

    Args:
        path: the file.
        remedy: advice in the error message if the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            content = _PlainUnpickler(stream, encoding="bytes").load()
    except _ForbiddenName as name:
        raise UserError(f"{path} was rejected: its pickle refers to {name}, which no array needs; {remedy}") from None
    except Exception as error:  # a damaged pickle can fail with any exception
        raise UserError(f"{path} is not a complete pickle ({error or type(error).__name__}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} contains a {type(content).__name__}; expected a dictionary; {remedy}")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in content.items()}
