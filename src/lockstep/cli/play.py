"""`lockstep play RUN`: watch a policy in the terminal or a window, or keep it as a GIF or as a replay."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Play:
    """Watch a run's best policy."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    episodes: int = 1
    """How many episodes to watch."""
    fps: float = 10.0
    """Frames a second."""
    gif: Path | None = None
    """Write a GIF to this file instead of playing in the terminal."""
    window: bool = False
    """Open a window instead of playing in the terminal; Escape, q or closing it ends."""
    replay: Path | None = None
    """Write a game of team snakes to this file, for the viewer of the competition's platform."""
    at: int | None = None
    """Use the checkpoint at this many samples instead of the best."""
    seed: int = 1
    """Seed of the episodes."""
    max_steps: int = 2000
    """Stop after this many steps."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(Play, args=list(arguments), prog="lockstep play")

    from lockstep.config import ConfigError
    from lockstep.loading import load
    from lockstep.play import play_gif, play_terminal, play_window
    from lockstep.protocols import TaskConfig

    policy = load(command.run, command.at)
    if not isinstance(policy.recipe.task, TaskConfig):
        raise ConfigError(f"{command.run} predicts, and there is nothing to watch.", f"lockstep eval {command.run}")
    if command.replay is not None:
        from lockstep.jidi.submission import write_replay

        write_replay(policy, command.replay, command.seed)
    elif command.gif is not None:
        play_gif(policy, command.episodes, command.seed, command.fps, command.max_steps, command.gif)
    else:
        show = play_window if command.window else play_terminal
        show(policy, command.episodes, command.seed, command.fps, command.max_steps)
    return 0
