"""The kinds of faults. Each function injects one, and returns whether it did: the run may end at the same moment."""

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
from hosts import hosts, until

from faults.campaign import BOUND, LOCKSTEP, RUN, Campaign

MAX_FORKS = 2
"""Forks of one run."""


def kill_a_worker(campaign: Campaign) -> bool:
    alone = campaign.processes == 1
    if not campaign.send(signal.SIGKILL):
        return False
    if alone:
        if not campaign.was_killed():
            return False
        campaign.resume()
    return True


def kill_the_fork_server(campaign: Campaign) -> bool:
    servers = campaign.fork_servers()
    for server in servers:
        with suppress(psutil.NoSuchProcess):
            server.kill()
    return bool(servers)


def kill_in_a_save(campaign: Campaign) -> bool:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline and campaign.launcher is not None and campaign.launcher.poll() is None:
        if campaign.storage.is_saving(RUN):
            return kill_a_worker(campaign)
    return False


def kill_the_launcher(campaign: Campaign) -> bool:
    assert campaign.launcher is not None
    workers = campaign.workers()
    campaign.launcher.kill()
    if not campaign.was_killed():
        return False
    _, alive = psutil.wait_procs(workers, timeout=20.0)
    assert not alive, "workers outlived their launcher"
    campaign.resume()
    return True


def stop_and_continue(campaign: Campaign) -> bool:
    workers = campaign.workers()
    if not workers:
        return False
    victim = campaign.chance.choice(workers)
    try:
        victim.suspend()
        time.sleep(campaign.chance.uniform(0.5, 4.0))
        victim.resume()
    except psutil.NoSuchProcess:
        return False
    return True


def preempt(campaign: Campaign, resumes: bool = True) -> bool:
    assert campaign.launcher is not None
    campaign.launcher.send_signal(campaign.chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))
    campaign.expect({75, 0})  # 0: it came to its end in that moment
    stopped = campaign.launcher.returncode == 75
    if stopped and resumes:
        campaign.resume()
    return stopped


def preempt_a_worker(campaign: Campaign) -> bool:
    if not campaign.send(signal.SIGTERM):
        return False
    campaign.expect({75, 0})
    if campaign.launcher is not None and campaign.launcher.returncode == 75:
        campaign.resume()
    return True


def fail_the_storage(campaign: Campaign) -> bool:
    campaign.storage.fail(campaign.chance)
    return True


def damage_a_checkpoint(campaign: Campaign) -> bool:
    if len(campaign.storage.checkpoints(RUN)) < 2:
        return False
    assert campaign.launcher is not None
    campaign.launcher.kill()
    if not campaign.was_killed():
        return False
    campaign.storage.damage(RUN, campaign.chance)
    campaign.reached = 0
    campaign.resume()
    return True


def fork_the_run(campaign: Campaign) -> bool:
    if len(campaign.forks) == MAX_FORKS:
        return False
    name = f"fork-{len(campaign.forks)}"
    words = ["fork", f"{campaign.storage.runs_dir}/{RUN}", "--create-only", f"run.name={name}"]
    ended = subprocess.run([*LOCKSTEP, *words], capture_output=True, text=True, timeout=BOUND, env=campaign.environment)
    if ended.returncode and "has nothing to train" in ended.stderr:  # the run has reached its end meanwhile
        return False
    assert ended.returncode == 0, ended.stderr
    campaign.forks.append(name)
    return True


def take_over(campaign: Campaign, disturb: Callable[[psutil.Process], None] | None = None, kills: bool = False) -> bool:
    older = campaign.launcher
    assert older is not None
    campaign.resume()
    newer = campaign.launcher
    assert newer is not None
    if disturb is not None:
        time.sleep(campaign.chance.uniform(0.0, 8.0))  # a start takes a few seconds to load
        with suppress(psutil.NoSuchProcess):
            disturb(psutil.Process(newer.pid))
    deadline = time.monotonic() + BOUND
    while older.poll() is None and newer.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if kills:
        newer.wait(BOUND)  # a killed process may still seem to run
    if older.poll() is None and newer.poll() == -signal.SIGKILL:
        # The older start stops if the killed one had the run. It continues if it publishes another checkpoint.
        campaign.wait_for_checkpoint(lambda: older.poll() is not None, deadline)
        if older.poll() is None:
            campaign.launcher = older
            return True
    assert older.wait(BOUND) in (0, 1), f"the older start left with {older.returncode}"
    if newer.poll() == -signal.SIGKILL:
        campaign.resume()
    return True


def stall_a_start(campaign: Campaign) -> bool:
    def stall(process: psutil.Process) -> None:
        family = [process, *process.children(recursive=True)]
        for member in family:
            member.suspend()
        time.sleep(campaign.chance.uniform(0.5, 5.0))
        for member in family:
            member.resume()

    return take_over(campaign, stall)


def kill_a_start(campaign: Campaign) -> bool:
    return take_over(campaign, lambda process: process.kill(), kills=True)


def kill_the_sweep(campaign: Campaign) -> bool:
    return campaign.sweep is not None and campaign.sweep.kill(campaign.chance)


def lose_a_host(campaign: Campaign) -> bool:
    if not preempt(campaign, resumes=False):
        return False
    count = campaign.chance.choice([2, 3])
    with hosts(count + 1) as (*members, storage_host), campaign.storage.reached_from(storage_host):
        meeting = ["--nnodes", f"1:{count}", "--rdzv-endpoint", "n0:29500", "--rdzv-id", f"chaos-{time.monotonic()}"]
        words = [*LOCKSTEP, "resume", f"{campaign.storage.runs_dir}/{RUN}", *meeting]
        before = campaign.generation()
        jobs = []
        for host in members:
            surroundings = campaign.environment | campaign.storage.environment_of(host)
            jobs.append(host.start([*words, "--procs", str(campaign.chance.choice([1, 2]))], surroundings))

        def has_news() -> bool:
            return campaign.generation() > before or jobs[0].process.poll() == 0

        until(has_news, f"{count} hosts train", *jobs)
        before = campaign.generation()
        members[-1].cut()
        campaign.fault_began = time.monotonic()
        until(has_news, "the others train", *jobs)
        for job in jobs[:-1]:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGTERM)
        code = jobs[0].wait(BOUND)
        assert code in (75, 0), jobs[0].output[-5000:]
    campaign.resume()  # also where it has come to its end: then there is nothing left to do
    return True


FAULTS: list[Callable[[Campaign], bool]] = [
    kill_a_worker,
    kill_the_fork_server,
    kill_in_a_save,
    kill_the_launcher,
    stop_and_continue,
    preempt,
    preempt_a_worker,
    fail_the_storage,
    damage_a_checkpoint,
    fork_the_run,
    take_over,
    stall_a_start,
    kill_a_start,
    kill_the_sweep,
    lose_a_host,
]
WEIGHTS = dict.fromkeys(FAULTS, 8) | {lose_a_host: 2, fork_the_run: 2}
"""How often each is chosen: losing a host takes a minute."""
