"""`lockstep eval RUN --opponents ...`: round-robin tournament of teams, with a table, ratings and a plot."""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lockstep.apps.league.matches import Player, play_match, script, submission, trained
from lockstep.apps.league.ratings import Interval, MatchRecord, elo, elo_intervals, wilson
from lockstep.config import ConfigError
from lockstep.inference import load
from lockstep.io.rich_console import PrintableConsole
from lockstep.launch.kernel_compilation import show_status
from lockstep.tasks.team_snakes.opponents import LEVELS
from lockstep.tools.report.html import render


def show_standings(
    run: Path,
    at: int | None,
    opponents: Sequence[str],
    games: int,
    seed: int,
    plots: Path | None,
    as_json: bool,
    timeout: float,
) -> None:
    """Play all pairs of teams and print win rates and ratings. `timeout`: seconds of a submission per decision."""
    if games < 2 or games % 2:
        raise ConfigError(f"--games is {games}.", "Use an even number, because half of them are played on each side.")
    team = trained(_name(run, at), load(run, at))
    requested = [name for opponent in opponents for name in (LEVELS if opponent == "all" else (opponent,))]
    teams = [team, *(find_opponent(name, timeout) for name in requested)]
    names = [player.name for player in teams]
    if len(set(names)) < len(names):
        raise ConfigError(f"a team occurs twice in {', '.join(names)}.", "Use each opponent once.")
    pairs = list(combinations(teams, 2))
    records: dict[tuple[str, str], MatchRecord] = {}
    text = f"of {len(pairs)}, {games} games each"
    with show_status(lambda: f"playing match {len(records) + 1} {text}", shown=not as_json):
        for one, other in pairs:
            records[one.name, other.name] = play_match(one, other, games, seed)
    against = {other: record for (one, other), record in records.items() if one == team.name}
    ratings, intervals = elo(names, records), elo_intervals(names, records, seed)
    console = PrintableConsole()
    if as_json:
        console.print(json.dumps(_as_json(team.name, against, ratings, intervals)), soft_wrap=True)
    else:
        console.print(_table(team.name, against, ratings, intervals, games))
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        path = plots / "league.svg"
        path.write_text(draw(team.name, ratings, intervals, against))
        if not as_json:
            console.print(f"plot: {path}", soft_wrap=True)


def find_opponent(opponent: str, timeout: float) -> Player:
    """Return the team of a command-line argument: a level, a submission, or a run directory with optional @SAMPLES."""
    if opponent in LEVELS:
        return script(LEVELS.index(opponent))
    if opponent.endswith(".py"):
        file = Path(opponent).resolve()
        return submission(f"{file.parent.name}/{file.name}", file, timeout)
    path, _, samples = opponent.partition("@")
    if not Path(path).is_dir() or (samples and not samples.isdigit()):
        raise ConfigError(
            f"there is no opponent '{opponent}'.",
            f"Use all, {', '.join(LEVELS)}, the Python file of a submission, or a run directory, with @SAMPLES for one "
            "of its checkpoints.",
        )
    at = int(samples) if samples else None
    return trained(_name(Path(path), at), load(path, at))


def _name(run: Path, at: int | None) -> str:
    return run.resolve().name + ("" if at is None else f"@{at}")


def _table(
    team: str,
    against: Mapping[str, MatchRecord],
    ratings: Mapping[str, float],
    intervals: Mapping[str, Interval],
    games: int,
) -> Table:
    elo_range = "{:z,.0f} to {:z,.0f}"  # z: no minus sign before 0
    title = f"{team}: Elo {ratings[team]:,.0f} ({elo_range.format(*intervals[team])}), {games:,} games per opponent"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("opponent", overflow="fold")
    for heading in ("won", "95 % CI", "drawn", "score", "Elo", "95 % CI"):
        table.add_column(heading, justify="right")
    for name in sorted(against, key=lambda name: ratings[name]):
        record = against[name]
        low, high = wilson(record.wins, record.games)
        table.add_row(
            name,
            f"{record.win_rate:.1%}",
            f"{low:.0%} - {high:.0%}",
            f"{record.draws / record.games:.1%}",
            f"{record.scored:.1f} : {record.conceded:.1f}",
            f"{ratings[name]:,.0f}",
            elo_range.format(*intervals[name]),
        )
    return table


def _as_json(
    team: str, against: Mapping[str, MatchRecord], ratings: Mapping[str, float], intervals: Mapping[str, Interval]
) -> dict[str, object]:
    matches = {
        name: record._asdict() | {"win_rate": record.win_rate, "interval": wilson(record.wins, record.games)}
        for name, record in against.items()
    }
    return {"team": team, "matches": matches, "elo": dict(ratings), "elo_intervals": dict(intervals)}


def draw(
    team: str,
    ratings: Mapping[str, float],
    intervals: Mapping[str, Interval],
    against: Mapping[str, MatchRecord],
) -> str:
    """Return an SVG with Elo ratings, the strongest on top, and the team's win rates, both with 95 % intervals."""
    ranked = [(name, ratings[name], intervals[name]) for name in sorted(ratings, key=lambda name: -ratings[name])]
    played = [(name, against[name]) for name, _, _ in ranked if name in against]
    rates = [(name, record.win_rate, wilson(record.wins, record.games)) for name, record in played]
    games = sum(record.games for record in against.values()) // max(len(against), 1)
    lowest = min(0.0, *(low for low, _ in intervals.values()))
    highest = max(1.0, *(high for _, high in intervals.values()))
    return render("league.svg.j2", team=team, ratings=ranked, lowest=lowest, highest=highest, rates=rates, games=games)
