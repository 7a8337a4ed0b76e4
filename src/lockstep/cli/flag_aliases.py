"""Flag aliases: `key=value`, underscores, and the flag names of other tools."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.cli.unit_flags import UNIT_FLAGS
from lockstep.config import ConfigError
from lockstep.launch.world import AUTO_JOB

ALIASES = {
    "total-timesteps": "run.total-samples",
    "n-timesteps": "run.total-samples",
    "steps": "run.total-samples",
    "samples": "run.total-samples",
    "n-envs": "task.num-envs",
    "num-envs": "task.num-envs",
    "n-steps": "algo.rollout-steps",
    "num-steps": "algo.rollout-steps",
    "batch-size": "algo.batch-size",
    "minibatch-size": "algo.batch-size",
    "learning-rate": "algo.learning-rate",
    "lr": "algo.learning-rate",
    "gamma": "algo.gamma",
    "gae-lambda": "algo.gae-lambda",
    "n-epochs": "algo.epochs",
    "update-epochs": "algo.epochs",
    "clip-range": "algo.clip-coef",
    "clip-coef": "algo.clip-coef",
    "clip-range-vf": "algo.value-clip-coef",
    "ent-coef": "algo.entropy-coef",
    "max-grad-norm": "algo.max-grad-norm",
    "target-kl": "algo.target-kl",
    "buffer-size": "algo.buffer-size",
    "learning-starts": "algo.learning-starts",
    "tau": "algo.tau",
    "policy-delay": "algo.policy-delay",
    "policy-frequency": "algo.policy-delay",
    "policy-noise": "algo.target-noise",
    "target-policy-noise": "algo.target-noise",
    "exploration-noise": "algo.exploration-noise",
    "sync-freq": "algo.grad-accum-steps",
    "precision": "run.precision",
    "seed": "run.seed",
    "device": "run.device",
    "run-name": "run.name",
    "exp-name": "run.name",
    "checkpoint-dir": "run.runs-dir",
    "eval-freq": "run.eval-every",
    "eval-episodes": "run.eval-episodes",
    "n-eval-episodes": "run.eval-episodes",
    "capture-video": "run.record-video",
    "num-gpus": "procs",
    "debug-level": "debug",
    "nproc-per-node": "procs",
    "world-size": "procs",
    "resume-from": "resume",
    "load-model-run": "init-from",
    "enable-wandb": "run.wandb",
    "track": "run.wandb",
    "wandb-project": "run.wandb-project",
    "wandb-project-name": "run.wandb-project",
    "wandb-entity": "run.wandb-entity",
    "wandb-mode": "run.wandb-mode",
}
"""Flag names of other tools that are aliases of our settings or flags, with the same unit."""

DROPPED = {
    "load-model": "use --init-from RUN",
    "node-rank": "ranks of hosts are assigned when they meet",
    "torch-deterministic": "runs are reproducible; --run.reduction exact makes them equal on any number of processes",
}
"""Ignored flags of other tools, with the note that is printed."""

UNSUPPORTED = {
    "train-freq": "Use --algo.rollout-steps, the steps of each environment between updates.",
    "gradient-steps": "Use --algo.updates-per-sample.",
    "normalize-advantage": "Advantages are always normalized, over the batch of all processes.",
    "norm-adv": "Advantages are always normalized, over the batch of all processes.",
    "clip-vloss": "Use --algo.value-clip-coef 0.2, or none.",
    "noise-clip": "Noise on target actions is clipped at 0.5.",
    "cuda": "Use --run.device cuda or --run.device cpu.",
}
"""Flags of Stable-Baselines3 and CleanRL without an equivalent, with the hint of the error."""

RUN_ALIASES = {
    "--n-episodes": "--episodes",
    "--num-episodes": "--episodes",
    "--n-eval-episodes": "--episodes",
    "--at": "--checkpoint",
    "--model": "",
    "--model-path": "",
    "--load-model-run": "",
}
"""Flags of other tools for commands that name a run. Empty: the value is the run itself."""

RESUME_NEWEST = "newest"
"""Value of a bare `--resume`: the newest run of the recipe."""
MASTER_PORT = "29500"
"""Port of a rendezvous if only its host is given, as in torchrun."""


@dataclass
class ParsedArgs:
    """Parsed command line."""

    flags: list[str] = field(default_factory=list)
    """Arguments for the parser."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings given as `key=value`."""
    unit_flags: dict[str, str] = field(default_factory=dict)
    """Flags whose unit must be converted, with their values. See `unit_flags`."""
    notes: list[str] = field(default_factory=list)
    """Notes to print once."""

    def rest(self, unknown: Sequence[str]) -> list[str]:
        """Return arguments that a command did not parse, with settings and unit flags, for the recipe."""
        return [*unknown, *(f"{name}={value}" for name, value in (self.settings | self.unit_flags).items())]


