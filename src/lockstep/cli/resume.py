"""`lockstep resume RUN`: resume from the newest valid checkpoint, on any number of processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lockstep.cli.flag_aliases import normalize_args
from lockstep.cli.options import LaunchOptions, StopOptions, resolve, resolve_procs
from lockstep.cli.parser import parse_args
from lockstep.cli.torch_import import import_torch_with_status
from lockstep.cli.unit_flags import convert_epochs
from lockstep.cli.worker_spec import write_spec
from lockstep.config import ConfigError, RecipeT, apply_overrides, as_dict, flat_settings
from lockstep.experiment.record import is_experiment
from lockstep.io.temporary_directory import temporary_directory
from lockstep.sweeps.record import is_sweep

CHANGEABLE = (
    "total_samples",
    "device",
    "share_gpu",
    "log_every",
    "eval_every",
    "eval_episodes",
    "early_stop_patience",
    "save_every",
    "keep_last",
    "keep_every",
    "replay_parity",
    "replica_check_every",
    "digest_every",
    "collective_timeout",
    "max_hours",
    "on_nonfinite",
    "record_video",
    "allow_other_machine",
)
"""Settings of `run` that may be changed when a run is resumed."""

REASONS = {
    "run.seed": "the saved environments and the order of data depend on it",
    "run.lanes": "the saved state is partitioned into lanes",
    "run.precision": "the saved optimizer depends on it",
}
"""Why a setting cannot be changed, if there is a specific reason."""


@dataclass(frozen=True, kw_only=True)
class Resume(LaunchOptions, StopOptions):
    """Resume a run from its newest valid checkpoint, on the same or another number of processes.

    An experiment of several seeds and a sweep are resumed as a whole, on their own number of processes per run unless
    --procs is given. Finished runs are skipped.

    Settings of one run that change nothing that is saved may follow, such as --algo.learning-rate 1e-4. Changes are
    printed and recorded in the run directory.
    """

    run: tyro.conf.Positional[Path]
    """The run directory, or the directory of an experiment or a sweep."""
    parallel: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Runs of an experiment or a sweep at a time. None: the number of GPUs, or of CPU cores without GPUs, divided by
    --procs."""
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
    flags, settings = split_settings(parsed.flags)
    command = parse_args(Resume, flags, "lockstep resume")
    if is_experiment(command.run):
        from lockstep.cli.seeds import resume_experiment

        return resume_experiment(command, [*settings, *parsed.settings, *parsed.unit_flags])
    if is_sweep(command.run):
        from lockstep.cli.sweep import resume_sweep

        refuse_options_of_one_run(command, [*settings, *parsed.settings, *parsed.unit_flags], "a sweep")
        return resume_sweep(command, command.run, command.parallel)
    if command.parallel is not None:
        raise ConfigError("--parallel needs an experiment or a sweep.", "Remove it to resume one run.")
    procs = resolve_procs(command)
    settings |= parsed.settings
    if "epochs" in parsed.unit_flags:
        settings["algo.epochs"] = parsed.unit_flags["epochs"]
    if command.total_samples is not None:
        settings["run.total_samples"] = command.total_samples
    import_torch_with_status("lockstep.training_loop")

    from lockstep.bucket_copy import location_of
    from lockstep.cli.workers import launch_and_report, print_notes, run_training_worker, started_processes
    from lockstep.inference import load_recipe
    from lockstep.launch.device import require_gpus
    from lockstep.training_loop import train

    recipe = apply_overrides(load_recipe(command.run), location_of(command.run))
    recipe = change_settings(recipe, settings, command.run)
    recipe = resolve(recipe, procs)
    print_notes(parsed.notes)
    launch_config = command.launch_config(procs)
    if not started_processes():
        require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    options: Any = {"resume": True, "at": command.checkpoint, "without_replay": command.without_replay}
    options["stop_at"] = command.stop_at
    if started_processes() or (procs == 1 and launch_config.nodes[1] == 1):
        return run_training_worker(lambda: train(recipe, **options), command.stop_at)
    with temporary_directory("resume") as directory:
        return launch_and_report(write_spec(directory / "spec.json", recipe, **options), launch_config)


def refuse_options_of_one_run(options: Resume, settings: Sequence[str], what: str) -> None:
    """Raise ConfigError for options or settings that apply to one run, not to an experiment or a sweep."""
    others = {
        "--checkpoint": options.checkpoint,
        "--total-samples": options.total_samples,
        "--stop-at": options.stop_at,
    }
    given = [*settings, *(name for name, value in others.items() if value is not None)]
    given += ["--without-replay"] if options.without_replay else []
    if given:
        raise ConfigError(
            f"{given[0]} applies to one run, but {options.run} is {what}.",
            "Resume one of its runs with it, or remove it.",
        )


def change_settings(
    recipe: RecipeT,
    settings: Mapping[str, Any],
    source: Path | str,
    of_run: Sequence[str] = CHANGEABLE,
    action: str = "resumed",
) -> RecipeT:
    """Return the recipe of a run with changed settings. A key without a group is one of `run`.

    Args:
        recipe: Recipe of the run.
        settings: New values by dotted name.
        source: The run as `--init-from` takes it, for messages.
        of_run: Settings of `run` that may be changed.
        action: What happens to the run, for messages.

    Raises:
        ConfigError: A setting is unknown, or has another value and changes what is saved.
    """
    changed = apply_overrides(recipe, full_names(settings))
    before, after = flat_settings(as_dict(recipe)), flat_settings(as_dict(changed))
    for key in sorted(after.keys() | before.keys()):
        group, _, path = key.partition(".")  # a group without settings is a key itself
        name = path.partition(".")[0]
        allowed = of_run if group == "run" else getattr(getattr(recipe, group), "changeable_on_resume", ())
        if before.get(key) != after.get(key) and name not in allowed:
            value = after.get(key)
            text = " ".join(map(str, value)) if isinstance(value, tuple) else value
            reason = REASONS.get(key, "the checkpoint depends on it, or it has an effect only at the start of a run")
            raise ConfigError(
                f"{key} is {before.get(key)!r} in {source}. It cannot be changed when a run is {action}, because "
                f"{reason}.",
                f"Start a new run from its weights: lockstep train {recipe.name} --init-from {source} "
                f"--{key.replace('_', '-')} {text}\n"
                f"Settings of {group} that can be changed: {', '.join(allowed) or 'none'}.",
            )
    return convert_epochs(changed)[0]


def full_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name with underscores. A key without a group is one of `run`."""
    keys = {key if "." in key else f"run.{key}": value for key, value in settings.items()}
    return {key.replace("-", "_"): value for key, value in keys.items()}


def split_settings(args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split arguments into flags of this command and settings of the run, such as `--run.device cpu`."""
    flags: list[str] = []
    settings: dict[str, Any] = {}
    rest = iter(args)
    for arg in rest:
        if arg.startswith("--") and "." in arg:
            settings[arg.removeprefix("--")] = next(rest, "")
        else:
            flags.append(arg)
    return flags, settings
