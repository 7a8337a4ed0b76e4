"""Price files: read, sorted by time, adjusted, with notes on irregular data.

Shapes: T bars.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import ConfigError
from lockstep.data.table_files import read_header, read_table

OPEN, HIGH, LOW, CLOSE = range(4)
SECONDS_PER_YEAR = 365.25 * 86_400
COLUMNS = {
    "time": ("time", "date", "datetime", "timestamp", "unix"),
    **{price: (price,) for price in ("open", "high", "low", "close")},
    "adjusted": ("adj close", "adj_close", "adjusted close", "adjusted"),
}
"""Recognized column names in lower case, by priority."""
MAX_BYTES, MAX_ROWS = 2**29, 10_000_000
"""Limits of a file. Ten million bars are nineteen years of minutes."""
MAX_PRICE, MAX_TIME = 1e15, 1e11
"""Upper limits of a valid price, and of a valid time in seconds since 1970 (the year 5138)."""
TIME_FORMATS = ("%d.%m.%Y %H:%M:%S.%f", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y", "%Y/%m/%d", "%m/%d/%Y", "%Y%m%d %H%M%S")


class PriceSeries(NamedTuple):
    """The prices of one symbol, oldest first."""

    name: str
    time: np.ndarray
    """[T] float64: seconds since 1970."""
    prices: np.ndarray
    """[T, 4] float64: open, high, low and close, adjusted if the file has an adjusted close."""
    notes: tuple[str, ...] = ()
    """Messages about irregular data."""
    features: np.ndarray = np.zeros((0, 0))
    """[T, K] float64: further columns, if any were named."""

    @property
    def bars_per_year(self) -> float:
        """Return the average number of bars per year."""
        return (len(self.time) - 1) / (self.time[-1] - self.time[0]) * SECONDS_PER_YEAR


def read_bars(path: str, columns: Mapping[str, str], features: Sequence[str] = ()) -> PriceSeries:
    """Read a CSV or Parquet file.

    Args:
        path: Path of the file.
        columns: File column names of time, open, high, low, close and adjusted, where they are not recognized.
        features: Names of further columns.
    """
    if not Path(path).is_file():
        raise ConfigError(f"price file {path} does not exist.", "Give the path of a CSV or Parquet file.")
    if Path(path).stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} holds more than {MAX_BYTES:,} bytes.", "Split it, or use longer bars.")
    header = read_header(path)
    names = _find_columns(header, columns, path)
    if missing := [name for name in features if name not in header]:
        raise ConfigError(
            f"{path} has no column {missing[0]}; it has {', '.join(header)[:200]}.", "Name columns in --task.features."
        )
    table = read_table(path, [*names.values(), *features], max_rows=MAX_ROWS)
    time = _times(table[names["time"]], path)
    prices = np.stack([_numbers(table[names[part]], part, path) for part in ("open", "high", "low", "close")], axis=1)
    if "adjusted" in names:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a price of zero is reported below
            prices *= (_numbers(table[names["adjusted"]], "adjusted", path) / prices[:, CLOSE])[:, None]
    further = np.zeros((len(time), len(features)))
    for index, name in enumerate(features):
        further[:, index] = _numbers(table[name], name, path)
    return _sort_and_check(PriceSeries(Path(path).stem, time, prices, (), further), path, features)


def _sort_and_check(series: PriceSeries, path: str, features: Sequence[str]) -> PriceSeries:
    """Sort bars by time, drop duplicates, reject invalid values, and report irregular times."""
    name, time, prices, _, further = series
    notes = []
    if (np.diff(time) < 0).any():
        newest_first = (np.diff(time) <= 0).all()
        notes.append(f"{path} is {'newest first' if newest_first else 'not in order'}: its rows were sorted by time.")
    order = np.argsort(time, kind="stable")
    duplicates = np.flatnonzero(np.diff(time[order]) == 0) + 1
    if len(duplicates):
        notes.append(f"{path} has {len(duplicates)} rows with a duplicate time: the first of each is kept.")
        order = np.delete(order, duplicates)
    time, prices, further = time[order], prices[order], further[order]
    if len(time) < 2:
        raise ConfigError(f"{path} has {len(time)} bars.", "Give a file with 2 bars or more.")
    invalid = ~((prices > 0) & (prices < MAX_PRICE)).all(axis=1)
    if invalid.any():
        raise ConfigError(
            f"{path} has {invalid.sum()} bars with an invalid price, the first at {format_time(time[invalid][0])}.",
            "Remove these bars from the file, or fix them.",
        )
    if not (valid := np.isfinite(further)).all():
        bar, column = np.argwhere(~valid)[0]
        raise ConfigError(
            f"{path}: column {features[column]} has {(~valid).sum()} values that are not finite, the first at "
            f"{format_time(time[bar])}.",
            "Fill them with a value that was known at the close of their bar.",
        )
    steps = np.diff(time)
    gaps = np.flatnonzero(steps > 5 * np.median(steps))
    if len(gaps):
        worst = gaps[np.argmax(steps[gaps])]
        notes.append(
            f"{path} has {len(gaps)} gaps of more than five median steps; "
            f"the longest is {steps[worst] / 86_400:.1f} days from {format_time(time[worst])}."
        )
    return PriceSeries(name, time, prices, tuple(notes), further)


def format_time(seconds: float) -> str:
    """Return a date, with the time of the day if it is not midnight."""
    time = datetime.fromtimestamp(seconds, UTC)
    return f"{time:%Y-%m-%d}" if time.hour == time.minute == 0 else f"{time:%Y-%m-%d %H:%M}"


def parse_time(date: str) -> float:
    """Return the seconds since 1970 of a date or time in ISO 8601. Times without a zone are taken as UTC."""
    try:
        return _seconds(datetime.fromisoformat(date))
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{date!r} is not a date.", "Use ISO 8601, as in 2024-05-31 or 2024-05-31T13:00:00."
        ) from None


def _find_columns(header: Sequence[str], columns: Mapping[str, str], path: str) -> dict[str, str]:
    """Return the file's name of each column."""
    unknown = [part for part in columns if part not in COLUMNS]
    unknown += [name for name in columns.values() if name not in header]
    lower = {name.strip().lower(): name for name in reversed(header)}
    found = {part: lower[name] for part, names in COLUMNS.items() for name in reversed(names) if name in lower}
    found |= columns
    missing = [part for part in COLUMNS if part not in found and part != "adjusted"]
    if unknown or missing:
        raise ConfigError(
            f"{path} has no column for {', '.join(unknown + missing)}; it has {', '.join(header)[:200] or 'none'}.",
            "Name the columns: --task.columns time Date open Open high High low Low close Close",
        )
    return found


