"""`lockstep jobfile slurm|k8s|sky -- train RECIPE ...`: print a file that a scheduler takes as it is."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import tyro

from lockstep.cli.options import LAUNCHER_FLAGS, TrainOptions, parse_recipe, parse_start
from lockstep.config import ConfigError
from lockstep.io.printable import write_text

FILES = {"slurm": "slurm.sbatch", "k8s": "k8s.yaml", "sky": "sky.yaml"}


@dataclass(frozen=True)
class JobFile:
    """Print a job file for a scheduler: an sbatch script, a Kubeflow TrainJob, or a SkyPilot task.

    What follows `--` is a `lockstep train` command; it is checked now, not when the job's turn has come.
    """

    to: tyro.conf.Positional[Literal["slurm", "k8s", "sky"]]
    """What starts the job."""
    nodes: int = 1
    """How many machines."""
    gpus: int = 8
    """GPUs of each machine, and so processes."""
    cpus: int = 32
    """Cores of each machine."""
    gpu: str = "H100"
    """Kind of GPU to rent (sky)."""
    name: str = "lockstep"
    """Name of the job, and of the run except under SLURM, where that is the job's number."""
    image: str = "lockstep"
    """Container image with lockstep in it, such as one made from our Dockerfile (k8s)."""
    install: str = "lockstep-rl[all]"
    """What pip installs on a machine that was rented (sky)."""
    storage: str = "runs"
    """Claim (k8s) or volume (sky) that runs are kept on."""


def run(arguments: Sequence[str]) -> int:
    place = list(arguments).index("--") if "--" in arguments else len(arguments)
    command = tyro.cli(JobFile, args=list(arguments[:place]), prog="lockstep jobfile")
    words = list(arguments[place + 1 :])
    _check(command, words)
    write_text(sys.stdout, render(command, words[1:]))
    return 0


def _check(command: JobFile, words: list[str]) -> None:
    """What would fail on the cluster fails here, in words."""
    if words[:1] != ["train"]:
        raise ConfigError(
            "a job trains: there is no `-- train ...`.", f"Write: lockstep jobfile {command.to} -- train snake-ppo"
        )
    if min(command.nodes, command.gpus, command.cpus) < 1:
        raise ConfigError("--nodes, --gpus and --cpus count from 1.", "Give numbers such as --nodes 2 --gpus 8.")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", command.name):
        raise ConfigError(
            f"--name is {command.name!r}.", "Use small letters, digits and dashes, a letter first, at most 50."
        )
    for label, value in (("--image", command.image), ("--storage", command.storage), ("--gpu", command.gpu)):
        if not re.fullmatch(r"[A-Za-z0-9][\w.:/@-]*", value):
            raise ConfigError(f"{label} is {value!r}, which is no name.", "Use letters, digits and . : / @ - _ alone.")
    torn = [word for word in (command.install, *words) if "\n" in word]
    if torn:
        raise ConfigError(f"{torn[0]!r} is more than one line.", "Put long settings into a file: --config FILE.")
    ours = [*LAUNCHER_FLAGS, "n", "run.name", *(["run.runs-dir"] if command.to != "slurm" else [])]
    for word in words:
        name = word.lstrip("-").partition("=")[0].replace("_", "-")
        if (word.startswith("-") or "=" in word) and name in ours:
            raise ConfigError(f"{word} is what the job file says.", "Leave it out; --nodes, --gpus and --name decide.")
    start, rest, _ = parse_start(words[1:], "train", "")
    processes = command.nodes * command.gpus
    parse_recipe(TrainOptions(**(vars(start) | {"procs": processes})), rest, f"lockstep train {start.recipe}")


def render(command: JobFile, words: Sequence[str], about: str = "") -> str:
    """The file: a template with its `@NAMES@` filled in."""
    submit = {"slurm": "sbatch FILE", "k8s": "kubectl create -f FILE", "sky": "sky jobs launch FILE"}[command.to]
    line = f"lockstep jobfile {command.to} ... -- train {shlex.join(words)} > FILE"
    values = {
        "ABOUT": about or f"#   {line}\n#   {submit}",
        "NAME": command.name,
        "NODES": str(command.nodes),
        "GPUS": str(command.gpus),
        "CPUS": str(command.cpus),
        "GPU": command.gpu,
        "IMAGE": command.image,
        "INSTALL": shlex.quote(command.install),
        "STORAGE": command.storage,
        "WORDS": shlex.join(words),
    }
    text = resources.files("lockstep.cli").joinpath("jobs", FILES[command.to]).read_text()
    return re.sub("@([A-Z]+)@", lambda found: values[found[1]], text)
