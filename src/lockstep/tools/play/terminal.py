"""Show scenes as text in a terminal."""

import time
from collections.abc import Iterable

from rich.live import Live
from rich.text import Text

from lockstep.io.rich_console import PrintableConsole
from lockstep.protocols import Renderable


def show_in_terminal(scenes: Iterable[Renderable], fps: float) -> None:
    """Show scenes at `fps` in a terminal. Print only the last scene if the output is not a terminal."""
    console = PrintableConsole()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for scene in scenes:
                live.update(Text(scene.render_text()), refresh=True)
                time.sleep(1.0 / fps)
        return
    last = ""
    for scene in scenes:
        last = scene.render_text()
    console.print(last, soft_wrap=True)
