"""Inject a fault into a run every few seconds, chosen by a seed, and compare its hash with that of an undisturbed run.

    python benchmarks/chaos.py                               # 15 faults on snake-ppo, about two minutes
    python benchmarks/chaos.py --recipe gym-ppo --faults 100 --seed 3 --log chaos.jsonl
    python benchmarks/chaos.py --bucket --faults 30          # the run is in a bucket on an S3 server (moto)
    python benchmarks/chaos.py --sweep                       # a sweep trains at the same time, and is killed, too
    python benchmarks/chaos.py --all benchmarks/results/chaos --faults 42 --parallel 2
    python benchmarks/chaos.py --table benchmarks/results/chaos

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
    kill the sweep       SIGKILL of the sweep, which is started again, or of one of its trials
    lose a host          the run continues on two or three hosts (network namespaces; needs root), then the cable of the
                         last is cut for good, the others continue, and the run comes back to one machine

A line of the log has the fault, the processes before and after it, and the seconds from its beginning until the run has
a newer checkpoint: with the stop itself, and the start of another process. Each run that has ended adds a line with its
hash. A campaign that was interrupted continues after the last of these lines.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.campaign import Campaign
from faults.kinds import FAULTS, WEIGHTS, fail_the_storage, kill_the_sweep, lose_a_host
from faults.log import CampaignLog, write_table
from faults.storage import BucketStorage, DirectoryStorage
from faults.sweep import SweepUnderWay

from lockstep.registry import RECIPES

WITH_SWEEP = ("gym-ppo", "gym-sac")
"""Recipes whose campaigns of `--all` have a sweep under way."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="snake-ppo")
    parser.add_argument("--faults", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket", action="store_true", help="keep the run in a bucket")
    parser.add_argument("--sweep", action="store_true", help="train a sweep at the same time")
    parser.add_argument("--log", type=Path, help="append a line of json for every fault; continue the campaign in it")
    parser.add_argument("--all", type=Path, metavar="DIR", help="all recipes and storages; write the logs here")
    parser.add_argument("--parallel", type=int, default=1, help="campaigns of --all at a time")
    parser.add_argument("--table", type=Path, metavar="DIR", help="only write the table of the logs in a directory")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes of a campaign end with it
    if options.table is not None:
        print(write_table(options.table))
        return 0
    if options.all is not None:
        return run_all(options.all, options.faults, options.parallel)
    log = CampaignLog(options.log)
    if log.faults >= options.faults:
        return 0
    return run(options.recipe, options.faults, options.seed, options.bucket, options.sweep, log)


def run_all(directory: Path, faults: int, parallel: int) -> int:
    """Run the campaigns of all recipes as processes, and write the table. Return whether one failed."""
    running: set[subprocess.Popen[bytes]] = set()

    def run_one(campaign: tuple[int, str, bool]) -> int:
        seed, recipe, bucket = campaign
        storage = "bucket" if bucket else "directory"
        words = ["--recipe", recipe, "--seed", str(seed), "--faults", str(faults), *(["--bucket"] if bucket else [])]
        words += ["--log", str(directory / f"{recipe}-{storage}.jsonl"), *(["--sweep"] if recipe in WITH_SWEEP else [])]
        with subprocess.Popen([sys.executable, __file__, *words]) as process:
            running.add(process)
            code = process.wait()
            running.discard(process)
        print(f"{recipe} in a {storage}: {'ended' if code == 0 else f'FAILED with {code}'}", flush=True)
        return code

    campaigns = [(recipe, bucket) for recipe in RECIPES for bucket in (False, True)]
    with ThreadPoolExecutor(parallel) as pool:
        try:
            codes = list(pool.map(run_one, [(seed, *campaign) for seed, campaign in enumerate(campaigns)]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise
    print(write_table(directory))
    return int(any(codes))


def run(recipe: str, faults: int, seed: int, bucket: bool, with_sweep: bool, log: CampaignLog) -> int:
    """Run one campaign. Return 0 if every run ended as the undisturbed one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as directory:
        place, files = Path(directory), Path(directory, "files")
        files.mkdir()
        # A small file system of its own, so that it can be filled.
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(files)]
        mounted = not bucket and subprocess.run(mount, check=False).returncode == 0
        kinds = [kind for kind in FAULTS if with_sweep or kind is not kill_the_sweep]
        if not bucket and not mounted:
            print("Nothing can be mounted here (root can): the disk is never filled, and no host is lost.")
            kinds = [kind for kind in kinds if kind not in (fail_the_storage, lose_a_host)]
        storage = BucketStorage(files, 29000 + seed % 1000) if bucket else DirectoryStorage(files)
        sweep, campaign = None, None
        try:
            sweep = SweepUnderWay(place) if with_sweep else None
            campaign = Campaign(recipe, seed, place, log, storage, sweep)
            campaign.train(kinds, [WEIGHTS[kind] for kind in kinds], faults)
            if sweep is not None:
                sweep.finish()
        finally:
            if campaign is not None:
                campaign.stop()
            if sweep is not None:
                sweep.stop()
            storage.stop()
            if mounted:
                subprocess.run(["umount", "-l", str(files)], check=False)
    print(f"{log.faults} faults in {log.runs} runs: every run and fork ended as the undisturbed one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
