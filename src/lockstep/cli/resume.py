"""`lockstep resume RUN`: go on from the newest whole checkpoint, on any number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from lockstep.cli.options import Machines, resolve_procs, settle
from lockstep.cli.waking import wake
from lockstep.cli.words import translate
from lockstep.cli.worker_spec import write_spec
from lockstep.config import ConfigError, overlay
from lockstep.temporary_directory import temporary_directory

CHANGEABLE = (
    "samples",
    "device",
    "share_gpu",
    "log_every",
    "eval_every",
    "save_every",
    "keep",
    "keep_every",
    "replay_parity",
    "check_every",
    "timeout",
    "max_hours",
    "allow_other_machine",
)
"""Settings of the run that may change when it goes on without making it another run."""


@dataclass(frozen=True, kw_only=True)
class Resume(Machines):
    """Go on with a run from its newest whole checkpoint, on the same or another number of processes."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    at: int | None = None
    """Go on from the checkpoint at this many samples instead of the newest."""
    without_replay: bool = False
    """Drop the replay buffer and start with an empty one, to rescue a run whose replay is damaged beyond repair. The
    run then differs from the uninterrupted one."""
    samples: int | None = None
    """A new, larger budget of global samples."""


def run(arguments: Sequence[str]) -> int:
    words = translate(
        arguments, {"run.samples": "samples", "total-timesteps": "samples", "steps": "samples", "samples": "samples"}
    )
    flags, settings = _part(words.flags)
    command = tyro.cli(Resume, args=flags, prog="lockstep resume")
    procs = resolve_procs(command)
    settings |= words.settings
    changes = {key.removeprefix("run.").replace("-", "_"): value for key, value in settings.items()}
    for key in changes:
        if key not in CHANGEABLE:
            raise ConfigError(
                f"'{key}' cannot change when a run goes on: it would be another run.",
                f"These can: {', '.join(CHANGEABLE)}. For a new run: lockstep train ... --init-from {command.run}",
            )
    wake()

    from lockstep.cli.launching import launch_or_explain, run_worker, say_notes, started_processes
    from lockstep.loading import recipe_of
    from lockstep.runtime.place import require_gpus
    from lockstep.train import train

    recipe = overlay(recipe_of(command.run), {f"run.{key}": value for key, value in changes.items()})
    if command.samples is not None:
        recipe = overlay(recipe, {"run.samples": command.samples})
    recipe = settle(recipe, procs)
    say_notes(words.notes)
    fleet = command.fleet(procs)
    if not started_processes():
        require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    if started_processes() or (procs == 1 and fleet.nodes[1] == 1):
        return run_worker(lambda: train(recipe, resume=True, at=command.at, without_replay=command.without_replay))
    options = {"resume": True, "at": command.at, "without_replay": command.without_replay}
    with temporary_directory("resume") as directory:
        return launch_or_explain(write_spec(directory / "spec.json", recipe, **options), fleet)


def _part(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command line parted into this verb's own flags and the settings of the run, `--run.device cpu`, among them."""
    flags: list[str] = []
    settings: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word.startswith("--") and "." in word:
            settings[word.removeprefix("--")] = next(rest, "")
        else:
            flags.append(word)
    return flags, settings
