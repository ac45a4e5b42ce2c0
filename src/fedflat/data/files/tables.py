"""Tables in parquet or CSV files: one row per example.

A table has one or several columns of targets, optionally a column of natural clients, and the inputs: a column
``inputs`` of lists (parquet only), or else every other column, which must be numeric.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from fedflat.errors import UserError, one_of

INPUTS = "inputs"
DEFAULT_GROUP = "group"
"""Column of natural clients that may be absent; a column named by the user may not."""
SUFFIXES = (".parquet", ".csv")
MAX_LISTED = 5
"""Largest number of columns with wrong values that an error message describes."""


def is_table(path: Path) -> bool:
    """Whether ``path`` is a table, or a folder of tables."""
    return _is_table_file(path) or (path.is_dir() and any(map(_is_table_file, path.iterdir())))


def _is_table_file(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def read_table(
    path: Path, target: str, group: str, shape: str, drop: str = "", numbers: bool = False
) -> dict[str, Any]:
    """Read arrays from a table file, or from a folder with ``train`` and ``test`` tables.

    Args:
        path: a ``.parquet`` or ``.csv`` file, or a folder with ``train.parquet`` and ``test.parquet`` (or ``.csv``).
        target: column of classes or numbers, or several columns as ``a|b``.
        group: column of natural clients; may be absent.
        shape: shape of one example such as ``3x32x32``, or empty to keep inputs as they are.
        drop: columns to leave out, as ``a|b``.
        numbers: whether integer targets are numbers to predict, so several columns of them are not multi-label targets.

    Returns:
        ``train_inputs`` [n, *shape], ``train_targets`` [n] (or [n, columns], if ``target`` names several),
        ``train_groups`` [n] if there is such a column, and the same for ``test``; ``columns``, the names of the input
        columns, empty for lists. Several columns of integers or booleans are multi-label targets, whose label names
        ``classes`` are the column names.
    """
    files = {"train": path} if path.is_file() else {split: _find_table(path, split) for split in ("train", "test")}
    arrays: dict[str, Any] = {}
    for split, file in files.items():
        table = _drop_columns(_read_frame(file), file, drop)
        if split == "train" and group not in (*table, DEFAULT_GROUP):
            raise UserError(f"{file} has no column '{group}' for group= (columns: {', '.join(map(str, table))})")
        contents = _to_arrays(table, file, target, group, shape)
        columns = contents.pop("columns")
        if arrays.setdefault("columns", columns) != columns:
            raise UserError(
                f"{file} has the input columns {', '.join(columns)}, but the training table has "
                f"{', '.join(arrays['columns'])}; expected the same columns in the same order"
            )
        arrays |= {f"{split}_{name}": values for name, values in contents.items()}
    targets = arrays["train_targets"]
    if not numbers and targets.ndim == 2 and targets.dtype.kind in "biu":  # booleans, signed or unsigned integers
        arrays["classes"] = target.split("|")
    return arrays


def _find_table(folder: Path, split: str) -> Path:
    """Return the file of a split (``train`` or ``test``) in a folder, preferring parquet to CSV."""
    for suffix in SUFFIXES:
        file = folder / f"{split}{suffix}"
        if file.is_file():
            return file
    raise UserError(
        f"{folder / split}.parquet is missing; expected train.parquet and test.parquet (or .csv) in {folder}, "
        "or the path of a single file"
    )


def _read_frame(file: Path) -> pandas.DataFrame:
    """Read a parquet or CSV file."""
    is_parquet = file.suffix.lower() == ".parquet"
    if is_parquet and importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"reading {file} requires pyarrow; install it with: pip install 'fedflat[hub]'")
    try:
        table = pandas.read_parquet(file) if is_parquet else pandas.read_csv(file)
    except Exception as error:  # pyarrow has its own exception types
        format_name = "parquet" if is_parquet else "CSV"
        raise UserError(f"{file} is not a valid {format_name} file ({error}); write it again") from error
    header = str(table.columns[0]) if len(table.columns) == 1 else ""
    separator = next((character for character in ";\t" if character in header), None)
    if separator is not None:
        raise UserError(
            f"the columns of {file} are separated by {separator!r}; expected commas: read it with "
            f"pandas.read_csv(..., sep={separator!r}) and write it again with to_csv(..., index=False)"
        )
    if table.empty:
        raise UserError(f"{file} has no rows; expected at least one example")
    return table


def _drop_columns(table: pandas.DataFrame, file: Path, drop: str) -> pandas.DataFrame:
    """Remove the columns ``drop``, given as ``a|b``, from the table of ``file``."""
    names = drop.split("|") if drop else []
    for name in names:
        if name not in table:
            raise one_of("column", name, map(str, table), owner=str(file))
    return table.drop(columns=names)


def _to_arrays(table: pandas.DataFrame, file: Path, target: str, group: str, shape: str) -> dict[str, Any]:
    """Convert a table to ``inputs``, ``targets``, the names ``columns`` of the inputs, and ``groups`` if it has them.

    ``file`` is for messages; ``target``, ``group`` and ``shape`` are as in ``read_table``.
    """
    targets = target.split("|")
    for name in targets:
        if name not in table:
            raise UserError(
                f"{file} has no column '{name}'; name the column of targets, e.g. arrays(path=FILE,target=COLUMN) "
                f"(columns: {', '.join(map(str, table)) or 'none'})"
            )
    _reject_missing_values(table, file, needed=(*targets, group))
    arrays: dict[str, Any] = {"targets": table[targets if len(targets) > 1 else target].to_numpy()}
    if group in table:
        arrays["groups"] = table[group].to_numpy()
    rest = table.drop(columns=[name for name in (*targets, group) if name in table])
    has_lists = INPUTS in rest
    arrays["columns"] = [] if has_lists else [str(name) for name in rest]
    inputs = _stack_lists(rest[INPUTS].tolist(), file) if has_lists else _stack_columns(rest, file)
    if shape:
        inputs = inputs.reshape(len(inputs), *_parse_shape(shape, inputs[:1].size, file))
    arrays["inputs"] = inputs
    return arrays


def _reject_missing_values(table: pandas.DataFrame, file: Path, needed: tuple[str, ...]) -> None:
    """Raise a ``UserError`` that names the columns and rows with missing or infinite values.

    ``needed`` are the columns of targets and clients, which cannot be left out.
    """
    missing = {str(name): table[name].isna() | table[name].isin([np.inf, -np.inf]) for name in table}
    missing = {name: is_missing for name, is_missing in missing.items() if is_missing.any()}
    if missing:
        inputs = [name for name in missing if name not in needed]
        drop = f", or leave columns out (drop={'|'.join(inputs)})" if inputs else ""
        raise UserError(
            f"{file} has missing or infinite values in {_list_columns(missing)}; "
            f"fill in the values or remove the rows{drop}"
        )


def _list_columns(wrong: dict[str, pandas.Series]) -> str:
    """List columns with wrong values, e.g. ``'age' (3 of 100 rows, first row 7)``, given whether each row is wrong."""
    listed = "; ".join(
        f"'{name}' ({int(rows.sum())} of {len(rows)} rows, first row {int(rows.to_numpy().argmax()) + 1})"
        for name, rows in list(wrong.items())[:MAX_LISTED]
    )
    more = f"; and {len(wrong) - MAX_LISTED} more columns" if len(wrong) > MAX_LISTED else ""
    return f"{listed}{more} (rows are counted from 1, without the header)"


def _stack_columns(table: pandas.DataFrame, file: Path) -> np.ndarray:
    """Convert numeric columns to one array [n, columns]; ``file`` is for messages."""
    texts = {}
    for name in table.columns.difference(table.select_dtypes(["number", "bool"]).columns, sort=False):
        is_text = pandas.to_numeric(table[name], errors="coerce").isna()
        texts[str(name)] = is_text if is_text.any() else ~is_text  # numbers stored as text, or dates: every row
    if texts:
        group = next(iter(texts)) if len(texts) == 1 else "NAME"
        raise UserError(
            f"{file} has values that are not numbers in {_list_columns(texts)}; name the column of clients "
            f"(group={group}), leave columns out (drop={'|'.join(texts)}), or encode them as numbers"
        )
    if table.columns.empty:
        raise UserError(f"{file} has no inputs; expected a column '{INPUTS}' of lists, or numeric columns")
    return table.to_numpy(dtype=np.float32 if (table.dtypes == np.float32).all() else np.float64, copy=True)


def _stack_lists(rows: list[Any], file: Path) -> np.ndarray:
    """Convert nested lists of equal shape, one per example, to one array [n, ...]; ``file`` is for messages."""
    try:
        inputs = np.array([_to_nested_lists(row) for row in rows])
    except ValueError as error:
        raise UserError(f"the lists in column '{INPUTS}' of {file} differ in shape; expected one shape") from error
    if inputs.dtype.kind not in "biuf":
        raise UserError(f"column '{INPUTS}' of {file} does not contain numbers; expected a list of numbers per example")
    return inputs


def _to_nested_lists(row: Any) -> Any:
    """Convert the arrays of arrays that pandas reads from nested parquet columns."""
    return [_to_nested_lists(item) for item in row] if isinstance(row, np.ndarray) and row.dtype == object else row


def _parse_shape(shape: str, count: int, file: Path) -> tuple[int, ...]:
    """Parse the shape of an example, e.g. ``3x32x32``, which must have ``count`` numbers; ``file`` is for messages."""
    words = shape.lower().split("x")
    sizes = tuple(int(word) for word in words if word.isdecimal())
    if len(sizes) < len(words) or np.prod(sizes) != count:
        raise UserError(
            f"shape={shape} does not match the {count} numbers per example in {file}; expected e.g. 3x32x32"
        )
    return sizes
