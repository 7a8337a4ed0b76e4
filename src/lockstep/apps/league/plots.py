"""A ladder as a picture (SVG): who stands where, and how often the team of a run wins against each of them."""

from collections.abc import Mapping
from xml.sax.saxutils import escape

from lockstep.apps.league.ratings import MatchRecord, wilson

_OURS, _OTHERS, _GRID = "#1f6fb4", "#8a8f98", "#8884"
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 840, 270, 90, 30, 56
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.title{font-weight:bold;font-size:15px}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


def draw(team: str, ratings: Mapping[str, float], against: Mapping[str, MatchRecord]) -> str:
    """An SVG of two parts: Elo ratings, the strongest on top, and the team's win rates with 95 % intervals."""
    ranked = sorted(ratings, key=lambda name: -ratings[name])
    met = [name for name in ranked if name in against]
    height = _TOP + len(ranked) * _ROW + _TOP + len(met) * _ROW + 40
    parts = [_title("Elo rating: 400 points are ten wins for one loss", 24)]
    parts += _bars(team, ranked, ratings)
    top = _TOP + len(ranked) * _ROW + _TOP
    games = sum(record.games for record in against.values()) // max(len(against), 1)
    parts.append(_title(f"Games won by {team}, of {games:,} against each", top - 32))
    parts += _rates(met, against, top)
    body = "".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img'>"
        f"<style>{_STYLE}</style>{body}</svg>\n"
    )


def _bars(team: str, ranked: list[str], ratings: Mapping[str, float]) -> list[str]:
    scale = _span() / max(*ratings.values(), 1.0)
    parts = []
    for place, name in enumerate(ranked):
        y, width = _TOP + place * _ROW, max(ratings[name] * scale, 2.0)
        colour = _OURS if name == team else _OTHERS
        parts += [
            _label(name, y),
            f"<rect x='{_LEFT}' y='{y - 9}' width='{width:.1f}' height='18' rx='3' fill='{colour}'/>",
            f"<text x='{_LEFT + width + 8:.1f}' y='{y + 5}'>{ratings[name]:,.0f}</text>",
        ]
    return parts


def _rates(met: list[str], against: Mapping[str, MatchRecord], top: int) -> list[str]:
    bottom = top + len(met) * _ROW
    parts = []
    for percent in (0, 25, 50, 75, 100):
        x = _LEFT + percent / 100 * _span()
        parts += [
            f"<line x1='{x}' y1='{top - 18}' x2='{x}' y2='{bottom - 12}' stroke='{_GRID}'/>",
            f"<text x='{x}' y='{bottom + 6}' text-anchor='middle'>{percent} %</text>",
        ]
    for place, name in enumerate(met):
        y, record = top + place * _ROW, against[name]
        low, high = (_LEFT + part * _span() for part in wilson(record.wins, record.games))
        parts += [
            _label(name, y),
            f"<line x1='{low:.1f}' y1='{y}' x2='{high:.1f}' y2='{y}' stroke='{_OURS}' stroke-width='5' opacity='.45'/>",
            f"<circle cx='{_LEFT + record.win_rate * _span():.1f}' cy='{y}' r='5' fill='{_OURS}'/>",
            f"<text x='{_WIDTH - _RIGHT + 18}' y='{y + 5}'>{record.win_rate:.1%}</text>",
        ]
    return parts


def _span() -> int:
    return _WIDTH - _LEFT - _RIGHT


def _title(words: str, y: int) -> str:
    return f"<text class='title' x='12' y='{y}'>{escape(words)}</text>"


def _label(name: str, y: float) -> str:
    return f"<text x='{_LEFT - 12}' y='{y + 5}' text-anchor='end'>{escape(name)}</text>"
