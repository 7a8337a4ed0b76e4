"""`lockstep resume RUN`: resume from the newest valid checkpoint, on any number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
"""Settings of `run` that may be changed when a run is resumed."""


@dataclass(frozen=True, kw_only=True)
class Resume(LaunchOptions):
    """Resume a run from its newest valid checkpoint, on the same or another number of processes."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    checkpoint: int | None = None
    """Global samples of the checkpoint to resume from. None: the newest."""
    without_replay: bool = False
    """Resume with an empty replay buffer if the saved one cannot be repaired. The run then differs from the
    uninterrupted one."""
    total_samples: int | None = None
    """New total of global samples. None: the run's own total."""


def run(arguments: Sequence[str]) -> int:
    aliases = dict.fromkeys(("run.total-samples", "total-timesteps", "steps", "samples"), "total-samples")
    parsed = normalize_args(arguments, aliases)
    flags, settings = _split_settings(parsed.flags)
    command = tyro.cli(Resume, args=flags, prog="lockstep resume")
    procs = resolve_procs(command)
    settings |= parsed.settings
    changes = {key.removeprefix("run.").replace("-", "_"): value for key, value in settings.items()}
    for key in changes:
        if key not in CHANGEABLE:
            raise ConfigError(
                f"'{key}' cannot be changed when a run is resumed.",
                f"Change one of: {', '.join(CHANGEABLE)}. For a new run: lockstep train ... --init-from {command.run}",
            )
    import_torch_with_status("lockstep.training_loop")

    from lockstep.cli.workers import launch_and_report, print_notes, run_training_worker, started_processes
    from lockstep.inference import load_recipe
    from lockstep.launch.device import require_gpus
    from lockstep.training_loop import train

    recipe = apply_overrides(load_recipe(command.run), {f"run.{key}": value for key, value in changes.items()})
    if command.total_samples is not None:
        recipe = apply_overrides(recipe, {"run.total_samples": command.total_samples})
    recipe = resolve(recipe, procs)
    print_notes(parsed.notes)
    launch_config = command.launch_config(procs)
    if not started_processes():
        require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    options: Any = {"resume": True, "at": command.checkpoint, "without_replay": command.without_replay}
    if started_processes() or (procs == 1 and launch_config.nodes[1] == 1):
        return run_training_worker(lambda: train(recipe, **options))
    with temporary_directory("resume") as directory:
        return launch_and_report(write_spec(directory / "spec.json", recipe, **options), launch_config)


def _split_settings(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split arguments into flags of this command and settings of the run, such as `--run.device cpu`."""
    flags: list[str] = []
    settings: dict[str, str] = {}
    rest = iter(args)
    for arg in rest:
        if arg.startswith("--") and "." in arg:
            settings[arg.removeprefix("--")] = next(rest, "")
        else:
            flags.append(arg)
    return flags, settings
