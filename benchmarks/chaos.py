"""Inject a fault into a run every few seconds, chosen by a seed, and compare its hash with that of an undisturbed run.

    python benchmarks/chaos.py                               # 15 faults on snake-ppo, about two minutes
    python benchmarks/chaos.py --recipe gym-ppo --faults 100 --seed 3 --log chaos.jsonl
    python benchmarks/chaos.py --bucket --faults 30          # the run is in a bucket on an S3 server (moto)

Everything goes through the real command line: `lockstep train`, `resume` and `fork` on 1 to 4 processes, exact mode. A
fault is injected once the run has published a checkpoint since the last one, so that it always ends. Faults:

    kill a worker        SIGKILL; the launcher starts all again
    kill the fork server SIGKILL of the process that workers are forked from; they die with it, and all start again
    kill in a save       SIGKILL of a worker while a checkpoint is half written
    kill the launcher    SIGKILL; its workers die with it; resumed on another number of processes
    stop and continue    SIGSTOP of a worker for some seconds, then SIGCONT
    preempt              SIGTERM to the launcher: it must exit with 75; resumed on another number
    preempt a worker     the same, sent to one worker
    fail the storage     no byte is left for some seconds (a file system in memory; needs root), or the S3 server fails,
                         throttles, refuses the credentials, hangs up, loses answers, or is slow
    damage a checkpoint  the launcher is killed, a bit of the newest checkpoint flipped; resumed from the one before
    take over            a second start on another number of processes; the first must stop
    stall a start        the same, with SIGSTOP of the second start at some moment, for some seconds
    kill a start         the same, with SIGKILL of the second start at some moment; the first may continue
    fork the run         a fork without changes, trained when the run has ended: it must have the same hash
    lose a host          the run continues on two hosts (network namespaces; needs root), then the cable of the second
                         is cut for good, the first continues alone, and the run comes back to one machine

A line of the log has the fault, the processes before and after it, and the seconds until the next checkpoint.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from chaos_storage import BucketStorage, DirectoryStorage, Storage

LOCKSTEP = [sys.executable, "-m", "lockstep"]
BOUND = 150.0
"""Seconds without a new checkpoint after which a run counts as hung."""
ITERATIONS = 160
"""Iterations of one run. If it ends before all faults were injected, another one begins."""
RUN = "run"
MAX_FORKS = 2
"""Forks of one run."""


class Campaign:
    """Runs of one recipe, until enough faults were injected."""

    def __init__(self, recipe: str, faults: int, seed: int, place: Path, log: Path | None, storage: Storage) -> None:
        self.recipe, self.wanted, self.place, self.log, self.storage = recipe, faults, place, log, storage
        self.chance = random.Random(seed)
        self.struck: dict[str, int] = {}
        self.forks: list[str] = []
        self._pending: tuple[float, dict[str, object]] | None = None
        """Time and log line of a fault after which no checkpoint was published yet."""
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
            *("task.num_envs=16", f"run.runs_dir={self.storage.runs_dir}", f"run.name={name}", "run.keep_last=4"),
            *(["algo.updates_per_sample=0.0625"] if "ddpg" in self.recipe else []),  # as many updates as PPO has
        ]

    def undisturbed(self) -> str:
        return self._finish(["train", *self.words("undisturbed")], "undisturbed")

    def disturbed(self) -> list[str]:
        """Train one run from its start to its end, with faults. Return its hash and those of its forks."""
        self._start(["train", *self.words(RUN)], self._some())
        seen = None
        while True:
            ended = self._wait_for_news(seen)
            self._write_pending()
            if ended == 0:
                left = self.storage.leftovers(RUN)
                assert not left, f"the run has left {left}"
                hashes = [self.storage.hash(RUN)]
                hashes += [self._finish(["resume", f"{self.storage.runs_dir}/{fork}"], fork) for fork in self.forks]
                self.storage.remove(RUN)
                self.reached, self.forks = 0, []
                return hashes
            if ended is not None:
                raise AssertionError(f"the run ended with {ended}:\n{self.output.read_text()[-5000:]}")
            time.sleep(self.chance.uniform(0.0, 2.0))
            if sum(self.struck.values()) < self.wanted:
                fault = self.chance.choices(FAULTS, [WEIGHTS[fault] for fault in FAULTS])[0]
                name = fault.__name__.replace("_", " ")
                before = self.processes
                if self.launcher is not None and self.launcher.poll() is None and fault(self):
                    self.struck[name] = self.struck.get(name, 0) + 1
                    line = {"fault": name, "processes": before, "then": self.processes, "samples": self._samples()}
                    self._pending = time.monotonic(), line
            seen = self._newest()

    def _finish(self, words: list[str], name: str) -> str:
        """Train a run to its end without faults, remove it, and return its hash."""
        self._start(words, 1)
        assert self.launcher is not None
        code = self.launcher.wait(1200)
        assert code == 0, f"{name} ended with {code}:\n{self.output.read_text()[-3000:]}"
        value = self.storage.hash(name)
        self.storage.remove(name)
        return value

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
        if self.storage.has_config(RUN):
            self._start(["resume", f"{self.storage.runs_dir}/{RUN}"], self._some())
        else:
            self.storage.remove(RUN)
            self._start(["train", *self.words(RUN)], self._some())

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
        names = self.storage.checkpoints(RUN)
        # By generation first: a checkpoint after a restart is news, even if it repeats samples.
        return str(max(names, key=lambda name: (name.generation, name.samples))) if names else None

    def _furthest(self) -> int:
        return max((name.samples for name in self.storage.checkpoints(RUN)), default=0)

    def _samples(self) -> int:
        return int((self._newest() or "0").partition("-")[0])

    def generation(self) -> int:
        return max((name.generation for name in self.storage.checkpoints(RUN)), default=0)

    def _write_pending(self) -> None:
        """Log the last fault, after which the run has published a checkpoint or ended."""
        if self._pending is None:
            return
        at, line = self._pending
        self._pending = None
        now = time.monotonic()
        storage = "bucket" if isinstance(self.storage, BucketStorage) else "directory"
        head = {"seconds": round(at - self.began, 1), "recipe": self.recipe, "storage": storage}
        text = json.dumps(head | line | {"recovered_after": round(now - at, 1)})
        print(f"{sum(self.struck.values()):>4} of {self.wanted}  {text}", flush=True)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(text + "\n")

    # -- processes -----------------------------------------------------------------------------------------------------

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

    def send(self, number: int) -> bool:
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
    ended = subprocess.run([*LOCKSTEP, *words], capture_output=True, text=True, timeout=BOUND)
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

    meeting = ["--nnodes", "1:2", "--rdzv-endpoint", "n0:29500", "--rdzv-id", f"chaos-{time.monotonic()}"]
    words = [*LOCKSTEP, "resume", f"{campaign.storage.runs_dir}/{RUN}", *meeting]
    with hosts(2) as (first, second):
        before = campaign.generation()
        jobs = [host.start([*words, "--procs", str(campaign.chance.choice([1, 2]))]) for host in (first, second)]
        until(lambda: campaign.generation() > before or jobs[0].process.poll() == 0, "two hosts train", *jobs)
        before = campaign.generation()
        second.cut()
        until(lambda: campaign.generation() > before or jobs[0].process.poll() == 0, "one host trains", *jobs)
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
    stop_and_continue,
    preempt,
    preempt_a_worker,
    fail_the_storage,
    damage_a_checkpoint,
    fork_the_run,
    take_over,
    stall_a_start,
    kill_a_start,
    lose_a_host,
]
WEIGHTS = dict.fromkeys(FAULTS, 8) | {lose_a_host: 2, fork_the_run: 2}
"""How often each is chosen: losing a host takes a minute."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="snake-ppo")
    parser.add_argument("--faults", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket", action="store_true", help="keep the run in a bucket")
    parser.add_argument("--log", type=Path, help="append a line of json for every fault")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as directory:
        place = Path(directory)
        # A small file system of its own, so that it can be filled.
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", directory]
        mounted = not options.bucket and subprocess.run(mount, check=False).returncode == 0
        storage = BucketStorage(place, 29000 + options.seed % 1000) if options.bucket else DirectoryStorage(place)
        if options.bucket:
            FAULTS.remove(lose_a_host)  # its namespaces do not reach this server; tests/fault/test_bucket.py has it
        elif not mounted:
            print("Nothing can be mounted here (root can): the disk is never filled, and no host is lost.")
            FAULTS.remove(fail_the_storage)
            FAULTS.remove(lose_a_host)
        campaign = Campaign(options.recipe, options.faults, options.seed, place, options.log, storage)
        try:
            wanted = campaign.undisturbed()
            print(f"undisturbed: {wanted}")
            runs = 0
            while sum(campaign.struck.values()) < options.faults:
                hashes = campaign.disturbed()
                runs += 1
                print(f"run {runs} and {len(hashes) - 1} forks ended: {', '.join(sorted(set(hashes)))}", flush=True)
                if set(hashes) != {wanted}:
                    print("NOT the undisturbed run.")
                    return 1
        finally:
            if campaign.launcher is not None and campaign.launcher.poll() is None:
                campaign.launcher.kill()
            if isinstance(storage, BucketStorage):
                storage.server.kill()
            if mounted:
                subprocess.run(["umount", "-l", directory], check=False)
    kinds = ", ".join(f"{count} x {name}" for name, count in sorted(campaign.struck.items()))
    print(f"{sum(campaign.struck.values())} faults in {runs} runs ({kinds}): every run ended as the undisturbed one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
