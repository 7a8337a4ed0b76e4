"""Columns of CSV and Parquet files, and their conversion to numbers and category ids.

Shapes: R rows.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lockstep.config import ConfigError

MISSING = ("", "na", "n/a", "nan", "null", "none")
"""Texts that mean a missing value, in lower case."""


def read_header(path: str) -> list[str]:
    """Return the column names of a CSV or Parquet file.

    Raises:
        ConfigError: The file cannot be read.
    """
    if _is_parquet(path):
        with _open_parquet(path) as file:
            return list(file.schema_arrow.names)
    with _open_csv(path) as rows:
        return next(rows, [])


def read_table(path: str, names: Iterable[str], *, max_rows: int | None = None) -> dict[str, Sequence[Any]]:
    """Read columns of a CSV or Parquet file; `names` are names of its header.

    Raises:
        ConfigError: The file cannot be read, or has more than `max_rows` rows.
    """
    names = list(dict.fromkeys(names))
    return _read_parquet(path, names, max_rows) if _is_parquet(path) else _read_csv(path, names, max_rows)


def _read_csv(path: str, names: Sequence[str], max_rows: int | None) -> dict[str, Sequence[Any]]:
    with _open_csv(path) as rows:
        header = next(rows, [])
        indices = [header.index(name) for name in names]
        columns: list[list[str]] = [[] for _ in names]
        for number, row in enumerate(rows, 1):
            if len(row) != len(header):
                problem = f"{path}: row {number} has {len(row)} fields, its header {len(header)}."
                raise ConfigError(problem, "Fix this row. The first row after the header is row 1.")
            _require_rows(number, max_rows, path)
            for column, index in zip(columns, indices, strict=True):
                column.append(row[index])
    return dict(zip(names, columns, strict=True))


def _read_parquet(path: str, names: list[str], max_rows: int | None) -> dict[str, Sequence[Any]]:
    with _open_parquet(path) as file:
        _require_rows(file.metadata.num_rows, max_rows, path)
        return dict(file.read(names).to_pydict())


def _is_parquet(path: str) -> bool:
    return path.endswith((".parquet", ".pq"))


@contextmanager
def _open_csv(path: str) -> Iterator[Iterator[list[str]]]:
    """Open a file as rows, without empty ones."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            yield (row for row in csv.reader(file) if row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}.", "Give a CSV file in UTF-8, or Parquet.") from None


@contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} is a Parquet file.", "Install a reader: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except ConfigError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a Parquet file: {str(error)[:200]}.", "Write the file again.") from None


def _require_rows(rows: int, max_rows: int | None, path: str) -> None:
    if max_rows is not None and rows > max_rows:
        raise ConfigError(f"{path} has more than {max_rows:,} rows.", f"Use {max_rows:,} at most.")


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
