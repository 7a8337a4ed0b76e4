"""Watch a policy: in the terminal, in a window, or as a GIF."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.live import Live
from rich.progress import track
from rich.text import Text

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.loading import LoadedPolicy
from lockstep.protocols import VecEnv


def play_terminal(policy: LoadedPolicy, episodes: int, seed: int, fps: float, max_steps: int) -> None:
    """Show episodes as characters, at a steady pace where there is a terminal."""
    console = Console()
    moving = sys.stdout.isatty()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        for env, total, length in _steps(policy, episodes, seed, max_steps):
            line = f"step {length}  return {total:.2f}"
            live.update(Text(f"{env.text(0)}\n{line}"), refresh=moving)
            if moving:
                time.sleep(1.0 / fps)


def play_window(policy: LoadedPolicy, episodes: int, seed: int, fps: float, max_steps: int) -> None:
    """Show episodes in a window, until they end or it is closed."""
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
        for env, _, _ in _steps(policy, episodes, seed, max_steps):
            frame = env.frame(0)
            height, width = frame.shape[:2]
            times = max(1, 640 // max(height, width))  # small pictures are shown larger
            window = window or pygame.display.set_mode((times * width, times * height))
            picture = pygame.surfarray.make_surface(frame.swapaxes(0, 1))
            window.blit(pygame.transform.scale(picture, window.get_size()), (0, 0))
            pygame.display.flip()
            clock.tick(fps)
            if any(event.type == pygame.QUIT or _is_farewell(event) for event in pygame.event.get()):
                return
    except pygame.error as error:
        raise ConfigError(
            f"no window can be opened here: {error}.", "Use --gif FILE, or no flag for the terminal."
        ) from error
    finally:
        pygame.display.quit()


def _is_farewell(event: Any) -> bool:
    """Whether Escape or q was pressed."""
    import pygame

    return bool(event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q))


def play_gif(policy: LoadedPolicy, episodes: int, seed: int, fps: float, max_steps: int, path: Path) -> None:
    """Write episodes as an animated GIF."""
    steps = _steps(policy, episodes, seed, max_steps)
    watched = track(steps, description="playing", total=None, transient=True)
    frames = [Image.fromarray(env.frame(0)) for env, _, _ in watched]
    # One palette for all frames, so that colours do not flicker.
    palette = frames[len(frames) // 2].quantize(colors=64, dither=Image.Dither.NONE)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, optimize=True)
    Console().print(f"{len(images)} frames in {path}", highlight=False)


def _steps(policy: LoadedPolicy, episodes: int, seed: int, max_steps: int) -> Iterator[tuple[VecEnv, float, int]]:
    """Play one environment; yields it before every step, with the return and the length so far."""
    config = replace(policy.recipe.task, num_envs=1)
    env: VecEnv = config.build(Lanes(1, range(1), seed), torch.device("cpu"))
    try:
        obs, total, length, ended = env.reset(), 0.0, 0, 0
        policy.reset()
        for _ in range(max_steps):
            yield env, total, length
            step = env.step(torch.from_numpy(policy.act(obs)))
            obs, total, length = step.obs, total + float(step.reward[0]), length + 1
            if step.terminated[0] or step.truncated[0]:
                policy.reset()
                total, length, ended = 0.0, 0, ended + 1
                if ended == episodes:
                    return
    finally:
        env.close()
