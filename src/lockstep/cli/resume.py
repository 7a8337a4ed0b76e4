"""`lockstep resume RUN`: go on from the newest whole checkpoint, on any number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from lockstep.cli.flag_aliases import normalize_args
from lockstep.cli.options import LaunchOptions, resolve, resolve_procs
from lockstep.cli.torch_import import import_torch_with_status
from lockstep.cli.worker_spec import write_spec
from lockstep.config import ConfigError, apply_overrides
from lockstep.io.temporary_directory import temporary_directory

CHANGEABLE = (
    "total_samples",
    "device",
    "share_gpu",
    "log_every",
    "eval_every",
    "save_every",
    "keep_last",
    "keep_every",
    "replay_parity",
    "replica_check_every",
    "collective_timeout",
    "max_hours",
    "allow_other_machine",
)
"""Settings of the run that may change when it goes on without making it another run."""


@dataclass(frozen=True, kw_only=True)
class Resume(LaunchOptions):
    """Go on with a run from its newest whole checkpoint, on the same or another number of processes."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    checkpoint: int | None = None
    """Go on from the checkpoint at this many samples instead of the newest."""
    without_replay: bool = False
    """Drop the replay buffer and start with an empty one, to rescue a run whose replay is damaged beyond repair. The
    run then differs from the uninterrupted one."""
    total_samples: int | None = None
    """A new, larger budget of global samples."""


def run(arguments: Sequence[str]) -> int:
    words = normalize_args(
        arguments,
        dict.fromkeys(("run.total-samples", "total-timesteps", "steps", "samples"), "total-samples"),
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
    import_torch_with_status()

    from lockstep.cli.workers import launch_and_report, run_training_worker, say_notes, started_processes
    from lockstep.inference import load_recipe
    from lockstep.launch.device import require_gpus
    from lockstep.train import train

    recipe = apply_overrides(load_recipe(command.run), {f"run.{key}": value for key, value in changes.items()})
    if command.total_samples is not None:
        recipe = apply_overrides(recipe, {"run.total_samples": command.total_samples})
    recipe = resolve(recipe, procs)
    say_notes(words.notes)
    fleet = command.fleet(procs)
    if not started_processes():
        require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    if started_processes() or (procs == 1 and fleet.nodes[1] == 1):
        return run_training_worker(
            lambda: train(recipe, resume=True, at=command.checkpoint, without_replay=command.without_replay)
        )
    options = {"resume": True, "at": command.checkpoint, "without_replay": command.without_replay}
    with temporary_directory("resume") as directory:
        return launch_and_report(write_spec(directory / "spec.json", recipe, **options), fleet)


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
