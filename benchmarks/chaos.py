"""Hurt a run every few seconds, in ways chosen by a seed, and compare what it comes to with the run left in peace.

    python benchmarks/chaos.py                               # 15 faults on snake-ppo, about two minutes
    python benchmarks/chaos.py --recipe gym-ppo --faults 100 --seed 3 --log chaos.jsonl

Everything goes through the real command line: `lockstep train` and `lockstep resume` on 1 to 4 processes, exact mode.
A fault strikes once the run has published a checkpoint since the last one, so that it always comes to an end. Faults:

    kill a worker        SIGKILL; the launcher starts all again
    kill the fork server SIGKILL of the process that workers are forked from; they die with it, and all start again
    kill in a save       SIGKILL of a worker while a checkpoint is half written
    kill the launcher    SIGKILL; its workers die with it; resumed on another number of processes
    stop and go on       SIGSTOP of a worker for a while, then SIGCONT
    preempt              SIGTERM to the launcher: it must leave with 75; resumed on another number
    preempt a worker     the same, sent to one worker
    fill the disk        no byte is left for some seconds (a file system in memory; needs root)
    damage a checkpoint  the launcher is killed, a byte of the newest checkpoint flipped; resumed from the one before
    take over            a second start on another number of processes; the first must stop
    stall a start        the same, with SIGSTOP of the second start at some moment, for some seconds
    kill a start         the same, with SIGKILL of the second start at some moment; the first may go on
    lose a host          the run goes on over two hosts (network namespaces; needs root), then the second one's cable is
                         cut for good, the first goes on alone, and the run comes back to one machine
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from lockstep.checkpoint.format import hash_checkpoint
from lockstep.checkpoint.lineage import find, list_checkpoints

LOCKSTEP = [sys.executable, "-m", "lockstep"]
BOUND = 150.0
"""Seconds without a new checkpoint after which a run counts as hung."""
ITERATIONS = 160
"""Of one run. When it has ended before all faults have struck, another one begins."""


class Campaign:
    """Runs of one recipe that are hurt until enough faults have struck."""

    def __init__(self, recipe: str, faults: int, seed: int, place: Path, log: Path | None) -> None:
        self.recipe, self.wanted, self.place, self.log = recipe, faults, place, log
        self.chance = random.Random(seed)
        self.struck: dict[str, int] = {}
        self.path = place / "run"
        self.output = place / "output.txt"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.processes = 0
        self.reached = 0
        """Samples of the furthest checkpoint that was seen: no fault but damage may take it."""
        self.began = time.monotonic()

    # -- the run -------------------------------------------------------------------------------------------------------

    def words(self, name: str) -> list[str]:
        return [
            *(
                self.recipe,
                "--smoke",
                "run.reduction=exact",
                f"run.total_samples={ITERATIONS * 256}",
                "run.save_every=1024",
            ),
            *(
                "run.eval_every=8192",
                "run.log_every=4096",
                "run.collective_timeout=20",
                "algo.rollout_steps=16",
                "algo.batch_size=128",
            ),
            *("task.num_envs=16", f"run.runs_dir={self.place}", f"run.name={name}", "run.keep_last=4"),
            *(["algo.updates_per_sample=0.0625"] if "ddpg" in self.recipe else []),  # as many updates as PPO has
        ]

    def undisturbed(self) -> str:
        self._start(["train", *self.words("peace")], 1)
        assert self.launcher is not None
        code = self.launcher.wait(1200)
        assert code == 0, f"the run left in peace ended with {code}:\n{self.output.read_text()[-3000:]}"
        value = self._hash(self.place / "peace")
        shutil.rmtree(self.place / "peace")
        return value

    def disturbed(self) -> str:
        """One run from its start to its end, hurt on the way; its hash."""
        self._start(["train", *self.words("run")], self._some())
        seen = None
        while True:
            ended = self._wait_for_news(seen)
            if ended == 0:
                value = self._hash(self.path)
                shutil.rmtree(self.path)
                self.reached = 0
                return value
            if ended is not None:
                raise AssertionError(f"the run ended with {ended}:\n{self.output.read_text()[-5000:]}")
            time.sleep(self.chance.uniform(0.0, 2.0))
            if sum(self.struck.values()) < self.wanted:
                fault = self.chance.choices(FAULTS, [WEIGHTS[fault] for fault in FAULTS])[0]
                name = fault.__name__.replace("_", " ")
                before = self.processes
                if self.launcher is not None and self.launcher.poll() is None and fault(self):
                    self.struck[name] = self.struck.get(name, 0) + 1
                    self._note({"fault": name, "processes": before, "then": self.processes, "samples": self._samples()})
            seen = self._newest()

    def _start(self, words: list[str], processes: int) -> None:
        self.processes = processes
        with self.output.open("ab") as output:
            self.launcher = subprocess.Popen(
                [*LOCKSTEP, *words, "--procs", str(processes), "--max-restarts", "100"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def resume(self) -> None:
        """Go on, on another number of processes; a run that was killed before it had a config starts again."""
        if (self.path / "config.yaml").exists():
            self._start(["resume", str(self.path)], self._some())
        else:
            shutil.rmtree(self.path, ignore_errors=True)
            self._start(["train", *self.words("run")], self._some())

    def _some(self) -> int:
        return self.chance.choice([n for n in (1, 2, 3, 4) if n != self.processes])

    def _wait_for_news(self, seen: str | None) -> int | None:
        """Until there is a newer checkpoint, or the run has ended: its exit code then."""
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            assert self.launcher is not None
            if (code := self.launcher.poll()) is not None:
                return code
            furthest = self._furthest()
            assert furthest >= self.reached, f"a checkpoint at {self.reached} samples was lost; now {furthest}"
            self.reached = furthest
            if self._newest() not in (None, seen):
                return None
            time.sleep(0.1)
        raise AssertionError(f"no checkpoint for {BOUND:.0f} s:\n{self.output.read_text()[-5000:]}")

    def _newest(self) -> str | None:
        there = self.path / "checkpoints"
        names = list_checkpoints(there) if there.is_dir() else []
        # By generation first: a checkpoint after a restart is news, even if it repeats samples.
        return str(max(names, key=lambda name: (name.generation, name.samples))) if names else None

    def _furthest(self) -> int:
        there = self.path / "checkpoints"
        return max((name.samples for name in list_checkpoints(there)), default=0) if there.is_dir() else 0

    def _samples(self) -> int:
        return int((self._newest() or "0").partition("-")[0])

    def _hash(self, path: Path) -> str:
        checkpoints = path / "checkpoints"
        return hash_checkpoint(checkpoints / str(find(checkpoints)[0]))

    def _note(self, line: dict[str, object]) -> None:
        line = {"seconds": round(time.monotonic() - self.began, 1), "recipe": self.recipe} | line
        text = json.dumps(line)
        print(f"{sum(self.struck.values()):>4} of {self.wanted}  {text}", flush=True)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(text + "\n")

    # -- whom to hurt --------------------------------------------------------------------------------------------------

    def workers(self) -> list[psutil.Process]:
        """The processes that train; the launcher itself where there is one process and no other."""
        assert self.launcher is not None
        try:
            launcher = psutil.Process(self.launcher.pid)
            servers = self.fork_servers()
            forked = [worker for server in servers for worker in server.children()]
            return forked if self.processes > 1 else [launcher]
        except psutil.NoSuchProcess:
            return []

    def fork_servers(self) -> list[psutil.Process]:
        """The process that the launcher's workers are forked from."""
        assert self.launcher is not None
        try:
            return psutil.Process(self.launcher.pid).children() if self.processes > 1 else []
        except psutil.NoSuchProcess:
            return []

    def hurt(self, number: int) -> bool:
        """Send a signal to some worker; whether there was one."""
        workers = self.workers()
        if not workers:
            return False
        try:
            self.chance.choice(workers).send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def expect(self, codes: set[int]) -> None:
        """The command must end, with one of these codes."""
        assert self.launcher is not None
        try:
            code = self.launcher.wait(BOUND)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not leave:\n{self.output.read_text()[-5000:]}") from None
        assert code in codes, f"it left with {code}:\n{self.output.read_text()[-5000:]}"

    def was_killed(self) -> bool:
        """Wait for the end of the command that SIGKILL was sent to; False if it came to its end in that moment."""
        self.expect({-signal.SIGKILL, 0})
        assert self.launcher is not None
        return self.launcher.returncode != 0


