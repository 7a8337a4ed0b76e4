"""Price files: sorting, adjustment, timestamp formats, column names and validation."""

from datetime import datetime

import numpy as np
import pytest

from lockstep.config import ConfigError
from lockstep.tasks.trading.price_data import CLOSE, OPEN, read_bars


def write(path, text):
    path.write_text(text)
    return str(path)


def test_read_bars_newest_first_file_is_sorted_by_time_and_noted(tmp_path):
    bars = read_bars(
        write(tmp_path / "a.csv", "date,open,high,low,close\n2024-01-03,3,3,3,3\n2024-01-02,2,2,2,2\n"), {}
    )
    assert bars.prices[:, OPEN].tolist() == [2, 3]
    assert np.diff(bars.time).tolist() == [86_400]
    assert "newest first" in bars.notes[0]


def test_read_bars_notes_duplicate_times_and_gaps(tmp_path):
    days = [1, 2, 3, 3, 4, 5, 20, 21]
    rows = "\n".join(f"2024-01-{day:02},{n + 1},{n + 1},{n + 1},{n + 1}" for n, day in enumerate(days))
    bars = read_bars(write(tmp_path / "a.csv", f"Date,Open,High,Low,Close\n{rows}\n"), {})
    assert bars.prices[:, CLOSE].tolist() == [1, 2, 3, 5, 6, 7, 8]  # the first of the two duplicates is kept
    assert len(bars.notes) == 2
    assert "1 rows with a duplicate time" in bars.notes[0]
    assert "1 gaps" in bars.notes[1]
    assert "15.0 days from 2024-01-05" in bars.notes[1]


def test_read_bars_adjusted_close_scales_all_prices(tmp_path):
    text = "Date,Open,High,Low,Close,Adj Close\n2024-01-01,8,12,6,10,5\n2024-01-02,10,10,10,10,10\n"
    bars = read_bars(write(tmp_path / "a.csv", text), {})
    assert bars.prices.tolist() == [[4, 6, 3, 5], [10, 10, 10, 10]]


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        ("1646092800", "1646096400", 3600),
        ("1646092800000", "1646096400000", 3600),
        ("01.01.2017 22:00:00.000", "01.01.2017 23:00:00.000", 3600),
        ("2017-01-01T22:00:00+00:00", "2017-01-01T22:01:00+00:00", 60),
        ("12/31/2016", "01/01/2017", 86_400),
    ],
)
def test_read_bars_parses_all_supported_time_formats(tmp_path, first, second, apart):
    text = f"Time,Open,High,Low,Close\n{first},1,1,1,1\n{second},2,2,2,2\n"
    assert np.diff(read_bars(write(tmp_path / "a.csv", text), {}).time).tolist() == [apart]


def test_read_bars_uses_configured_column_names(tmp_path):
    path = write(tmp_path / "a.csv", "t,o,h,l,c\n1,1,4,1,2\n2,2,4,2,3\n")
    with pytest.raises(ConfigError, match="no column for time, open, high, low, close; it has t, o, h, l, c"):
        read_bars(path, {})
    bars = read_bars(path, {"time": "t", "open": "o", "high": "h", "low": "l", "close": "c"})
    assert bars.prices.tolist() == [[1, 4, 1, 2], [2, 4, 2, 3]]
    with pytest.raises(ConfigError, match="no column for x"):
        read_bars(path, {"time": "x", "open": "o", "high": "h", "low": "l", "close": "c"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("date,open,high,low,close\n2024-01-01,1,1,1,0\n2024-01-02,1,1,1,1\n", "1 bars with an invalid price"),
        ("date,open,high,low,close\n2024-01-01,1,1,1,x\n2024-01-02,1,1,1,1\n", "column close is not all numbers"),
        ("date,open,high,low,close\nmonday,1,1,1,1\ntuesday,1,1,1,1\n", "'monday' is not a known time"),
        ("date,open,high,low,close\n2024-01-01,1,1\n", "row 1 has 3 fields, its header 5"),
        ("date,open,high,low,close\n2024-01-01,1,1,1,1\n", "has 1 bars"),
    ],
)
def test_read_bars_invalid_content_raises_config_error(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        read_bars(write(tmp_path / "a.csv", text), {})


def test_read_bars_missing_file_error_names_path(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv does not exist"):
        read_bars(str(tmp_path / "none.csv"), {})


def test_read_bars_parquet_matches_csv_behavior(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    days = [datetime(2024, 1, day) for day in (2, 1)]
    columns = {name: [2.0, 1.0] for name in ("Open", "High", "Low", "Close")}
    parquet.write_table(arrow.table({"Date": days, **columns}), tmp_path / "a.parquet")
    bars = read_bars(str(tmp_path / "a.parquet"), {})
    assert bars.prices[:, OPEN].tolist() == [1, 2]
    assert np.diff(bars.time).tolist() == [86_400]
