"""Untrusted data: invalid price files, Parquet files and match archives are refused with a message."""

import csv
import io
import json
import resource
import struct
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.io.safe_read import JSON_BYTES
from lockstep.tasks.cricket import cricsheet
from lockstep.tasks.cricket.cricsheet import open_archive
from lockstep.tasks.cricket.synthetic import write_matches
from lockstep.tasks.trading import price_data
from lockstep.tasks.trading.price_data import read_bars

HEAD = b"date,open,high,low,close\n"
ROWS = b"2024-01-01,1,1,1,1\n2024-01-02,2,2,2,2\n"

CSVS = {
    "nothing": (b"", "has no column for time"),
    "a head alone": (HEAD, "has 0 bars"),
    "bytes": (b"\xff\xfe\x00" * 100, "is not a CSV file"),
    "a zero byte in a number": (HEAD + b"2024-01-01,1\0,1,1,1\n" + ROWS, "column open is not all numbers"),
    "a field of a megabyte": (HEAD + b'2024-01-01,"' + b"1" * 2**20 + b'",1,1,1\n', "is not a CSV file"),
    "a quote that is never closed": (HEAD + b'"2024-01-01,1,1,1,1\n' + ROWS, "row 1 has 1 fields"),
    "a short row": (HEAD + b"2024-01-01,1,1\n", "row 1 has 3 fields"),
    "a million columns": (b"," * 10**6 + b"\n", "has no column for time"),
    "an infinite price": (HEAD + ROWS + b"2024-01-03,1,inf,1,1\n", "1 bars with an invalid price"),
    "a price that is no number": (HEAD + ROWS + b"2024-01-03,1,nan,1,1\n", "1 bars with an invalid price"),
    "a price beyond all": (HEAD + ROWS + b"2024-01-03,1,1e300,1,1\n", "1 bars with an invalid price"),
    "a price that overflows": (HEAD + ROWS + b"2024-01-03,1,1e999,1,1\n", "1 bars with an invalid price"),
    "a price below zero": (HEAD + ROWS + b"2024-01-03,1,1,-1,1\n", "1 bars with an invalid price"),
    "a formula": (HEAD + ROWS + b"2024-01-03,=1+1,1,1,1\n", "column open is not all numbers"),
    "a time without end": (HEAD + b"inf,1,1,1,1\n" + b"1,1,1,1,1\n", "'inf' is not a known time"),
    "a time that is no number": (HEAD + b"nan,1,1,1,1\n" + b"1,1,1,1,1\n", "'nan' is not a known time"),
    "a time beyond all": (HEAD + b"1e300,1,1,1,1\n" + b"1,1,1,1,1\n", "'1e300' is not a known time"),
    "a day that is none": (HEAD + b"2024-02-31,1,1,1,1\n" + ROWS, "'2024-02-31' is not a known time"),
    "a long time": (HEAD + b"9" * 5000 + b",1,1,1,1\n" + ROWS, "is not a known time"),
    "adjusted to nothing": (
        b"date,open,high,low,close,adjusted\n2024-01-01,1,1,1,1,0\n2024-01-02,1,1,1,1,1\n",
        "1 bars with an invalid price",
    ),
    "closed at nothing": (
        b"date,open,high,low,close,adjusted\n2024-01-01,1,1,1,0,1\n2024-01-02,1,1,1,1,1\n",
        "1 bars with an invalid price",
    ),
}


def assert_refused(path, content, sentence):
    """Check that a price file is refused with a short message."""
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_bars(str(path), {})
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(("text", "sentence"), CSVS.values(), ids=CSVS)
def test_read_bars_invalid_csv_is_refused(tmp_path, text, sentence):
    assert_refused(tmp_path / "a.csv", text, sentence)


def test_read_bars_terabyte_csv_is_refused_without_reading_it(tmp_path):
    with (tmp_path / "a.csv").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="holds more than"):
        read_bars(str(tmp_path / "a.csv"), {})


def parquet(**columns):
    sound = {"date": ["2024-01-01", "2024-01-02"], **{name: [1.0, 2.0] for name in ("open", "high", "low", "close")}}
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(sound | columns), out)
    return out.getvalue()


