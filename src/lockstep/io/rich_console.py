"""Rich console of all commands. Escapes control characters and prints markup as plain text by default."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from lockstep.io.printable import printable


class PrintableConsole(RichConsole):
    """Rich console for text that may come from untrusted files.

    Strings have no markup and no highlighting by default: `[/b]` in the name of a run is text, not a tag.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False} | settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Escape strings before layout, so that columns keep their widths."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Escape all other text. Control segments come from rich itself, such as cursor movements of a live panel."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(printable(text), style)

    def status(self, status: RenderableType, **settings: Any) -> Status:
        """Create a spinner with plain text; rich would interpret markup in a string."""
        return _Status(_as_text(status), console=self, **settings)


class _Status(Status):
    def update(self, status: RenderableType | None = None, **settings: Any) -> None:
        super().update(_as_text(status), **settings)


def _as_text(status: RenderableType | None) -> Any:
    return Text(status) if isinstance(status, str) else status
