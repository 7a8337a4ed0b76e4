"""`lockstep play RUN`: watch a policy in the terminal or a window, or record a GIF, an MP4 or a replay."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from lockstep.cli.flag_aliases import normalize_run_args
from lockstep.cli.parser import parse_args
from lockstep.cli.torch_import import import_torch_with_status

if TYPE_CHECKING:
    from lockstep.protocols import Renderable, Split
    from lockstep.tools.play.video_files import VideoInfo


@dataclass(frozen=True)
class Play:
    """Watch a run's best policy: episodes, or ball-by-ball predictions of cricket matches."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    episodes: int = 1
    """Number of episodes or matches."""
    fps: float = 10.0
    """Frames per second."""
    gif: Path | None = None
    """GIF file to write instead of playing in the terminal. Long episodes are subsampled to every n-th frame."""
    mp4: Path | None = None
    """MP4 file to write instead of playing in the terminal (extra `video`)."""
    window: bool = False
    """Open a window instead of playing in the terminal (extra `play`). Escape, q or closing it ends playback."""
    replay: Path | None = None
    """Replay file to write: a game of team snakes for the viewer of the competition platform."""
    split: Literal["train", "validation", "test"] = "test"
    """Part of the data to play, for tasks on files and for data sets. test: the held-out part."""
    checkpoint: int | None = None
    """Global samples of the checkpoint to use. None: the best, or the newest if none was evaluated."""
    seed: int = 1
    """Seed of the episodes. Matches: rank of the first match in the split, 1 for the closest."""
    max_steps: int = 2000
    """Maximum number of steps."""
    max_mb: float | None = None
    """Maximum size of the GIF in megabytes; frames are dropped to reach it. None: no limit."""
    device: str = "auto"
    """auto, cpu, cuda or mps. auto: CUDA if available, else MPS, else the CPU."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Play, normalize_run_args(arguments), "lockstep play")

    from lockstep.config import ConfigError

    if command.fps <= 0 or command.episodes < 1 or command.max_steps < 1:
        raise ConfigError("--fps, --episodes and --max-steps must be positive.", "Use numbers above 0.")
    import_torch_with_status()

    from lockstep.inference import load
    from lockstep.launch.device import choose_device
    from lockstep.launch.kernel_compilation import show_status
    from lockstep.launch.world import WorldInfo
    from lockstep.tools.play.display import show_in_terminal, show_in_window
    from lockstep.tools.play.playback import play_episodes
    from lockstep.tools.play.video_files import write_gif, write_mp4

    policy = load(command.run, command.checkpoint, str(choose_device(command.device, WorldInfo())))
    if command.replay is not None:
        from lockstep.apps.jidi.submission import write_replay

        with show_status(f"writing {command.replay}"):
            write_replay(policy, command.replay, command.seed)
        return 0

    def scenes() -> Iterator["Renderable"]:
        frames = play_episodes(policy, command.episodes, command.seed, command.max_steps, command.split)
        with show_status("playing the first step"):
            first = list(islice(frames, 1))
        return chain(first, frames)

    _print_data(policy.recipe.task, command.split)
    if command.gif is not None:
        limit = None if command.max_mb is None else 1e6 * command.max_mb
        _print_written(command.gif, write_gif(scenes(), command.gif, command.fps, limit))
    if command.mp4 is not None:
        _print_written(command.mp4, write_mp4(scenes(), command.mp4, command.fps))
    if command.gif is None and command.mp4 is None:
        (show_in_window if command.window else show_in_terminal)(scenes(), command.fps)
    return 0


def _print_data(task: Any, split: "Split") -> None:
    """Print which part of which files is played."""
    from lockstep.cli.eval import describe_data
    from lockstep.io.rich_console import PrintableConsole

    for line in describe_data(task, split)[1]:
        PrintableConsole(stderr=True, soft_wrap=True).print(line)


def _print_written(path: Path, written: "VideoInfo") -> None:
    from lockstep.io.rich_console import PrintableConsole

    interval = f", one for every {written.every} steps" if written.every > 1 else ""
    line = f"{written.frames} frames{interval}, {written.size / 1e6:.2f} MB: {path}"
    PrintableConsole(soft_wrap=True).print(line)