PARQUETS = {
    "nothing": (b"", "is not a Parquet file"),
    "text": (HEAD + ROWS, "is not a Parquet file"),
    "half of one": (parquet()[: len(parquet()) // 2], "is not a Parquet file"),
    "no footer": (parquet()[:-8] + b"\0\0\0\0PAR1", "is not a Parquet file"),
    "a footer of two gigabytes": (parquet()[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1", "is not a Parquet file"),
    "lists for prices": (parquet(open=[[1.0], [2.0, 3.0]]), "column open is not all numbers"),
    "tables for prices": (parquet(open=[{"a": 1}, {"a": 2}]), "column open is not all numbers"),
    "bytes for prices": (parquet(open=[b"x", b"y"]), "column open is not all numbers"),
    "nothing for prices": (parquet(open=[None, 1.0]), "bars with an invalid price"),
    "nothing for times": (parquet(date=[None, None]), "is not a known time"),
    "lists for times": (parquet(date=[[1], [2]]), "is not a known time"),
}


@pytest.mark.parametrize(("content", "sentence"), PARQUETS.values(), ids=PARQUETS)
def test_read_bars_invalid_parquet_is_refused(tmp_path, content, sentence):
    assert_refused(tmp_path / "a.parquet", content, sentence)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_read_bars_with_too_many_rows_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(price_data, "MAX_ROWS", 1)
    (tmp_path / name).write_bytes(parquet() if name == "a.parquet" else HEAD + ROWS)
    with pytest.raises(ConfigError, match="has more than 1 rows"):
        read_bars(str(tmp_path / name), {})


# -- archives of matches -----------------------------------------------------------------------------------------------


def sound_match():
    """Return a valid match."""
    ball = {"batter": "a", "non_striker": "b", "bowler": "c", "runs": {"batter": 1, "extras": 0, "total": 1}}
    overs = [{"over": 0, "deliveries": [ball] * 6}]
    info = {"dates": ["2024-01-01"], "teams": ["One", "Two"], "venue": "here", "outcome": {"winner": "Two"}}
    innings = [{"team": "One", "overs": overs}, {"team": "Two", "overs": overs}]
    return {"meta": {"data_version": "1.1.0"}, "info": info, "innings": innings}


def changed(path, value):
    """Return the valid match with one value replaced, or removed if the value is `...`."""
    match = json.loads(json.dumps(sound_match()))
    place = match
    for name in path[:-1]:
        place = place[name]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return match


BALL = ("innings", 0, "overs", 0, "deliveries", 0)
MATCHES = {
    "a list": [],
    "a number": 7,
    "no info": changed(("info",), ...),
    "info in words": changed(("info",), "played"),
    "no dates": changed(("info", "dates"), []),
    "a date in words": changed(("info", "dates"), ["monday"]),
    "dates that are a number": changed(("info", "dates"), 7),
    "no teams": changed(("info", "teams"), ...),
    "one team": changed(("info", "teams"), ["One"]),
    "innings that are a number": changed(("innings",), 7),
    "innings of numbers": changed(("innings",), [1, 2]),
    "no team in an innings": changed(("innings", 0, "team"), ...),
    "an over in words": changed(("innings", 0, "overs", 0, "over"), "first"),
    "an over without deliveries": changed(("innings", 0, "overs", 0), {"over": 0}),
    "a delivery that is a number": changed(BALL, 7),
    "no batter": changed((*BALL, "batter"), ...),
    "a batter that is a list": changed((*BALL, "batter"), ["a"]),
    "no runs": changed((*BALL, "runs"), ...),
    "runs in words": changed((*BALL, "runs", "total"), "many"),
    "runs beyond all": changed((*BALL, "runs", "total"), 10**400),
    "endless runs": changed((*BALL, "runs", "total"), 1e300),
    "wickets without a kind": changed((*BALL, "wickets"), [{}]),
    "a target in words": changed(("innings", 1, "target"), {"runs": "all"}),
    "an outcome that is a number": changed(("info", "outcome"), 7),
}


@pytest.mark.parametrize("match", MATCHES.values(), ids=MATCHES)
def test_open_archive_invalid_match_is_refused_and_not_cached(tmp_path, match):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "17.json").write_text(json.dumps(match))
    with pytest.raises(ConfigError, match="match 17 is not in Cricsheet's JSON form") as refused:
        open_archive(tmp_path / "data", tmp_path / "cache")
    assert len(str(refused.value)) < 1000
    assert not list((tmp_path / "cache").glob("cricket-*"))  # nothing is cached


def zipped(path, **entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries.items():
            archive.writestr(name, text)
    return path


def test_open_archive_path_traversal_in_names_writes_nothing(tmp_path):
    text = json.dumps(sound_match())
    path = zipped(tmp_path / "x.zip", **{"../../17.json": text, "/etc/18.json": text, "..\\19.json": text})
    found = open_archive(path, tmp_path / "inside" / "cache")
    assert len(found.matches) == 3
    assert {entry.name for entry in tmp_path.iterdir()} == {"x.zip", "inside"}


def test_open_archive_zip_bomb_is_refused_within_memory_bound(tmp_path, monkeypatch):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = zipped(tmp_path / "x.zip", **{"1.json": b" " * (64 * 2**20)})
    with pytest.raises(ConfigError, match="holds more than 4,194,304 bytes"):
        open_archive(path, tmp_path / "cache")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 64 * 2**20 + 8 * JSON_BYTES
    monkeypatch.setattr(cricsheet, "MAX_BYTES", 2 * len(json.dumps(sound_match())))
    path = zipped(tmp_path / "y.zip", **{f"{n}.json": json.dumps(sound_match()) for n in range(3)})
    with pytest.raises(ConfigError, match="bytes of matches"):
        open_archive(path, tmp_path / "cache")
    monkeypatch.setattr(cricsheet, "MAX_MATCHES", 2)
    with pytest.raises(ConfigError, match="has 3 files"):
        open_archive(path, tmp_path / "cache")


def damaged(content, kind):
    match kind:
        case "half":
            return content[: len(content) // 2]
        case "no directory":
            return content[:-22]
        case "a flipped byte":
            place = content.index(b".json") + 40
            return content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]
        case "encrypted":
            central = content.index(b"PK\1\2")
            return content[: central + 8] + b"\1\0" + content[central + 10 :]
        case "an unknown method":
            central = content.index(b"PK\1\2")
            return content[: central + 10] + b"\x63\0" + content[central + 12 :]


@pytest.mark.parametrize("kind", ["half", "no directory", "a flipped byte", "encrypted", "an unknown method"])
def test_open_archive_damaged_zip_is_refused(tmp_path, kind):
    path = zipped(tmp_path / "x.zip", **{"17.json": json.dumps(sound_match())})
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.raises(ConfigError, match=r"not a readable zip|match 17"):
        open_archive(path, tmp_path / "cache")


# -- random inputs -----------------------------------------------------------------------------------------------------

MUCH = settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["over", "runs", "x"]), inner),
    max_leaves=5,
)


def places(tree, before=()):
    """Yield the path of every value in a match."""
    yield before
    for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(part, (*before, name))


@MUCH
@given(st.sampled_from([place for place in places(sound_match()) if place]), anything)
def test_match_with_random_value_is_read_or_refused(tmp_path, place, value):
    text = json.dumps(changed(place, value)).encode()
    try:
        *_, innings = cricsheet._parse("17", text)
    except ConfigError:
        return
    assert all(np.isfinite(part.features).all() and len(part.sides) == 2 for part in innings)


@MUCH
@given(st.lists(st.lists(st.text(max_size=8) | st.just("2024-01-01") | st.floats().map(str), min_size=5, max_size=5)))
def test_csv_with_random_rows_is_read_or_refused(tmp_path, rows):
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8", errors="replace") as file:
        csv.writer(file).writerows([["date", "open", "high", "low", "close"], *rows])
    try:
        found = read_bars(str(tmp_path / "a.csv"), {})
    except ConfigError:
        return
    assert (np.diff(found.time) > 0).all()
    assert (found.prices > 0).all()


@MUCH
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_parquet_with_changed_byte_is_read_or_refused(tmp_path, place, byte):
    content = bytearray(parquet())
    content[place % len(content)] = byte
    (tmp_path / "a.parquet").write_bytes(content)
    try:
        read_bars(str(tmp_path / "a.parquet"), {})
    except ConfigError:
        return


def test_synthetic_matches_are_valid(tmp_path):
    write_matches(tmp_path / "x.zip", 20)
    assert len(open_archive(tmp_path / "x.zip", tmp_path / "cache").matches) == 20
