"""Show scenes as text in a terminal, or in a window with pygame-ce."""

import time
from collections.abc import Iterable

from rich.live import Live
from rich.text import Text

from lockstep.config import ConfigError
from lockstep.io.rich_console import PrintableConsole
from lockstep.protocols import Renderable
from lockstep.tools.play.video_files import scale_factor


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
