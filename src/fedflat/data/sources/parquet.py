"""A user's own table in parquet: a column of classes, perhaps one of natural clients, and the inputs.

The inputs are a column ``inputs`` of lists, or else every other column of numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from fedflat.errors import UserError

INPUTS = "inputs"


def read_parquet(path: Path, target: str, group: str, shape: str) -> dict[str, Any]:
    """The arrays of a parquet file, or of a folder with train.parquet and test.parquet."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            f"reading {path} needs pyarrow, which is not installed; install it with: pip install 'fedflat[hub]'"
        )
    files = {"train": path} if path.is_file() else {part: path / f"{part}.parquet" for part in ("train", "test")}
    arrays: dict[str, Any] = {}
    for part, file in files.items():
        if not file.is_file():
            raise UserError(f"{file} is missing; expected train.parquet and test.parquet in {path}, or one file")
        try:
            table = pandas.read_parquet(file)
        except Exception as error:  # pyarrow has its own kinds of errors
            raise UserError(f"{file} is not a whole parquet file ({error}); write it again") from error
        arrays |= {f"{part}_{name}": values for name, values in _arrays(table, file, target, group, shape).items()}
    return arrays


def _arrays(table: pandas.DataFrame, file: Path, target: str, group: str, shape: str) -> dict[str, Any]:
    if target not in table:
        raise UserError(
            f"{file} has no column {target}, only {', '.join(map(str, table))}; name the column of classes with target="
        )
    arrays: dict[str, Any] = {"targets": table[target].to_numpy()}
    if group in table:
        arrays["groups"] = table[group].to_numpy()
    rest = table.drop(columns=[name for name in (target, group) if name in table])
    if INPUTS in rest:
        inputs = _stacked(rest[INPUTS].tolist(), file)
    else:
        inputs = rest.select_dtypes("number").to_numpy(dtype=np.float32)
        if not inputs.shape[1]:
            raise UserError(
                f"{file} has no inputs; expected a column {INPUTS} of lists, or columns of numbers beside {target}"
            )
    arrays["inputs"] = inputs.reshape(len(inputs), *_sizes(shape, inputs[:1].size, file)) if shape else inputs
    return arrays


def _stacked(rows: list[Any], file: Path) -> np.ndarray:
    """Lists of lists as one array; whole numbers up to 255 are bytes."""
    try:
        inputs = np.array([_nested(row) for row in rows])
    except ValueError as error:
        raise UserError(
            f"the lists in column {INPUTS} of {file} are not all of one shape; expected examples of equal size"
        ) from error
    if inputs.dtype.kind not in "biuf":
        raise UserError(f"column {INPUTS} of {file} does not hold lists of numbers; expected one list per example")
    return inputs


def _nested(row: Any) -> Any:
    return [_nested(part) for part in row] if isinstance(row, np.ndarray) and row.dtype == object else row


def _sizes(shape: str, numbers: int, file: Path) -> tuple[int, ...]:
    parts = shape.lower().split("x")
    if not all(part.isdigit() for part in parts) or np.prod([int(part) for part in parts]) != numbers:
        raise UserError(
            f"shape={shape} does not fit the {numbers} numbers of an example in {file}; expected something like 3x32x32"
        )
    return tuple(int(part) for part in parts)
