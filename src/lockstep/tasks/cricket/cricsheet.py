"""Cricsheet matches, parsed once and cached as arrays that every process maps into memory.

A delivery has `features`, known before it is bowled (including batter and bowler), and an outcome (`balls`). An example
at delivery t reads the features of t and the outcomes of the deliveries before t, nothing else.

Shapes: D deliveries of all innings, concatenated; I innings; M matches.
"""

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from rich.progress import track

from lockstep.config import ConfigError
from lockstep.io.rich_console import PrintableConsole
from lockstep.io.safe_read import JSON_BYTES, parse_json

VERSION = 1
"""Version of the values of the arrays, part of the checksum: a run cannot resume with those of another version."""
CACHE_VERSION = 2
"""Version of the cached files. A cache of another version is not read; the data is parsed again."""
MAX_VALUE = 1e6
"""Upper limit of any value of an innings."""
MAX_MATCHES, MAX_BYTES = 100_000, 2**32
"""Limits of an archive: matches, and their total bytes. Five times the size of all Cricsheet data."""
BALL = ("bat", "extras", "illegal", "wicket", "over", "batter", "partner", "bowler", "stand", "batters", "bowlers")
"""Columns of `balls`. batter, partner and bowler are slots in order of appearance; batters and bowlers are how many
have appeared so far; stand counts the wickets that fell before."""
FEATURES = (
    *("second", "over", "legal", "left", "to_mark", "runs", "wickets", "rate", "runs_6", "runs_12", "runs_30"),
    *("wickets_12", "wickets_30", "dots_12", "fours_12", "extras", "striker_runs", "striker_balls", "partner_runs"),
    *("partner_balls", "stand_runs", "stand_balls", "bowler_balls", "bowler_runs", "bowler_wickets"),
    *("target", "needed", "needed_rate", "pressure"),
)
"""Columns of `features`: the state of the innings before a delivery."""
BATTERS, BOWLERS = 12, 11
"""Slots of an innings. Later players share the last slot."""


class MatchArchive(NamedTuple):
    """All matches, as arrays."""

    balls: np.ndarray
    """[D, BALL] uint8."""
    features: np.ndarray
    """[D, FEATURES] float32."""
    ahead: np.ndarray
    """[D] float32: runs from this delivery to the next mark."""
    innings_of: np.ndarray
    """[D] int32."""
    innings: np.ndarray
    """[I, 7] int64: first delivery, deliveries, match, which of the two, venue, batting side, bowling side."""
    players: np.ndarray
    """[I, BATTERS + BOWLERS] int32: player in each slot, 0 if empty."""
    matches: np.ndarray
    """[M, 2] int64: date (as in 20170217) and result, sorted by date and id.

    The result is 1 if the side batting second won, 0 if it lost, -1 if there is no regular result.
    """
    teams: tuple[str, ...]
    """Names of the sides, by their number in `innings`."""
    digest: str
    """Checksum of the data, so that a run resumes with the same data."""

    def title(self, innings: int) -> str:
        """Return teams, target and date of a chase."""
        first, _, match, _, _, batting, bowling = (int(value) for value in self.innings[innings])
        date, target = str(self.matches[match, 0]), int(self.features[first, FEATURES.index("target")])
        sides = f"{self.teams[batting]} chase {target} against {self.teams[bowling]}"
        return f"{sides}, {date[:4]}-{date[4:6]}-{date[6:]}"


_ARRAYS = [name for name in MatchArchive._fields if name not in ("teams", "digest")]


def mark_of(over: int) -> int:
    """Return the over (from zero) up to which a score is predicted: five overs ahead, within powerplay and innings."""
    return 5 if over < 5 else 20 if over >= 15 else over + 5


