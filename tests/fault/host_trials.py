"""What happens to a run of several hosts, wherever its files are."""

from pathlib import Path
from typing import Protocol

from hosts import Host, Job, until
from slow_recipe import ITERATION, set_pace


class HostTrial(Protocol):
    """One run, and how to start its processes on a host."""

    pace: Path

    @property
    def samples(self) -> int:
        """Samples of the newest checkpoint."""

    def start(self, host: Host, nodes: str) -> Job: ...

    def reaches(self, iterations: int, *jobs: Job) -> None: ...

    def status(self) -> dict[str, object]: ...


def lose_a_host_and_get_it_back(trial: HostTrial, first: Host, second: Host) -> None:
    """Train on two hosts, cut the link of the second, continue on one, start the second again, and train to the end."""
    jobs = [trial.start(host, "1:2") for host in (first, second)]
    trial.reaches(2, *jobs)
    assert trial.status()["processes"] == 2
    second.cut()
    until(lambda: trial.status()["processes"] == 1, "the first host continues alone", *jobs)
    trial.reaches(trial.samples // ITERATION + 2, *jobs)
    set_pace(trial.pace, 4)  # so that the run is not finished when the host joins
    second.power_off()
    second.mend()
    jobs[1] = trial.start(second, "1:2")
    until(lambda: trial.status()["processes"] == 2, "the second host has joined", *jobs)
    set_pace(trial.pace, 0)
    ends_well(*jobs)


def ends_well(*jobs: Job) -> None:
    for job in jobs:
        assert job.wait() == 0, "\n".join(f"-- {each.host.name}\n{each.output}" for each in jobs)
