"""Markup by construction: what goes into the page is escaped, unless it was made here."""

import html
from collections.abc import Iterable
from typing import Any

LONGEST = 300
"""Letters of a stranger's word that are shown."""


EMPTY = ("img", "br")
"""Elements that hold nothing, and have no end."""


class Markup(str):
    """Text that is markup already; any other is escaped on its way into the page."""

    __slots__ = ()


def text(value: object, limit: int = LONGEST) -> Markup:
    """Any value as text: short, printable, escaped."""
    if isinstance(value, Markup):
        return value
    words = str(value)
    words = words if len(words) <= limit else f"{words[:limit]}…"
    # What cannot be printed may turn the direction of a line, or be half a letter that no file can hold.
    return Markup(html.escape("".join(c if c.isprintable() or c == "\n" else "�" for c in words)))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element; attributes that are None are left out, `class_` is class."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in EMPTY:
        return Markup(f"<{name}{named}>")
    return Markup(f"<{name}{named}>{''.join(text(part) for part in inside)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Several in a row."""
    return Markup(between.join(text(part) for part in parts))


def table(heads: Iterable[object], rows: Iterable[Iterable[object]], class_: str | None = None) -> Markup:
    """A table whose first column names its rows; it scrolls by itself where the page is narrow."""
    head = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in heads)))
    body = tag("tbody", *(tag("tr", *_cells(row)) for row in rows))
    return tag("div", tag("table", head, body, class_=class_), class_="scroll")


def _cells(row: Iterable[object]) -> list[Markup]:
    first, *others = row
    return [tag("th", first, scope="row"), *(tag("td", each) for each in others)]


def details(summary: object, *inside: Any, open_: bool = False) -> Markup:
    """What is there for whoever asks."""
    return tag("details", tag("summary", summary), *inside, open="open" if open_ else None)