def kill_a_worker(campaign: Campaign) -> bool:
    alone = campaign.processes == 1
    if not campaign.hurt(signal.SIGKILL):
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
        if any((campaign.path / "checkpoints").glob(".*.partial")):
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


def stop_and_go_on(campaign: Campaign) -> bool:
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
    if not campaign.hurt(signal.SIGTERM):
        return False
    campaign.expect({75, 0})
    if campaign.launcher is not None and campaign.launcher.returncode == 75:
        campaign.resume()
    return True


def fill_the_disk(campaign: Campaign) -> bool:
    filler = campaign.place / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 2**16)
    time.sleep(campaign.chance.uniform(0.5, 3.0))
    filler.unlink(missing_ok=True)
    return True


def damage_a_checkpoint(campaign: Campaign) -> bool:
    there = campaign.path / "checkpoints"
    if len(list_checkpoints(there)) < 2:
        return False
    assert campaign.launcher is not None
    campaign.launcher.kill()
    if not campaign.was_killed():
        return False
    newest, _ = find(there)
    path = campaign.chance.choice(sorted((there / str(newest)).iterdir()))
    content = bytearray(path.read_bytes())
    content[campaign.chance.randrange(len(content))] ^= 1 << campaign.chance.randrange(8)
    path.write_bytes(content)
    campaign.reached = 0
    campaign.resume()
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
        # The older start stops if the killed one had the run. It goes on if it publishes another checkpoint.
        seen = campaign._newest()
        while older.poll() is None and campaign._newest() == seen and time.monotonic() < deadline:
            time.sleep(0.05)
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


