"""A real SLURM cluster of two nodes: Debian's daemons, each node in its own network namespace.

with cluster(tmp_path) as slurm:
    job = slurm.submit("examples/slurm/train.sbatch", "snake-ppo", "--smoke")
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    slurm.until(job, lambda: slurm.ask(job, "JobState") == "COMPLETED", "the end")
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts import Host, Job, hosts, refuse, until

from helpers.multiprocess import Hung

SKIP = "LOCKSTEP_SKIP_SLURM"
"""Environment variable. 1: skip the tests that need SLURM if it cannot be started. Otherwise they fail."""
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_SETTINGS = """\
ClusterName=lockstep
SlurmctldHost={machine}({controller})
SlurmUser=root
# How long a credential is valid is also how long a requeued job waits before it starts again: 120 s unless told.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster, seen from its first node."""

    nodes: list[Host]
    folder: Path
    daemons: list[Job]

    @property
    def environment(self) -> Mapping[str, str]:
        """Extra environment of commands. Jobs inherit it and find the `lockstep` of this Python."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def run(self, *words: str | Path) -> str:
        """Run a SLURM command that must succeed; return its output."""
        job = self.nodes[0].start(words, self.environment)
        code = job.wait()
        assert code == 0, f"{' '.join(map(str, words))} ended with {code}: {job.output}"
        return job.output.strip()

    def submit(self, *words: str | Path) -> str:
        """Queue a batch script with options and arguments; return the job id. Its output goes into `folder`."""
        return self.run("sbatch", "--parsable", f"--output={self.folder}/job-%j.log", *words)

    def ask(self, job: str, name: str) -> str:
        """Return a field of a job, such as JobState or Restarts."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)[name]

    def until(self, job: str, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition; on timeout raise Hung with the output of the job and the daemons."""
        try:
            until(condition, what, *self.daemons)
        except Hung as hung:
            raise Hung(f"{hung}\n-- job {job}, {self.ask(job, 'JobState')}\n{self.output(job)}") from None

    def output(self, job: str) -> str:
        log = self.folder / f"job-{job}.log"
        return log.read_text() if log.exists() else "nothing"


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start two nodes, n0 and n1, with a controller on the first; stop everything at the end of the block."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        _refuse(f"{', '.join(missing)} not found")
    with hosts(2) as nodes:
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        described = [f"NodeName={host.name} NodeAddr={host.address} CPUs=2 State=UNKNOWN" for host in nodes]
        settings = _SETTINGS.format(
            machine=socket.gethostname(), controller=nodes[0].address, folder=folder, nodes="\n".join(described)
        )
        (folder / "slurm.conf").write_text(settings)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # namespaces have none to detect
        made = Cluster(nodes, folder, [])
        try:
            _start(made)
        except (Hung, OSError, subprocess.SubprocessError) as error:
            _refuse(str(error))
        yield made


def _start(made: Cluster) -> None:
    folder, first = made.folder, made.nodes[0]
    files = {name: f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "key-file", "seed-file")}
    munge = ["munged", "--foreground", "--force", *files.values(), f"--pid-file={folder}/munge.pid"]
    made.daemons.append(first.start([*munge, f"--log-file={folder}/munge.log"]))
    until((folder / "munge.socket").exists, "munge listens", *made.daemons)
    made.daemons.append(first.start(["slurmctld", "-D"], made.environment))
    for host in made.nodes:
        made.daemons.append(host.start(["slurmd", "-D", "-N", host.name], made.environment))

    def idle() -> bool:
        job = first.start(["sinfo", "--noheader", "--format=%D %t"], made.environment)
        return job.wait() == 0 and job.output.split() == ["2", "idle"]

    until(idle, "both nodes are idle", *made.daemons)


def _refuse(reason: str) -> None:
    refuse(
        f"SLURM cannot be started here: {reason}\n"
        f"`apt-get install --no-install-recommends slurm-wlm munge`, as .ci/run does; {SKIP}=1 skips these tests.",
        SKIP,
    )
