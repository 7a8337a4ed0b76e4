"""Flag aliases: `key=value`, underscores, and the flag names of other tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.config import ConfigError

ALIASES = {
    "total-timesteps": "run.total-samples",
    "steps": "run.total-samples",
    "samples": "run.total-samples",
    "n-envs": "task.num-envs",
    "num-envs": "task.num-envs",
    "n-steps": "algo.rollout-steps",
    "batch-size": "algo.batch-size",
    "learning-rate": "algo.learning-rate",
    "lr": "algo.learning-rate",
    "gamma": "algo.gamma",
    "epochs": "algo.epochs",
    "sync-freq": "algo.grad-accum-steps",
    "precision": "run.precision",
    "seed": "run.seed",
    "device": "run.device",
    "run-name": "run.name",
    "checkpoint-dir": "run.runs-dir",
    "eval-freq": "run.eval-every",
    "save-interval": "run.save-every",
    "checkpoint-interval": "run.save-every",
    "num-gpus": "procs",
    "world-size": "procs",
    "resume-from": "resume",
    "load-model-run": "init-from",
    "enable-wandb": "run.wandb",
    "wandb-project": "run.wandb-project",
    "wandb-entity": "run.wandb-entity",
    "wandb-mode": "run.wandb-mode",
}
"""Flag names of other tools that are aliases of our settings or flags."""

DROPPED = {
    "master-port": "a free port is chosen automatically on one machine",
    "load-model": "use --init-from RUN",
    "enable-opponent-evasion": "use --task.evade-after-samples SAMPLES",
}
"""Ignored flags of other tools, with the note that is printed."""

EPISODES = {
    "episodes": "run.total-samples",
    "max-episodes": "run.total-samples",
    "opponent-evasion-start-episode": "task.evade-after-samples",
    "load-model-run-episode": "init-from",
}
"""Flags that count episodes, with the setting that counts samples instead."""


@dataclass
class ParsedArgs:
    """Parsed command line: flags for tyro, settings given as `key=value`, and notes to print once."""

    flags: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def normalize_args(
    arguments: Sequence[str], aliases: Mapping[str, str], episode_length: int | None = None
) -> ParsedArgs:
    """Replace aliases in a command line. Aliases of the recipe take precedence over the common ones."""
    targets: dict[str, str] = {**ALIASES, **aliases}
    parsed, checkpoint, distributed = ParsedArgs(), "", False
    rest = list(arguments)
    while rest:
        arg = rest.pop(0)
        is_flag = arg.startswith("--") and len(arg) > 2
        if not is_flag and "=" not in arg:
            parsed.flags.append(arg)
            continue
        name, has_value, value = arg.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if name in (*DROPPED, "distributed") and not has_value and rest and _is_boolean(rest[0]):
            value = rest.pop(0)  # any other argument is not a value of this flag
        if name == "distributed":
            distributed = value.lower() not in ("false", "0")
        elif name in DROPPED:
            parsed.notes.append(f"--{name} is not needed: {DROPPED[name]}.")
        elif name == "compile":  # a boolean in other tools; off, on or graphs here
            if not has_value:
                value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
            parsed.flags += ["--run.compile", {"true": "on", "false": "off"}.get(value.lower(), value)]
        elif name in EPISODES:
            count = value if has_value else (rest.pop(0) if rest else "")
            samples = _episodes_as_samples(name, count, episode_length, parsed.notes.append)
            if EPISODES[name] == "init-from":
                checkpoint = f"@{samples}"
            else:
                _set(parsed, is_flag, EPISODES[name], samples)
        elif is_flag:
            parsed.flags += [f"--{targets.get(name, name)}", *([value] if has_value else [])]
        else:
            _set(parsed, is_flag, targets.get(name, name), value)
    if checkpoint and "--init-from" in parsed.flags[:-1]:  # run and episode are two flags in other tools
        parsed.flags[parsed.flags.index("--init-from") + 1] += checkpoint
    if distributed and not {"--procs", "-n"}.intersection(parsed.flags):
        parsed.flags += ["--procs", "auto"]
        parsed.notes.append("--distributed means --procs auto: one process for each GPU.")
    return parsed


def _is_boolean(arg: str) -> bool:
    """Return whether an argument is a value of a boolean flag."""
    return arg.isdigit() or arg.lower() in ("true", "false")


def _set(parsed: ParsedArgs, is_flag: bool, name: str, value: str) -> None:
    if is_flag or "." not in name:
        parsed.flags += [f"--{name}", value]
    else:
        parsed.settings[name] = value


def _episodes_as_samples(name: str, count: str, length: int | None, add_note: Callable[[str], None]) -> str:
    if length is None:
        raise ConfigError(
            f"--{name} counts episodes, but episodes of this recipe have no fixed length.", "Use --run.total-samples."
        )
    if not count.isdigit():
        raise ConfigError(f"--{name} is {count!r}, which is not a whole number.", "Use a number of episodes.")
    samples = int(count) * length
    add_note(f"--{name} {count} is read as {samples:,} global samples: an episode has at most {length} steps.")
    return str(samples)
