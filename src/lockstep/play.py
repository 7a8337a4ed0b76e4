"""Watch a policy: in the terminal, or as a GIF."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from rich.live import Live
from rich.progress import track
from rich.text import Text

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
