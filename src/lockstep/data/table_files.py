"""Columns of CSV and Parquet files, and their conversion to numbers and category ids.

Shapes: R rows.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import ConfigError

MISSING = ("", "na", "n/a", "nan", "null", "none")
"""Texts that mean a missing value, in lower case."""


def read_table(path: str, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Read columns of a CSV or Parquet file.

    Raises:
        ConfigError: The file does not exist, cannot be read, or lacks a column.
    """
    if not Path(path).is_file():
        raise ConfigError(f"table {path or '(none)'} does not exist.", "Set task.path to a CSV or Parquet file.")
    return _read_parquet(path, names) if path.endswith((".parquet", ".pq")) else _read_csv(path, names)


def _read_csv(path: str, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = (row for row in csv.reader(file) if row)
            header = next(rows, [])
            _require_columns(names, header, path)
            indices = [header.index(name) for name in names]
            columns: list[list[str]] = [[] for _ in names]
            for number, row in enumerate(rows, 2):
                if len(row) != len(header):
                    raise ConfigError(
                        f"{path}: row {number} has {len(row)} fields, its header {len(header)}.", "Fix this row."
                    )
                for column, index in zip(columns, indices, strict=True):
                    column.append(row[index])
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}.", "Give a CSV file in UTF-8, or Parquet.") from None
    return dict(zip(names, columns, strict=True))


def _read_parquet(path: str, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} is a Parquet file.", "Install a reader: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_columns(names, file.schema_arrow.names, path)
            table = file.read(list(dict.fromkeys(names)))
            return {name: table.column(name).to_pylist() for name in names}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a Parquet file: {str(error)[:200]}.", "Write the file again.") from None


def _require_columns(names: Sequence[str], header: Sequence[str], path: str) -> None:
    if missing := [name for name in names if name not in header]:
        raise ConfigError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(header)[:300] or 'none'}.",
            "Name existing columns in task.numeric, task.categorical and task.target.",
        )


def to_numbers(values: Sequence[Any], name: str) -> np.ndarray:
    """Convert a column to numbers [R] float64. Missing values are NaN."""
    numbers = np.empty(len(values))
    for row, value in enumerate(values):
        try:
            numbers[row] = np.nan if _is_missing(value) else float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"column {name} has {str(value)[:50]!r} in data row {row + 1}, which is not a number.",
                f"Fix the table, or name {name} in task.categorical.",
            ) from None
    return numbers


def to_texts(values: Sequence[Any]) -> np.ndarray:
    """Convert a column to texts [R]. Missing values are empty."""
    texts = ["" if _is_missing(value) else _as_text(value) for value in values]
    return np.array(texts, dtype=np.str_) if texts else np.zeros(0, dtype="U1")


def ordered_categories(texts: np.ndarray) -> list[str]:
    """Return the distinct texts of a column, without the empty one; numbers in the order of their values."""
    distinct = [text for text in np.unique(texts).tolist() if text]
    try:
        return sorted(distinct, key=float)
    except ValueError:
        return distinct


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in MISSING) or value != value


def _as_text(value: Any) -> str:
    """Return a value as text: whole numbers without a fraction, whatever type a file gives them."""
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value).strip()