def normalize_args(arguments: Sequence[str], aliases: Mapping[str, str]) -> ParsedArgs:
    """Replace aliases in a command line. Aliases of the recipe take precedence over the common ones."""
    targets: dict[str, str] = {**ALIASES, **aliases}
    parsed, distributed = ParsedArgs(), False
    command: dict[str, str] = {}  # parts of a flag that are several flags in other tools
    rest = list(arguments)
    while rest:
        arg = rest.pop(0)
        is_flag = arg.startswith("--") and len(arg) > 2
        if not is_flag and "=" not in arg:
            parsed.flags.append(arg)
            continue
        name, has_value, value = arg.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if name in (*DROPPED, "distributed", "enable-opponent-evasion", "anneal-lr") and not has_value:
            # These may be given without a value: only a boolean or a number belongs to them.
            value = rest.pop(0) if rest and _is_boolean(rest[0]) else "true"
        elif name in ("resume", "resume-from") and not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("-") and "=" not in rest[0] else RESUME_NEWEST
        elif name in ("master-addr", "master-port", "load-model-run-episode", "compile", *UNIT_FLAGS) and not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else ""

        if name == "distributed":
            distributed = value.lower() not in ("false", "0")
        elif name in DROPPED:
            parsed.notes.append(f"--{name} is not needed: {DROPPED[name]}.")
        elif name in UNSUPPORTED and name not in aliases:
            raise ConfigError(f"--{name} is a flag of another tool.", UNSUPPORTED[name])
        elif name in ("master-addr", "master-port", "load-model-run-episode"):
            command[name] = value
        elif name in ("resume", "resume-from"):
            parsed.flags += ["--resume", value]
        elif name == "compile":  # a boolean in other tools; off, on or graphs here
            parsed.flags += ["--run.compile", {"": "on", "true": "on", "false": "off"}.get(value.lower(), value)]
        elif name in UNIT_FLAGS and name not in aliases:
            parsed.unit_flags[name] = value
        elif is_flag and not has_value and "." in targets.get(name, name) and rest and rest[0].lower() in _BOOLEANS:
            parsed.settings[targets.get(name, name)] = rest.pop(0).lower()  # flags of other tools take true or false
        elif is_flag:
            parsed.flags += [f"--{targets.get(name, name)}", *([value] if has_value else [])]
        elif "." in targets.get(name, name):
            parsed.settings[targets.get(name, name)] = value
        else:
            parsed.flags += [f"--{targets.get(name, name)}", value]

    if "load-model-run-episode" in command and "--init-from" in parsed.flags[:-1]:
        parsed.flags[parsed.flags.index("--init-from") + 1] += f"@{command['load-model-run-episode']}ep"
    parsed.flags += _rendezvous(parsed, command)
    if distributed and not {"--procs", "-n"}.intersection(parsed.flags):
        parsed.flags += ["--procs", "auto"]
        parsed.notes.append("--distributed means --procs auto: one process for each GPU.")
    return parsed


def _rendezvous(parsed: ParsedArgs, command: Mapping[str, str]) -> list[str]:
    """Return the flags of a rendezvous that is named by --master-addr and --master-port, as for torchrun."""
    several = "--nnodes" in parsed.flags[:-1] and parsed.flags[parsed.flags.index("--nnodes") + 1] != "1"
    if not several or "master-addr" not in command:
        for name in ("master-addr", "master-port"):
            if name in command:
                parsed.notes.append(f"--{name} is not needed: on one machine, a free port is chosen automatically.")
        return []
    flags = ["--rdzv-endpoint", f"{command['master-addr']}:{command.get('master-port', MASTER_PORT)}"]
    if "--rdzv-id" not in parsed.flags:
        words = [*parsed.flags, *flags, *parsed.rest([])]  # without --node-rank, which differs between hosts
        job = AUTO_JOB + hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
        flags += ["--rdzv-id", job]
        parsed.notes.append(
            f"The job ID is {job}, from this command, which must be the same on every host. It continues an unfinished "
            "run of the same command. Choose an ID with --rdzv-id."
        )
    return flags


def normalize_run_args(arguments: Sequence[str]) -> list[str]:
    """Replace flags of other tools in a command line that names a run: `--model RUN --n-episodes 10`."""
    words = []
    for arg in arguments:
        name, has_value, value = arg.partition("=")
        name = RUN_ALIASES.get(name.replace("_", "-"), name) if arg.startswith("--") else arg
        words += ([name] if name else []) + ([value] if has_value and arg.startswith("--") else [])
    return words


_BOOLEANS = ("true", "false")


def _is_boolean(arg: str) -> bool:
    """Return whether an argument is a value of a flag that may stand alone."""
    return arg.isdigit() or arg.lower() in _BOOLEANS
