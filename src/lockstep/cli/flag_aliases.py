"""The words people bring along: `key=value`, underscores, and the flag names of earlier tools."""

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
"""Words of earlier tools that mean one of our settings or flags as it is."""

PROCESSES = ("procs", "num-gpus", "world-size")
"""Words that say how many processes to start."""

DROPPED = {
    "master-port": "a free port is found by itself on one machine",
    "load-model": "--init-from RUN says it all",
    "enable-opponent-evasion": "--task.evade-after-samples SAMPLES says it all",
}
"""Words that need no counterpart, with what to tell the user."""

EPISODES = {
    "episodes": "run.total-samples",
    "max-episodes": "run.total-samples",
    "opponent-evasion-start-episode": "task.evade-after-samples",
    "load-model-run-episode": "init-from",
}
"""Words that count episodes, and which of our settings counts samples in their place."""


@dataclass
class ParsedArgs:
    """A command line taken apart: flags for tyro, settings given as `key=value`, and sentences to print once."""

    flags: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def normalize_args(
    arguments: Sequence[str], aliases: Mapping[str, str], episode_length: int | None = None
) -> ParsedArgs:
    """Bring a command line into our own words; recipe aliases beat the common ones."""
    known: dict[str, str] = {**ALIASES, **aliases}
    words, at = ParsedArgs(), ""
    rest = list(arguments)
    counted = any(flag_name(word) in PROCESSES or word == "-n" for word in rest)
    while rest:
        word = rest.pop(0)
        flag = word.startswith("--") and len(word) > 2
        if not flag and "=" not in word:
            words.flags.append(word)
            continue
        name, has_value, value = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if name in (*DROPPED, "distributed") and not has_value and rest and is_switch(rest[0]):
            value = rest.pop(0)  # any other word stands for itself
        if name == "distributed":
            if not counted and value.lower() not in ("false", "0"):
                words.flags += ["--procs", "auto"]
                words.notes.append("--distributed means --procs auto: one process for each GPU.")
        elif name in DROPPED:
            words.notes.append(f"--{name} is not needed: {DROPPED[name]}.")
        elif name == "compile":  # on or off elsewhere, one of three things here
            if not has_value:
                value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
            words.flags += ["--run.compile", {"true": "on", "false": "off"}.get(value.lower(), value)]
        elif name in EPISODES:
            count = value if has_value else (rest.pop(0) if rest else "")
            samples = _episodes_as_samples(name, count, episode_length, words.notes.append)
            if EPISODES[name] == "init-from":
                at = f"@{samples}"
            else:
                _set(words, flag, EPISODES[name], samples)
        elif flag:
            words.flags += [f"--{known.get(name, name)}", *([value] if has_value else [])]
        else:
            _set(words, flag, known.get(name, name), value)
    if at and "--init-from" in words.flags[:-1]:  # a run and a point of it were two words once
        words.flags[words.flags.index("--init-from") + 1] += at
    return words


def flag_name(word: str) -> str:
    """The name of a flag without its dashes and value, with dashes for underscores."""
    return word.removeprefix("--").partition("=")[0].replace("_", "-") if word.startswith("--") else ""


def is_switch(word: str) -> bool:
    """Whether a word is the value of a flag that is on or off."""
    return word.isdigit() or word.lower() in ("true", "false")


def _set(words: ParsedArgs, flag: bool, name: str, value: str) -> None:
    if flag or "." not in name:
        words.flags += [f"--{name}", value]
    else:
        words.settings[name] = value


def _episodes_as_samples(name: str, count: str, length: int | None, say: Callable[[str], None]) -> str:
    if length is None:
        raise ConfigError(
            f"--{name} counts episodes, which have no fixed length in this recipe.", "Use --run.total-samples."
        )
    if not count.isdigit():
        raise ConfigError(f"--{name} is {count!r}, which is not a whole number.", "Give a number of episodes.")
    samples = int(count) * length
    say(f"--{name} {count} becomes {samples:,} global samples: episodes of at most {length} steps.")
    return str(samples)
