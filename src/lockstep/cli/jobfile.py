"""`lockstep jobfile slurm|k8s|sky -- train RECIPE ...`: print a job file for a scheduler."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import tyro

from lockstep.cli.options import LAUNCHER_FLAGS, parse_recipe, parse_train, resolve
from lockstep.cli.parser import parse_args
from lockstep.config import ConfigError
from lockstep.io.printable import write_text

FILES = {"slurm": "slurm.sbatch", "k8s": "k8s.yaml", "sky": "sky.yaml"}


@dataclass(frozen=True)
class JobFile:
    """Print a job file for a scheduler: an sbatch script, a Kubeflow TrainJob, or a SkyPilot task.

    The arguments after `--` are a `lockstep train` command. It is validated now, not when the job starts.
    """

    to: tyro.conf.Positional[Literal["slurm", "k8s", "sky"]]
    """Scheduler."""
    nodes: int = 1
    """Number of machines."""
    gpus: int = 8
    """GPUs per machine. One process is started per GPU."""
    cpus: int = 32
    """CPU cores per machine."""
    gpu: str = "H100"
    """GPU type to rent (sky)."""
    name: str = "lockstep"
    """Name of the job and of the run. SLURM: the run is named after the job ID."""
    image: str = "lockstep"
    """Container image with lockstep installed, such as one built from our Dockerfile (k8s)."""
    install: str = "lockstep-rl[all]"
    """Package that pip installs on a rented machine (sky)."""
    storage: str = "runs"
    """Persistent volume claim (k8s) or volume (sky) for run directories."""


def run(arguments: Sequence[str]) -> int:
    separator = list(arguments).index("--") if "--" in arguments else len(arguments)
    command = parse_args(JobFile, arguments[:separator], "lockstep jobfile")
    args = list(arguments[separator + 1 :])
    _check(command, args)
    write_text(sys.stdout, render(command, args[1:]))
    return 0


def _check(command: JobFile, args: list[str]) -> None:
    """Validate the options and the train command, so that errors show before the job is submitted."""
    if args[:1] != ["train"]:
        raise ConfigError(
            "the command line has no `-- train ...`.", f"Use: lockstep jobfile {command.to} -- train snake-ppo"
        )
    if min(command.nodes, command.gpus, command.cpus) < 1:
        raise ConfigError("--nodes, --gpus and --cpus must be at least 1.", "Use for example --nodes 2 --gpus 8.")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", command.name):
        raise ConfigError(
            f"--name is {command.name!r}.",
            "Use at most 50 lowercase letters, digits and dashes, starting with a letter.",
        )
    for label, value in (("--image", command.image), ("--storage", command.storage), ("--gpu", command.gpu)):
        if not re.fullmatch(r"[A-Za-z0-9][\w.:/@-]*", value):
            raise ConfigError(
                f"{label} is {value!r}, which is not a valid name.", "Use letters, digits and . : / @ - _ only."
            )
    multiline = [arg for arg in (command.install, *args) if "\n" in arg]
    if multiline:
        raise ConfigError(f"{multiline[0]!r} contains a line break.", "Put long settings into a file: --config FILE.")
    reserved = [*LAUNCHER_FLAGS, "n", "run.name", *(["run.runs-dir"] if command.to != "slurm" else [])]
    for arg in args:
        name = arg.lstrip("-").partition("=")[0].replace("_", "-")
        if (arg.startswith("-") or "=" in arg) and name in reserved:
            raise ConfigError(f"{arg} is set by the job file.", "Remove it. Use --nodes, --gpus and --name instead.")
    options, rest, _ = parse_train(args[1:])
    recipe = parse_recipe(options, rest, f"lockstep train {options.recipe}", options.config)
    resolve(recipe, command.nodes * command.gpus)


def render(command: JobFile, args: Sequence[str], about: str = "") -> str:
    """Return the template with its `@NAMES@` replaced."""
    submit = {"slurm": "sbatch FILE", "k8s": "kubectl create -f FILE", "sky": "sky jobs launch FILE"}[command.to]
    command_line = f"lockstep jobfile {command.to} ... -- train {shlex.join(args)} > FILE"
    values = {
        "ABOUT": about or f"#   {command_line}\n#   {submit}",
        "NAME": command.name,
        "NODES": str(command.nodes),
        "GPUS": str(command.gpus),
        "CPUS": str(command.cpus),
        "GPU": command.gpu,
        "IMAGE": command.image,
        "INSTALL": shlex.quote(command.install),
        "STORAGE": command.storage,
        "ARGS": shlex.join(args),
    }
    text = resources.files("lockstep.cli").joinpath("jobs", FILES[command.to]).read_text()
    return re.sub("@([A-Z]+)@", lambda match: values[match[1]], text)
