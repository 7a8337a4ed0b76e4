"""Render the templates of this package. Every value is escaped unless it is `Markup`."""

from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

MAX_CHARACTERS = 300
"""Characters of an untrusted value that are shown."""


class Table(NamedTuple):
    """Table with row headers in its first column."""

    heads: Sequence[object]
    rows: Sequence[Sequence[object]]
    css_class: str = ""
    """Classes of the style sheet."""
    colors: Sequence[str] = ()
    """CSS color variable of each row."""


def text(value: object, limit: int = MAX_CHARACTERS) -> Markup:
    """Convert any value to escaped, printable text of limited length."""
    if isinstance(value, Markup):
        return value
    shown = str(value)
    shown = shown if len(shown) <= limit else f"{shown[:limit]}…"
    # Unprintable characters may reverse the text direction, and lone surrogates cannot be encoded.
    return escape("".join(c if c.isprintable() or c == "\n" else "�" for c in shown))


def render(template: str, **values: object) -> Markup:
    """Fill in a template. All values pass through `text`."""
    return Markup(_ENVIRONMENT.get_template(template).render(values))


_ENVIRONMENT = Environment(
    loader=PackageLoader("lockstep.tools.report"),
    autoescape=True,
    finalize=text,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"text": text, "tenth": "{:.1f}".format}