def _numbers(values: Sequence[Any], name: str, path: str) -> np.ndarray:
    try:
        return np.array(values, np.float64)
    except (TypeError, ValueError) as error:
        reason = str(error)[:100]
        raise ConfigError(f"{path}: column {name} is not all numbers: {reason}.", "Fix the file.") from None


def _times(values: Sequence[Any], path: str) -> np.ndarray:
    """Convert dates, times or numbers to seconds since 1970. Times without a zone are taken as UTC."""
    readers: list[Callable[[Any], float]] = [
        _from_number,
        _seconds,
        lambda text: _seconds(datetime.fromisoformat(text)),
    ]
    for read in [*readers, *map(_parser, TIME_FORMATS)]:
        try:
            seconds = np.array([read(value) for value in values], np.float64)
        except (TypeError, ValueError, AttributeError, OverflowError):
            continue
        if (np.abs(seconds) < MAX_TIME).all():
            return seconds
    raise ConfigError(
        f"{path}: {str(values[0])[:50]!r} is not a known time format.", "Use ISO 8601, as in 2024-05-31 13:00:00."
    )


def _from_number(value: Any) -> float:
    seconds = float(value)
    return seconds / 1000 if seconds > 1e11 else seconds  # beyond the year 5000: these are milliseconds


def _seconds(date: Any) -> float:
    """Convert a datetime or a date to seconds since 1970."""
    hour, minute, second = (getattr(date, unit, 0) for unit in ("hour", "minute", "second"))
    zone = getattr(date, "tzinfo", None) or UTC
    return datetime(date.year, date.month, date.day, hour, minute, second, tzinfo=zone).timestamp()


def _parser(format: str) -> Callable[[Any], float]:
    return lambda value: _seconds(datetime.strptime(value, format))