def lose_a_host(campaign: Campaign) -> bool:
    if not preempt(campaign, resumes=False):
        return False
    # The hosts that the tests use: this file is run from a checkout, which has them.
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("fault", "")]
    from hosts import hosts, until

    def generation() -> int:
        return max(name.generation for name in list_checkpoints(campaign.path / "checkpoints"))

    meeting = ["--nnodes", "1:2", "--rdzv-endpoint", "n0:29500", "--rdzv-id", f"chaos-{time.monotonic()}"]
    words = [*LOCKSTEP, "resume", str(campaign.path), *meeting]
    with hosts(2) as (first, second):
        before = generation()
        jobs = [host.start([*words, "--procs", str(campaign.chance.choice([1, 2]))]) for host in (first, second)]
        until(lambda: generation() > before or jobs[0].process.poll() == 0, "two hosts train", *jobs)
        before = generation()
        second.cut()
        until(lambda: generation() > before or jobs[0].process.poll() == 0, "one host trains", *jobs)
        if jobs[0].process.poll() is None:
            jobs[0].process.send_signal(signal.SIGTERM)
        code = jobs[0].wait(BOUND)
        assert code in (75, 0), jobs[0].output[-5000:]
    campaign.resume()  # also where it has come to its end: then there is nothing left to do
    return True


FAULTS: list[Callable[[Campaign], bool]] = [
    kill_a_worker,
    kill_the_fork_server,
    kill_in_a_save,
    kill_the_launcher,
    stop_and_go_on,
    preempt,
    preempt_a_worker,
    fill_the_disk,
    damage_a_checkpoint,
    take_over,
    stall_a_start,
    kill_a_start,
    lose_a_host,
]
WEIGHTS = dict.fromkeys(FAULTS, 8) | {lose_a_host: 2}
"""How often each is chosen; losing a host takes a minute."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="snake-ppo")
    parser.add_argument("--faults", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="append a line of json for every fault")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as directory:
        # A small file system of its own, so that it can be filled.
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", directory], check=False).returncode
        if mounted != 0:
            print("Nothing can be mounted here (root can): the disk is never filled, and no host is lost.")
            FAULTS.remove(fill_the_disk)
            FAULTS.remove(lose_a_host)
        try:
            campaign = Campaign(options.recipe, options.faults, options.seed, Path(directory), options.log)
            wanted = campaign.undisturbed()
            print(f"left in peace: {wanted}")
            runs = 0
            while sum(campaign.struck.values()) < options.faults:
                found = campaign.disturbed()
                runs += 1
                print(f"run {runs} ended: {found}", flush=True)
                if found != wanted:
                    print("NOT the run that was left in peace.")
                    return 1
        finally:
            if campaign.launcher is not None and campaign.launcher.poll() is None:
                campaign.launcher.kill()
            if mounted == 0:
                subprocess.run(["umount", "-l", directory], check=False)
    kinds = ", ".join(f"{count} x {name}" for name, count in sorted(campaign.struck.items()))
    print(f"{sum(campaign.struck.values())} faults in {runs} runs ({kinds}): every run ended as the one left in peace.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