def open_archive(source: Path, cache: Path) -> MatchArchive:
    """Open the arrays of a Cricsheet zip or directory; parse it if they are not cached."""
    digest = _digest(source)
    directory = cache / f"cricket-{CACHE_VERSION}-{digest[:16]}"
    if not directory.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / f".{directory.name}.lock"):  # other processes wait, then find the arrays
                if not directory.is_dir():
                    _build(source, directory, digest)
        except OSError as error:
            raise ConfigError(f"{cache} cannot be written: {error}.", "Choose another --task.cache-dir.") from None
    arrays = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    return MatchArchive(**arrays, teams=tuple(json.loads((directory / "teams.json").read_text())), digest=digest)


def _digest(source: Path) -> str:
    """Hash a file's bytes, or the names and bytes of a directory's files."""
    if not source.exists():
        raise ConfigError(
            f"cricket data {source} does not exist.",
            "Download t20s_male_json.zip from cricsheet.org, or omit --task.data to train on synthetic matches.",
        )
    digest = hashlib.sha256(f"lockstep cricket {VERSION}".encode())
    for path in sorted(source.glob("*.json")) if source.is_dir() else [source]:
        digest.update(path.name.encode() if source.is_dir() else b"")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a file lock, which the system releases when a process dies. Without fcntl, all processes do the work."""
    with lock.open("w") as file:
        with suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(source: Path, directory: Path, digest: str) -> None:
    """Read all matches and publish their arrays with an atomic rename."""
    partial_dir = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        archive = _read(source, digest)
        for name in _ARRAYS:
            np.save(partial_dir / f"{name}.npy", getattr(archive, name), allow_pickle=False)
        (partial_dir / "teams.json").write_text(json.dumps(archive.teams))
        with suppress(OSError):  # another process was faster, with the same data
            os.rename(partial_dir, directory)
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)


class _Innings(NamedTuple):
    """A parsed innings, with players by name."""

    which: int
    balls: list[list[int]]
    features: np.ndarray
    ahead: np.ndarray
    venue: str
    sides: list[str]
    """Batting, bowling."""
    batters: list[str]
    bowlers: list[str]


def _read(source: Path, digest: str) -> MatchArchive:
    console, size = PrintableConsole(stderr=True), 0
    matches: list[tuple[int, str, int, list[_Innings]]] = []  # date, id, result, innings
    with _open_matches(source) as match_files:
        for name, open_match in track(match_files, "reading cricket matches", console=console, transient=True):
            with open_match() as file:
                text = file.read(JSON_BYTES + 1)  # a longer text is refused
            date, result, match_innings = _parse(name, text)
            matches.append((date, name, result, match_innings))
            size += len(text)
            if size > MAX_BYTES:
                raise ConfigError(
                    f"{source} holds more than {MAX_BYTES:,} bytes of matches.", "Give a smaller archive."
                )
    matches.sort(key=lambda match: match[:2])
    played = [(number, innings) for number, (*_, match_innings) in enumerate(matches) for innings in match_innings]
    if not played:
        raise ConfigError(f"{source} holds no match with deliveries.", "Give a Cricsheet archive in JSON form.")
    names: dict[str, dict[str, int]] = {"player": {"": 0}, "venue": {"": 0}, "team": {"": 0}}
    rows, players, start = [], [], 0
    for number, innings in played:
        ids = [_number(names["venue"], innings.venue), *(_number(names["team"], side) for side in innings.sides)]
        rows.append([start, len(innings.balls), number, innings.which, *ids])
        players.append(_player_slots(innings.batters, BATTERS, names) + _player_slots(innings.bowlers, BOWLERS, names))
        start += len(innings.balls)
    return MatchArchive(
        balls=np.array([ball for _, innings in played for ball in innings.balls], np.uint8),
        features=np.concatenate([innings.features for _, innings in played]),
        ahead=np.concatenate([innings.ahead for _, innings in played]),
        innings_of=np.repeat(np.arange(len(rows)), [row[1] for row in rows]).astype(np.int32),
        innings=np.array(rows, np.int64),
        players=np.array(players, np.int32),
        matches=np.array([(date, result) for date, _, result, _ in matches], np.int64),
        teams=tuple(names["team"]),
        digest=digest,
    )


@contextmanager
def _open_matches(source: Path) -> Iterator[list[tuple[str, Callable[[], IO[Any]]]]]:
    """Yield match names with functions that open their text."""
    if source.is_dir():
        yield [(path.stem, partial(path.open, "rb")) for path in sorted(source.glob("*.json"))]
        return
    try:
        with zipfile.ZipFile(source) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".json")]
            entries.sort(key=lambda entry: entry.filename)
            if len(entries) > MAX_MATCHES:
                raise ConfigError(f"{source} has {len(entries):,} files.", f"Use {MAX_MATCHES:,} at most.")
            # Names in an archive are only used as ids: nothing is written under them.
            yield [(Path(entry.filename).stem, partial(archive.open, entry)) for entry in entries]
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"{source} is not a readable zip file: {error}.", "Download it again.") from None


def _parse(name: str, text: bytes) -> tuple[int, int, list[_Innings]]:
    """Return date, result and innings of a match. Raise a ConfigError if it is invalid."""
    try:
        if len(text) > JSON_BYTES:
            raise ValueError(f"it holds more than {JSON_BYTES:,} bytes")
        match = parse_json(text.decode())
        if not str(match["meta"]["data_version"]).startswith("1."):
            raise ValueError(f"its data_version is {match['meta']['data_version']!r}, but only 1.x is supported")
        info, outcome = match["info"], match["info"].get("outcome", {})
        innings = [innings for innings in match.get("innings", []) if not innings.get("super_over")]
        decided = "winner" in outcome and "method" not in outcome and len(innings) >= 2
        result = int(outcome["winner"] == innings[1]["team"]) if decided else -1
        return int(str(info["dates"][0]).replace("-", "")), result, _parse_innings(info, innings)
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"match {name} is not in Cricsheet's JSON form: {type(error).__name__}: {str(error)[:200]}.",
            "Remove it, or download the archive again.",
        ) from None


def _parse_innings(info: dict[str, Any], innings: list[dict[str, Any]]) -> list[_Innings]:
    """Parse the first two innings. The target of the second is in the data, or one more than the runs of the first."""
    parsed, first_runs = [], 0
    for which, played in enumerate(innings[:2]):
        deliveries = [(int(over["over"]), ball) for over in played.get("overs", []) for ball in over["deliveries"]]
        target = int(played.get("target", {}).get("runs") or first_runs + 1) if which else 0
        if not deliveries:
            continue
        builder = InningsBuilder(which, target)
        rows = [builder.add(over, ball) for over, ball in deliveries]
        first_runs = builder.runs
        features, ahead = builder.finish([features for _, features in rows]), builder.ahead()
        if not (np.abs(features).max() < MAX_VALUE and np.abs(ahead).max() < MAX_VALUE):
            raise ValueError("it has values out of range")
        sides = [str(played["team"]), *(str(team) for team in info["teams"] if team != played["team"])][:2]
        if len(sides) < 2:
            raise ValueError(f"its teams are {info['teams']}, not two")
        players = ([str(name) for name in names] for names in (builder.batters, builder.bowlers))
        balls = [ball for ball, _ in rows]
        arrays = features.astype(np.float32), ahead.astype(np.float32)
        parsed.append(_Innings(which, balls, *arrays, str(info.get("venue", "")), sides, *players))
    return parsed


def _number(names: dict[str, int], name: str) -> int:
    return names.setdefault(name, len(names))


def _player_slots(players: Sequence[str], slots: int, names: dict[str, dict[str, int]]) -> list[int]:
    numbers = [_number(names["player"], name) for name in players][:slots]
    return numbers + [0] * (slots - len(numbers))


class InningsBuilder:
    """Scorebook of one innings: computes what is known before each delivery."""

    def __init__(self, which: int, target: int) -> None:
        self.which, self.target = which, target
        self.batters: dict[str, int] = {}
        self.bowlers: dict[str, int] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.runs = self.wickets = self.legal = self.extras = self.stand_runs = self.stand_balls = 0
        self.past: list[tuple[int, int, int, int]] = []  # total runs, wicket, dot ball, boundary
        self.overs: list[int] = []

    def add(self, over: int, ball: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Return the columns of a delivery and the features before it, then record it."""
        batter, partner, bowler = ball["batter"], ball["non_striker"], ball["bowler"]
        slots = [min(_number(self.batters, name), BATTERS - 1) for name in (batter, partner)]
        slots.append(min(_number(self.bowlers, bowler), BOWLERS - 1))
        appeared = [min(len(self.batters), BATTERS), min(len(self.bowlers), BOWLERS)]
        features = self._state(over, batter, partner, bowler)
        extras, bat, total = ball.get("extras", {}), ball["runs"]["batter"], ball["runs"]["total"]
        illegal = int("wides" in extras or "noballs" in extras)
        # A batter who retires hurt or not out may return: no wicket.
        wickets = sum(w["kind"] not in ("retired hurt", "retired not out") for w in ball.get("wickets", []))
        columns = [bat, total - bat, illegal, wickets, over, *slots, min(self.wickets, BATTERS - 1), *appeared]
        counts = self.counts
        counts["runs", batter] += bat
        counts["balls", batter] += "wides" not in extras
        counts["bowled", bowler] += 1 - illegal
        counts["conceded", bowler] += total - extras.get("byes", 0) - extras.get("legbyes", 0)
        counts["wickets", bowler] += sum(w["kind"] not in ("run out", "retired out") for w in ball.get("wickets", []))
        self.runs, self.legal, self.extras = self.runs + total, self.legal + 1 - illegal, self.extras + total - bat
        self.stand_runs, self.stand_balls = (0, 0) if wickets else (self.stand_runs + total, self.stand_balls + 1)
        self.wickets += wickets
        self.past.append((total, wickets, int(total == 0), int(bat >= 4)))
        self.overs.append(over)
        return [min(255, max(0, int(column))) for column in columns], features

    def _state(self, over: int, batter: str, partner: str, bowler: str) -> list[float]:
        counts, remaining = self.counts, max(1, 120 - self.legal)
        to_mark = max(1, mark_of(over) * 6 - self.legal)
        needed = max(0, self.target - self.runs) if self.which else 0
        needed_rate = min(36.0, needed * 6 / remaining)
        return [
            *(self.which, over, self.legal, remaining, to_mark, self.runs, self.wickets),
            *(self.runs * 6 / max(1, self.legal), 0, 0, 0, 0, 0, 0, 0, self.extras),
            *(counts["runs", batter], counts["balls", batter], counts["runs", partner], counts["balls", partner]),
            *(self.stand_runs, self.stand_balls),
            *(counts["bowled", bowler], counts["conceded", bowler], counts["wickets", bowler]),
            *(self.target, needed, needed_rate, needed_rate * (1 + self.wickets) / 10),
        ]

    def finish(self, rows: Sequence[Sequence[float]]) -> np.ndarray:
        """Return the features of all deliveries, with the sums over recent deliveries."""
        table = np.array(rows, np.float64)
        sums = np.concatenate([np.zeros((1, 4)), np.cumsum(np.array(self.past), axis=0)])
        index = np.arange(len(rows))
        for name, column, window in _WINDOWS:
            table[:, FEATURES.index(name)] = sums[index, column] - sums[np.maximum(0, index - window), column]
        return table

    def ahead(self) -> np.ndarray:
        """Return the runs from each delivery to its mark."""
        overs, total = np.array(self.overs), np.array(self.past)[:, 0]
        sums = np.concatenate([[0], np.cumsum(total)])
        marks = np.array([mark_of(over) for over in self.overs])
        ends = np.searchsorted(np.maximum.accumulate(overs), marks, side="left")
        return sums[np.maximum(ends, np.arange(len(ends)))] - sums[:-1]


_WINDOWS = (
    *(("runs_6", 0, 6), ("runs_12", 0, 12), ("runs_30", 0, 30), ("wickets_12", 1, 12), ("wickets_30", 1, 30)),
    *(("dots_12", 2, 12), ("fours_12", 3, 12)),
)
"""Features over recent deliveries: name, column of `past`, window."""
