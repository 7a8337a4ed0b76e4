"""Show scenes in a terminal, as text or images, or in a window with pygame-ce."""

import time
from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.live import Live
from rich.text import Text

from lockstep.config import ConfigError
from lockstep.io.rich_console import PrintableConsole
from lockstep.protocols import Renderable
from lockstep.tools.play.half_blocks import as_half_blocks
from lockstep.tools.play.video_files import scale_factor


def show_in_terminal(scenes: Iterable[Renderable], fps: float) -> None:
    """Show scenes at `fps` in a terminal. Print only the last scene if the output is not a terminal."""
    console, results = PrintableConsole(), list[str]()
    scenes = _with_results(scenes, results)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for scene in scenes:
                live.update(_as_text(scene, console), refresh=True)
                time.sleep(1.0 / fps)
    else:
        last = ""
        for scene in scenes:
            last = scene.render_text()
        console.print(last, soft_wrap=True)
    for line in results:
        console.print(line, soft_wrap=True)


def _with_results(scenes: Iterable[Renderable], results: list[str]) -> Iterator[Renderable]:
    """Yield scenes, and append the result of each episode after its last scene."""
    for result, group in groupby(scenes, key=lambda scene: getattr(scene, "result", None)):
        yield from group
        if result is not None:
            results.append(result())


def _as_text(scene: Renderable, console: PrintableConsole) -> Text:
    """Return a scene as text, with its image if the text has no board and the terminal has 24-bit color."""
    text = scene.render_text()
    if not hasattr(scene, "terminal_image") or console.color_system != "truecolor":
        return Text(text)
    lines = console.height - len(Text(text).wrap(console, console.width)) - 1
    try:
        image = scene.terminal_image()
        return Text(text) if image is None else as_half_blocks(image, console.width, max(1, lines)).append(text)
    except ConfigError as error:  # a package or a display is missing
        return Text(f"{text}\nno image: {error}")


def show_in_window(scenes: Iterable[Renderable], fps: float) -> None:
    """Show scenes until they end or the window is closed."""
    try:
        import pygame
    except ImportError:
        raise ConfigError(
            "a window needs pygame-ce, which is not installed.", "pip install 'lockstep-rl[play]'"
        ) from None
    try:
        pygame.display.init()
        pygame.display.set_caption("Lockstep")
        clock, window = pygame.time.Clock(), None
        for scene in scenes:
            frame = scene.render()
            height, width = frame.shape[:2]
            factor = scale_factor(frame)
            window = window or pygame.display.set_mode((factor * width, factor * height))
            surface = pygame.surfarray.make_surface(frame.swapaxes(0, 1))
            window.blit(pygame.transform.scale(surface, window.get_size()), (0, 0))
            pygame.display.flip()
            clock.tick(fps)
            for event in pygame.event.get():
                quit_key = event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)
                if quit_key or event.type == pygame.QUIT:
                    return
    except pygame.error as error:
        raise ConfigError(
            f"cannot open a window: {error}.", "Use --gif FILE, or no flag to play in the terminal."
        ) from error
    finally:
        pygame.display.quit()
