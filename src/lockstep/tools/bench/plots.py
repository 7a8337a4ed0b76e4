"""A bench report as a picture: one bar for each measurement, its time split in colours, the bare engine beside it."""

from typing import Any
from xml.sax.saxutils import escape

COLOURS = {
    "env": "#3b82c4",
    "inference": "#38a3a5",
    "loading": "#c98b3b",
    "learning": "#57a773",
    "reduction": "#b565a7",
    "rest": "#8a8f98",
    "bare": "#d9a441",
}
_WIDTH, _LEFT, _ROW = 720, 110, 26
_TEXT = ".bench text{font:12px system-ui,sans-serif;fill:var(--ink,%s)}"
# Standing alone it follows the reader's scheme; inside a page, the page's own colour, and no other text there.
_STYLE = f"{_TEXT % '#222'}@media(prefers-color-scheme:dark){{{_TEXT % '#ddd'}}}"


def draw(reports: list[dict[str, Any]]) -> str:
    """An SVG: milliseconds of one iteration, ours and the bare engine's, on every number of processes."""
    longest = max(max(report["seconds"]["wall"], _bare(report)) for report in reports)
    scale = (_WIDTH - _LEFT - 90) / longest
    parts, y = [f"<text x='0' y='16' font-weight='bold'>{escape(reports[0]['recipe'])}: one iteration</text>"], 34
    for report in reports:
        shares = {part: share * report["seconds"]["wall"] for part, share in report["split"].items()}
        count = report["processes"]
        parts += _bar(f"{count} process{'es' if count > 1 else ''}", shares, y, scale)
        parts += _bar("bare engine", {"bare": _bare(report)}, y + _ROW, scale)
        y += 2 * _ROW + 12
    x = _LEFT
    for name, colour in COLOURS.items():
        parts.append(f"<rect x='{x}' y='{y}' width='12' height='12' fill='{colour}'/>")
        parts.append(f"<text x='{x + 17}' y='{y + 10}'>{name}</text>")
        x += 30 + 8 * len(name)
    body = "".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {y + 24}' role='img' class='bench'>"
        f"<style>{_STYLE}</style>{body}</svg>\n"
    )


def _bare(report: dict[str, Any]) -> float:
    return float(report["ratio_to_bare"] * report["seconds"]["wall"])


def _bar(label: str, shares: dict[str, float], y: int, scale: float) -> list[str]:
    parts, x = [f"<text x='0' y='{y + 14}'>{escape(label)}</text>"], float(_LEFT)
    for name, seconds in shares.items():
        width = seconds * scale
        words = f"{name}: {seconds * 1e3:.1f} ms"
        parts.append(
            f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='{_ROW - 8}' fill='{COLOURS[name]}'>"
            f"<title>{words}</title></rect>"
        )
        x += width
    parts.append(f"<text x='{x + 6:.1f}' y='{y + 14}'>{sum(shares.values()) * 1e3:.0f} ms</text>")
    return parts
