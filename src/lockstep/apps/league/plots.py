"""Plot (SVG) of Elo ratings and of the win rates of a run's team."""

from collections.abc import Mapping

from lockstep.apps.league.ratings import MatchRecord, wilson
from lockstep.tools.report.html import render


def draw(team: str, ratings: Mapping[str, float], against: Mapping[str, MatchRecord]) -> str:
    """Return an SVG with Elo ratings, the strongest on top, and the team's win rates with 95 % intervals."""
    ranked = sorted(ratings.items(), key=lambda rated: -rated[1])
    met = [(name, against[name]) for name, _ in ranked if name in against]
    rates = [(name, record.win_rate, wilson(record.wins, record.games)) for name, record in met]
    games = sum(record.games for record in against.values()) // max(len(against), 1)
    return render("league.svg.j2", team=team, ratings=ranked, rates=rates, games=games)
